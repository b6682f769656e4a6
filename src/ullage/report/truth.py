"""A measured run as a file of one truth record, which ``ullage validate`` reads (docs/job.md)."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from ullage.job.write import job_to_dict
from ullage.units import gib

if TYPE_CHECKING:
    from ullage.job.job import Job
    from ullage.train.answers import Measured

_ON_CPU = (
    "Storages tracked on CPU processes with gloo, rounded as CUDA's allocator rounds, and {workspace:,} bytes of workspace that the "
    "libraries of the job's device allocate, which are not measured."
)


def records(found: Measured, job: Job) -> str:
    """JSON. Of the CPU a grade of B: the job's device, and the workspace that its libraries take, are assumed."""
    written = job_to_dict(job)
    on_cpu = found.worst.reserved_bytes is None
    name = hashlib.sha256(json.dumps([written, found.versions, found.device]).encode()).hexdigest()[:12]
    measured: dict[str, object] = {
        "rank": "max",
        "allocated_gib": gib(found.worst.allocated_bytes + found.workspace_bytes),
    }
    if not on_cpu:
        measured |= {
            "reserved_gib": gib(max(one.reserved_bytes or 0 for one in found.ranks)),
            "device_gib": gib(max(one.device_bytes or 0 for one in found.ranks)),
            "step_s": found.step_s,
            "tokens_per_s_per_gpu": found.tokens_per_s_per_rank,
        }
    record = {
        "id": f"measured-{job.engine.name}-{name}",
        "source": f"ullage measure, {found.device}, {', '.join(found.versions)}",
        "grade": "B" if on_cpu else "A",
        "job": written,
        "measured": measured,
        "fits": None if on_cpu else True,
        "assumed": ["cluster", "workspace"] if on_cpu else [],
        "notes": _ON_CPU.format(workspace=found.workspace_bytes) if on_cpu else "",
    }
    return json.dumps([record], indent=1) + "\n"
