"""Degrees against the cluster, the model's dimensions and what each engine can do."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.job.architecture import Architecture
from ullage.job.checks import Violation, contradiction, divisors_of, infeasible, warning
from ullage.job.job import Job

# The axes besides dp that an engine has. single: layers over GPUs of one process (device_map), no pipelining.
# ddp, zero1: torch composes neither with the other axes (torchtitan refuses DDP with any of them).
_AXES: dict[str, frozenset[str]] = {
    "single": frozenset(),
    "ddp": frozenset(),
    "zero1": frozenset(),
    "fsdp1": frozenset({"tp", "ep", "etp"}),
    "fsdp2": frozenset({"tp", "cp", "pp", "ep", "etp"}),
    "deepspeed": frozenset({"tp", "cp", "pp", "ep", "etp"}),
    "megatron": frozenset({"tp", "cp", "pp", "ep", "etp"}),
}
# These hold a key-value head on several tensor-parallel ranks where there are fewer heads than ranks.
_REPLICATES_KV_HEADS = frozenset({"megatron", "deepspeed"})

# Megatron's --make-vocab-size-divisible-by.
_VOCAB_MULTIPLE = 128


def _axes(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout, engine = job.layout, job.engine
    if engine.name == "single" and layout.dp > 1:
        yield contradiction(
            "layout.dp", layout.dp, "engine single has one data-parallel rank", "use ddp, fsdp2 or deepspeed"
        )
    for axis in ("tp", "cp", "pp", "ep", "etp"):
        degree = getattr(layout, axis)
        if degree == 1 or axis in _AXES[engine.name]:
            continue
        if engine.name == "single" and axis == "pp":
            if "device_map" not in engine.options:
                yield contradiction(
                    "layout.pp",
                    degree,
                    "engine single is one process",
                    "set engine.options.device_map: auto, or another engine",
                )
            continue
        able = [name for name, axes in _AXES.items() if axis in axes]
        yield contradiction(f"layout.{axis}", degree, f"engine {engine.name} has no {axis}", f"use {', '.join(able)}")


def _world(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout, gpus = job.layout, job.cluster.gpus
    if layout.world == gpus:
        return
    others = layout.tp * layout.cp * layout.pp
    degrees = f"dp x tp x cp x pp = {layout.dp} x {layout.tp} x {layout.cp} x {layout.pp} = {layout.world}"
    if job.engine.name == "single" and layout.world == 1:
        yield infeasible(
            "cluster", f"{gpus} GPUs", "engine single uses one of them", "use one GPU, or engine ddp or fsdp2"
        )
    elif gpus % others:
        key = max(("tp", "cp", "pp"), key=lambda axis: int(getattr(layout, axis)))
        what = f"tp x cp x pp = {others} does not divide the cluster's {gpus} GPUs"
        yield infeasible(f"layout.{key}", getattr(layout, key), what, f"use degrees whose product divides {gpus}")
    else:
        what = f"{degrees}, and the cluster has {gpus} GPUs"
        yield infeasible("layout.dp", layout.dp, what, f"use {gpus // others}, or leave dp out")


def _heads(job: Job, arch: Architecture) -> Iterator[Violation]:
    tp = job.layout.tp
    if tp == 1:
        return
    if arch.heads and arch.heads % tp:
        yield infeasible(
            "layout.tp", tp, f"{arch.heads} attention heads do not divide by {tp}", divisors_of(arch.heads)
        )
    elif arch.kv_heads and arch.kv_heads % tp and not arch.latent_attention:
        if tp % arch.kv_heads or job.engine.name not in _REPLICATES_KV_HEADS:
            what = f"{arch.kv_heads} key-value heads do not divide by {tp}"
            yield infeasible("layout.tp", tp, what, divisors_of(arch.kv_heads))
        else:
            what = f"each of the {arch.kv_heads} key-value heads is held by {tp // arch.kv_heads} ranks"
            yield warning("layout.tp", tp, what, f"use at most {arch.kv_heads} to hold each once")


def _scan(job: Job, arch: Architecture) -> Iterator[Violation]:
    """Each rank of a Mamba-2 mixer has whole heads and whole groups of them (Megatron-Core ssm/mamba_mixer.py); of the groups context
    parallelism takes some too, or repeats them (mamba_context_parallel.py)."""
    layout, heads, groups = job.layout, arch.scan_heads, arch.scan_groups
    if heads is None or groups is None:
        return
    for number, name in ((heads, "heads"), (groups, "groups")):
        if number % layout.tp:
            what = f"{number} {name} of the scan do not divide by {layout.tp}"
            yield infeasible("layout.tp", layout.tp, what, divisors_of(number))
            return
    if (heads // layout.tp) % layout.cp:
        what = f"{heads // layout.tp} heads of the scan on a rank do not divide by {layout.cp}"
        yield infeasible("layout.cp", layout.cp, what, divisors_of(heads // layout.tp))
    few, many = sorted((groups // layout.tp, layout.cp))
    if many % few:
        what = (
            f"{groups // layout.tp} groups of the scan on a rank are neither a divisor of {layout.cp} nor divide by it"
        )
        yield infeasible("layout.cp", layout.cp, what, divisors_of(groups // layout.tp))


def _widths(job: Job, arch: Architecture) -> Iterator[Violation]:
    """Frameworks pad the vocabulary before they cut it, so the number written must be the padded one."""
    tp = job.layout.tp
    padded = -(-(arch.vocab or 0) // (_VOCAB_MULTIPLE * tp)) * _VOCAB_MULTIPLE * tp
    for number, name, remedy in (
        (arch.vocab, "vocabulary entries", f"write it as padded, such as vocab_size: {padded}"),
        (arch.ffn, "feed-forward channels", divisors_of(arch.ffn or 1)),
    ):
        if number and number % tp:
            yield infeasible("layout.tp", tp, f"{number} {name} do not divide by {tp}", remedy)


def _sequence_parallel(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout, seq_len = job.layout, job.data.seq_len
    if layout.sp and layout.tp == 1:
        yield contradiction(
            "layout.sp", True, "divides the sequence over the tp group, and tp is 1", "set tp, or leave sp out"
        )
    elif layout.sp and (seq_len // layout.cp) % layout.tp:
        what = f"{seq_len // layout.cp} tokens per rank do not divide by tp = {layout.tp}"
        yield infeasible("layout.sp", True, what, f"use a seq_len that is a multiple of {layout.tp * layout.cp}")


def _context_parallel(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout, seq_len = job.layout, job.data.seq_len
    cp = layout.cp
    if cp == 1:
        return
    # ring and all-gather give each rank two slices, one early and one late, so that causal work is even
    slices = cp if layout.cp_kind == "ulysses" else 2 * cp
    if seq_len % slices:
        below = seq_len // slices * slices
        what = f"data.seq_len = {seq_len} does not divide into {slices} slices"
        yield infeasible("layout.cp", cp, what, f"use seq_len {below or slices} or {below + slices}")
    if layout.cp_kind == "ulysses" and arch.heads and arch.heads % (cp * layout.tp):
        what = f"{arch.heads} attention heads do not divide by cp x tp = {cp} x {layout.tp}"
        yield infeasible("layout.cp", cp, what, "use a smaller cp, or cp_kind ring")
    if job.engine.name == "deepspeed" and layout.cp_kind != "ulysses":
        yield contradiction(
            "layout.cp_kind", layout.cp_kind, "DeepSpeed's context parallelism is Ulysses", "use ulysses"
        )


def _experts(job: Job, arch: Architecture) -> Iterator[Violation]:
    layout = job.layout
    if layout.ep > 1 and not arch.experts:
        yield infeasible("layout.ep", layout.ep, f"{job.model.name} has no experts", "leave ep out")
    elif layout.ep > 1 and arch.experts and arch.experts % layout.ep:
        yield infeasible(
            "layout.ep", layout.ep, f"{arch.experts} experts do not divide by {layout.ep}", divisors_of(arch.experts)
        )
    ranks = layout.dp * layout.cp * layout.tp
    if ranks % (layout.ep * layout.etp):
        what = f"ep x etp = {layout.ep} x {layout.etp} does not divide dp x cp x tp = {ranks}"
        yield infeasible("layout.ep", layout.ep, what, f"use a divisor of {ranks // layout.etp or 1}")


def _shard_group(job: Job, arch: Architecture) -> Iterator[Violation]:
    group, ranks = job.engine.shard_group, job.layout.dp * job.layout.cp
    if group is None:
        return
    if job.engine.name in ("single", "ddp", "zero1"):
        yield contradiction(
            "engine.shard_group", group, f"engine {job.engine.name} has no shard groups", "leave it out"
        )
    elif ranks % group:
        yield infeasible("engine.shard_group", group, f"does not divide dp x cp = {ranks}", divisors_of(ranks))


# What the model forbids comes before what the cluster forbids: it is no matter of more GPUs.
CHECKS = (
    _axes, _heads, _scan, _widths, _world, _sequence_parallel, _context_parallel, _experts, _shard_group,
)  # fmt: skip
