"""The verbs. A command line, a web page and a notebook call these and nothing below."""

from __future__ import annotations

from ullage.engines.estimate import Estimate, estimate
from ullage.job.read import read_job

__all__ = ["Estimate", "estimate", "read_job"]
