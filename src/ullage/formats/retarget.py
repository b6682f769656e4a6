"""A job of one engine as the nearest job of another: degrees, data, stage and recipe stay; what belongs to the old engine goes."""

from __future__ import annotations

from ullage.job.engine import STAGES
from ullage.job.job import Job
from ullage.job.options import find_option
from ullage.job.precision import SHORT_NAMES, resolve
from ullage.job.write import job_to_dict

_NEAREST_STAGE = {"fsdp1": {0: 3, 1: 2}, "fsdp2": {0: 3, 1: 2}, "megatron": {2: 1, 3: 1}}


def retargeted(job: Job, engine: str) -> dict[str, object]:
    """The document of ``job`` under ``engine``; what changed is for the caller to tell, by comparing."""
    document = job_to_dict(job)
    stack = _stack(job, engine)
    stage = job.engine.zero_stage
    allowed = STAGES[engine]
    document["engine"] = {
        "name": engine,
        "zero_stage": _NEAREST_STAGE.get(engine, {}).get(stage, stage if stage in allowed else max(allowed)),
        "shard_group": job.engine.shard_group if engine in ("fsdp1", "fsdp2", "deepspeed") else None,
        "options": {
            name: value
            for name, value in job.engine.options.as_dict().items()
            if (option := find_option(name, engine, stack)) is not None
            and option.engines != frozenset({job.engine.name})
        },
    }
    document["stack"] = stack
    if stack != job.stack:
        document["stack_version"] = None
    document["precision"] = _precision(job)
    document["optimizer"] = _optimizer(job)
    if stack == "megatron" and job.loss.kind == "full":
        document["loss"] = "vocab-parallel"
    return document


def _stack(job: Job, engine: str) -> str:
    if engine == "megatron":
        return "megatron"
    return "transformers" if job.stack == "megatron" else job.stack


def _precision(job: Job) -> object:
    """The short name, which each engine resolves in its own way; the mapping where the job's is none of them."""
    for name in SHORT_NAMES:
        if resolve(name, job.engine.name, job.engine.options, job.stack) == job.precision:
            return name
    return job_to_dict(job)["precision"]


def _optimizer(job: Job) -> dict[str, object]:
    """Without the implementation: each engine has its own default."""
    return {"name": job.optimizer.name, "state": job.optimizer.state, "paged": job.optimizer.paged}
