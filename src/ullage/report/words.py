"""Small phrases that several reports use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ullage.units import format_count, gib

if TYPE_CHECKING:
    from ullage.engines.estimate import Estimate, RankEstimate
    from ullage.job.job import Job
    from ullage.memory.ledger import Line
    from ullage.timing.step import StepTime

PASSES = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "gradients of the weights"}
AFTER = "reductions and optimizer"
VERDICTS = {"fits": "FITS", "tight": "TIGHT", "oom": "OUT OF MEMORY"}


def in_gib(n_bytes: float) -> str:
    """``47.90 GiB``: one unit throughout a report, so that its numbers can be compared at a glance."""
    size = gib(n_bytes)
    return "<0.01 GiB" if 0 < size < 0.005 else f"{size:,.2f} GiB"


def in_unit(quantity: str, value: float) -> str:
    """A measured or predicted value of a truth record's quantity: memory in GiB, times as they are."""
    if quantity == "step_s":
        return f"{value:,.3f} s"
    return f"{value:,.0f} tok/s" if quantity == "tokens_per_s_per_gpu" else in_gib(value)


def rate(time: StepTime) -> str:
    """``5,762 tokens/s a GPU, 41.0 % of the peak (MFU)``, and with what is run again where anything is (HFU)."""
    again = f", {100 * time.hfu:.1f} % with what is recomputed (HFU)" if time.hfu > time.mfu else ""
    return f"{time.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, {100 * time.mfu:.1f} % of the peak (MFU){again}"


def share(part: float, whole: float) -> str:
    """A percentage; what is there but rounds to nothing is said to be."""
    if not whole:
        return ""
    percent = 100 * part / whole
    return "<1 %" if 0 < percent < 1 else f"{percent:.0f} %"


def error(ratio: float) -> str:
    """A relative error: ``+1.2 %``."""
    return f"{100 * ratio:+.1f} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def numbers(found: Iterable[range]) -> str:
    """Ranges of ranks or stages, adjoining ones joined: ``0-7, 16``."""
    joined: list[list[int]] = []
    for one in sorted(found, key=lambda one: one.start):
        if joined and joined[-1][1] == one.start:
            joined[-1][1] = one.stop
        else:
            joined.append([one.start, one.stop])
    return ", ".join(f"{start}" if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in joined)


def ranks(found: Sequence[range]) -> str:
    """``rank 3`` or ``ranks 0-7``."""
    single = len(found) == 1 and len(found[0]) == 1
    return f"{'rank' if single else 'ranks'} {numbers(found)}"


def cluster(job: Job) -> str:
    machine = job.cluster
    return f"{f'{machine.nodes}x' if machine.nodes > 1 else ''}{machine.gpus_per_node}x{machine.device.name}"


def settings(job: Job) -> list[str]:
    """What decides the memory: engine, layers, data, degrees above 1, recompute."""
    layout, data = job.layout, job.data
    stage = f" zero {job.engine.zero_stage}" if job.engine.name in ("deepspeed", "megatron", "fsdp1", "fsdp2") else ""
    version = f" {job.stack_version}" if job.stack_version else ""
    degrees = [(name, getattr(layout, name)) for name in ("dp", "tp", "cp", "pp", "vpp", "ep")]
    batch = [f"seq {data.seq_len}", f"micro-batch {data.micro_batch} x {data.grad_accum}"]
    if job.stack == "traced":  # whose factory runs a batch of its own
        batch = [f"its own batch x {data.grad_accum}"]
    return [
        f"engine {job.engine.name}{stage}",
        f"{job.stack}{version} layers",
        *batch,
        " ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one GPU",
        f"recompute {job.recompute.kind}",
    ]


def whole(parts: Iterable[str], width: int) -> str:
    """Parts with commas between, on lines of ``width``, no part broken over two."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) < width:
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(part)
    return "\n".join(lines)


def worst(estimate: Estimate) -> RankEstimate:
    """The pipeline stage of the peak."""
    return next(one for one in estimate.ranks if estimate.peak.rank in one.ranks)


def size_of_model(estimate: Estimate) -> str:
    trainable = estimate.trainable_parameters
    some = "" if trainable == estimate.parameters else f" ({format_count(trainable)} trained)"
    return f"{format_count(estimate.parameters)} parameters{some}"


CACHE_FILLS = (
    "what lengths that vary leave in the allocator's cache may fill the card, and is given back before anything fails"
)


def verdict(estimate: Estimate) -> str:
    """The verdict's reason, as a sentence."""
    peak, capacity = estimate.peak, estimate.capacity_bytes
    if estimate.verdict == "fits" and estimate.cache_fills:
        return f"It fits; {CACHE_FILLS}."
    if estimate.verdict == "fits":
        return f"Even the high estimate leaves {in_gib(capacity - peak.high_bytes)} of {in_gib(capacity)} free."
    there = estimate.job.cluster.host_memory_bytes
    if estimate.is_over_host and there is not None:
        return (
            f"A node's own memory is {in_gib(there)}, and what waits there takes {in_gib(estimate.host_bytes)}; "
            "cluster.host_memory says how much yours have."
        )
    if estimate.verdict == "oom":
        return (
            f"Even the low estimate is {in_gib(peak.low_bytes - capacity)} more than the {in_gib(capacity)} there are."
        )
    return (
        f"The capacity, {in_gib(capacity)}, lies between the low and the high estimate, "
        f"{in_gib(peak.low_bytes)} and {in_gib(peak.high_bytes)}."
    )


def outside(estimate: Estimate) -> list[tuple[str, int, str]]:
    """What lies between reserved and device, equal things together: what, bytes, provenance."""
    counts: dict[tuple[str, int, str], int] = {}
    for one in estimate.outside:
        counts[one] = counts.get(one, 0) + 1
    return [
        (f"{count} x {what}" if count > 1 else what, count * size, provenance)
        for (what, size, provenance), count in counts.items()
    ]


def named(line: Line) -> str:
    return f"{line.count} x {line.what}" if line.count > 1 else line.what
