"""A launch line for torchrun, as a shell script."""

from __future__ import annotations

from ullage.formats.launch import exports, torchrun
from ullage.job.job import Job

TITLE = "a torchrun script"


def write(job: Job, comments: tuple[str, ...]) -> str:
    """The script to run on each node; MASTER_ADDR names the first where there are several."""
    head = "".join(f"# {line}\n" for line in comments)
    endpoint = '"$MASTER_ADDR"' if job.cluster.nodes > 1 else "localhost"
    return f"#!/bin/bash\n{head}set -eu\n{exports(job)}{torchrun(job, endpoint, '    ')}\n"
