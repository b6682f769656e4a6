"""Why a plan is as fast as it is: what limits it, what the next one lost by, and what more of something would buy."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.errors import UllageError
from ullage.frozen import replace
from ullage.hardware.cluster import Cluster, Link
from ullage.job.job import Job
from ullage.planner.exact import first_violation
from ullage.planner.strategies import Found, Missed
from ullage.timing.parts import PARTS
from ullage.timing.step import StepTime, step_time
from ullage.units import format_bytes

_LEAST = 0.005
"""Of a step: smaller gains are not told."""


def strategy(job: Job) -> str:
    """``megatron zero 1, dp 8, tp 4 with sp, pp 16 x 4 chunks, micro-batch 1 x 64, recompute none``."""
    layout, engine = job.layout, job.engine
    stage = f" zero {engine.zero_stage}" if engine.name in ("deepspeed", "megatron", "fsdp1", "fsdp2") else ""
    group = f" over groups of {engine.shard_group}" if engine.shard_group else ""
    chunks = f" x {layout.vpp} chunks" if layout.vpp > 1 else ""
    degrees = (
        (layout.dp, f"dp {layout.dp}"),
        (layout.tp, f"tp {layout.tp}{' with sp' if layout.sp else ''}"),
        (layout.cp, f"cp {layout.cp}"),
        (layout.ep, f"ep {layout.ep}"),
        (layout.pp, f"pp {layout.pp}{chunks}"),
    )
    offloaded = (("optimizer", job.offload.optimizer), ("parameters", job.offload.params))
    return ", ".join(
        [
            f"{engine.name}{stage}{group}",
            *(text for degree, text in degrees if degree > 1),
            f"micro-batch {job.data.micro_batch} x {job.data.grad_accum}",
            *(f"{name} on the {place}" for name, place in offloaded if place != "none"),
            f"recompute {_recompute(job)}",
        ]
    )


def _recompute(job: Job) -> str:
    recompute = job.recompute
    if recompute.kind == "layers":
        return f"{recompute.layers} layers of each chunk" if job.layout.vpp > 1 else f"{recompute.layers} layers"
    return ", ".join(recompute.modules) if recompute.kind == "modules" else recompute.kind


def limited_by(found: Found, missed: Missed | None) -> str:
    """Memory where something better did not fit; else the part of the step that takes longest. missed: of the same goal."""
    if missed is not None and missed.value < found.value:
        return "memory"
    name, seconds = max(found.time.parts, key=lambda part: part[1])
    return f"{PARTS[name]}, {100 * seconds / found.time.step_s:.0f} % of the step"


END = {False: "high", True: "low"}
"""Of an interval: which one decides, by whether tight strategies are asked for."""


def better_but_too_large(found: Found, missed: Missed | None, *, tight: bool = False) -> Iterator[str]:
    if missed is not None and missed.value < found.value:
        job = missed.job
        if missed.on_host:
            yield f"better, but too large: {strategy(job)}; a node would need {format_bytes(missed.needed_bytes)} of its own memory"
            return
        over = missed.needed_bytes - job.cluster.device.capacity_bytes
        yield f"better, but too large: {strategy(job)}; its {END[tight]} estimate is {format_bytes(over)} above the device's memory"


def lost_by(best: Found, other: Found) -> str:
    """What of a slower plan's step takes longer, the largest first."""
    slower = other.time.step_s / best.time.step_s - 1.0
    mine, theirs = dict(best.time.parts), dict(other.time.parts)
    more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {*mine, *theirs}}
    worst = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    why = " and ".join(f"{PARTS[name]} (+{more[name]:.3g} s)" for name in worst)
    if slower <= 0:
        return f"as fast as the first to {100 * abs(slower):.2g} %"
    return (
        f"{100 * slower:.2g} % slower than the first: {why}" if why else f"{100 * slower:.2g} % slower than the first"
    )


def would_buy(found: Found) -> Iterator[str]:
    """What the same strategy would take with twice the GPUs, faster links, and half the sequence."""
    job = found.job
    for what, other in _changes(job):
        time = _timed(other)
        if time is None:
            continue
        each = time.step_s * _sequences(job) / _sequences(other)
        gain = 1.0 - each / found.time.step_s
        if abs(gain) >= _LEAST:
            yield f"{what}: {each:.4g} s a step ({-100 * gain:+.0f} %)"


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    cluster, layout, data = job.cluster, job.layout, job.data
    if data.grad_accum % 2 == 0:
        more = replace(cluster, nodes=2 * cluster.nodes)
        yield (
            "twice the nodes, as replicas",
            replace(
                job,
                cluster=more,
                layout=replace(layout, dp=2 * layout.dp),
                data=replace(data, grad_accum=data.grad_accum // 2),
            ),
        )
    if cluster.nodes > 1 and cluster.inter.bytes_per_s:
        yield "links between nodes twice as fast", replace(job, cluster=replace(cluster, inter=_twice(cluster.inter)))
    if cluster.gpus_per_node > 1 and cluster.intra.bytes_per_s:
        yield "links inside a node twice as fast", replace(job, cluster=_faster_inside(cluster))
    if data.seq_len % 2 == 0:
        yield (
            "sequences half as long, twice as many",
            replace(
                job,
                data=replace(data, seq_len=data.seq_len // 2, micro_batch=2 * data.micro_batch),
            ),
        )


def _sequences(job: Job) -> float:
    """Tokens of a step."""
    return float(job.data.seq_len * job.data.micro_batch * job.data.grad_accum * job.layout.dp)


def _twice(link: Link) -> Link:
    assert link.bytes_per_s is not None
    return replace(link, bytes_per_s=2 * link.bytes_per_s)


def _faster_inside(cluster: Cluster) -> Cluster:
    return replace(cluster, intra=_twice(cluster.intra))


def _timed(job: Job) -> StepTime | None:
    if first_violation(job) is not None:
        return None
    try:
        return step_time(job)
    except UllageError:
        return None
