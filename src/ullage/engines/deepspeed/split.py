"""How DeepSpeed's PipelineModule cuts layers into stages.

Source: runtime/pipe/module.py _partition_layers and runtime/utils.py partition_balanced: stages are filled up to the smallest largest
weight, so that the last stage gets what is left (78 layers on 12 stages: eleven times 7, then 1).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.engines.deepspeed.passes import uses_pipeline_engine
from ullage.job.job import Job, Layout


def layout(job: Job, layers: int) -> Layout:
    """The job's layout with the layers of every stage written out, where the pipeline engine cuts them."""
    if job.layout.pp_split is not None or job.layout.pp == 1 or not uses_pipeline_engine(job):
        return job.layout
    method = str(job.engine.options.get("partition_method", "type:transformer")).lower()
    if not method.startswith("type:"):
        return job.layout
    ends = "embedding" in method  # embedding and head count as layers
    split = balanced(layers + 2 * ends, job.layout.pp)
    if ends:
        split[0] -= 1
        split[-1] -= 1
    return replace(job.layout, pp_split=tuple(split)) if min(split) >= 0 else job.layout


def balanced(items: int, stages: int) -> list[int]:
    """Items of each stage, all weighing the same: the smallest largest stage, filled from the front."""
    most = -(-items // stages)
    split = []
    for _ in range(stages):
        split.append(min(most, items))
        items -= split[-1]
    return split
