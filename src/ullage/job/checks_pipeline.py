"""Layers over stages, chunks over ranks, micro-batches over a schedule."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.job.architecture import Architecture
from ullage.job.checks import Violation, contradiction, infeasible, warning
from ullage.job.job import Job

# How many chunks per rank a schedule is made for: (least, most); None: any number.
_CHUNKS: dict[str, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved-1f1b": (2, None),
    "zb-h1": (1, 1),
    "zb-h2": (1, 1),
    "zbv": (2, 2),
    "v-half": (2, 2),
    "v-min": (2, 2),
    "dualpipe": (1, 1),
    "dualpipev": (2, 2),
}


GROUP_OPTIONS = ("microbatch_group_size_per_virtual_pipeline_stage", "microbatch_group_size_per_vp_stage")
"""Megatron's flag by its two names (megatron/training/arguments.py, core/model_parallel_config.py)."""


def _schedule(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout = job.layout
    if layout.pp == 1:
        if layout.vpp > 1:
            yield contradiction(
                "layout.vpp", layout.vpp, "there is no pipeline to interleave, pp is 1", "set pp, or leave vpp out"
            )
        elif layout.schedule != "1f1b":
            yield contradiction(
                "layout.schedule", layout.schedule, "there is no pipeline, pp is 1", "set pp, or leave it out"
            )
        return
    least, most = _CHUNKS[layout.schedule]
    if layout.vpp < least or (most is not None and layout.vpp > most):
        wanted = str(least) if least == most else f"{least} or more"
        remedy = "use schedule interleaved-1f1b" if most == 1 and layout.vpp > 1 else f"set vpp to {least}"
        what = f"schedule {layout.schedule} runs {wanted} model chunk{'s' if wanted != '1' else ''} per rank"
        yield contradiction("layout.vpp", layout.vpp, what, remedy)
    if layout.schedule == "dualpipe" and layout.pp % 2:
        yield infeasible(
            "layout.pp", layout.pp, "DualPipe runs from both ends and needs an even number of ranks", "use an even pp"
        )


def _layers(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout = job.layout
    chunks = layout.pp * layout.vpp
    layers, split = arch.layers, layout.pp_split
    if split is None:
        if layers and layers % chunks and job.engine.name != "single":
            yield infeasible(
                "layout.pp",
                layout.pp,
                f"{layers} layers do not divide evenly into {_stages(job)}",
                _suggest(layers, job),
            )
        return
    if len(split) not in (layout.pp, chunks):
        wanted = str(layout.pp) if chunks == layout.pp else f"{layout.pp} (per rank) or {chunks} (per virtual stage)"
        yield infeasible(
            "layout.pp_split", split, f"has {len(split)} entries for {_stages(job)}", f"write {wanted} numbers"
        )
    elif layers and sum(split) != layers:
        yield infeasible(
            "layout.pp_split",
            split,
            f"adds up to {sum(split)}, and the model has {layers} layers",
            _suggest(layers, job),
        )


def _stages(job: Job) -> str:
    layout = job.layout
    return f"{layout.pp} stages" if layout.vpp == 1 else f"{layout.pp} x {layout.vpp} = {layout.pp * layout.vpp} stages"


def _suggest(layers: int, job: Job) -> str:
    """A split that gives the first and the last stage less where it can: they hold the embedding and the head."""
    stages = job.layout.pp * job.layout.vpp
    if layers < stages:
        return f"use at most {layers} stages"
    base, extra = divmod(layers, stages)
    sizes = [base] * stages
    middle_out = sorted(range(stages), key=lambda stage: abs(2 * stage - (stages - 1)))
    for stage in middle_out[:extra]:
        sizes[stage] += 1
    text = ", ".join(map(str, sizes))
    return (
        f"write layout.pp_split: [{text}]" if stages <= 16 else "write layout.pp_split as a list, or change pp or vpp"
    )


def _micro_batches(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout, count = job.layout, job.data.grad_accum
    if layout.pp == 1 or job.engine.name == "single":
        return
    if layout.schedule == "interleaved-1f1b":
        yield from _interleaved(job)
    if layout.schedule in ("dualpipe", "dualpipev") and count < 2 * layout.pp:
        what = f"{layout.schedule} on {layout.pp} ranks needs at least {2 * layout.pp} micro-batches"
        yield infeasible("data.grad_accum", count, what, f"use {2 * layout.pp} or more")
    elif count < layout.pp:
        what = f"fewer micro-batches than the {layout.pp} stages of the pipeline, which then stand idle"
        yield warning("data.grad_accum", count, what, f"use {layout.pp} or more")


def _interleaved(job: Job) -> Iterator[Violation]:
    """Megatron: whole groups of micro-batches, the last at least pp long (schedules.py). torch: whole rounds."""
    layout, count = job.layout, job.data.grad_accum
    if job.engine.name == "fsdp2":
        rounds = max(1, count // layout.pp)
        if count % rounds:
            what = f"does not divide into {rounds} rounds of the {layout.pp} stages"
            yield infeasible("data.grad_accum", count, what, f"use a multiple of {layout.pp}")
        return
    options = job.engine.options
    group = next((size for name in GROUP_OPTIONS if isinstance(size := options.get(name), int)), layout.pp)
    if group < layout.pp:
        name = next(name for name in GROUP_OPTIONS if name in options)
        yield infeasible(f"engine.options.{name}", group, f"is below pp = {layout.pp}", f"use {layout.pp} or more")
    elif count < group or 0 < count % group < layout.pp:
        what = f"interleaving takes micro-batches in groups of {group}, the last of at least {layout.pp}"
        below = count // group * group
        yield infeasible("data.grad_accum", count, what, f"use {below or group} or {below + group}")


CHECKS = (_schedule, _layers, _micro_batches)
