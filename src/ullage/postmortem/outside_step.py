"""Causes that no account of a step holds: what an engine's account does not model, what happens before and after steps, the host."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.dtypes import size_bytes
from ullage.job.job import Job
from ullage.memory.rank import Rank
from ullage.postmortem.causes import Reason
from ullage.units import format_bytes

ROOMY = 0.9
"""Of the card: a step predicted to stay below it is not what ran out."""
_BASE_BITS = {"bf16": 16.0, "int8": 8.0, "nf4": 4 + 32 / 64, "nf4-double": 4 + 8 / 64 + 32 / (64 * 256)}
"""Bits of a frozen weight: nf4 keeps an fp32 scale for 64 weights, double quantisation 8 bits and an fp32 scale for 256 scales
(arXiv:2305.14314, section 3)."""


def base_bytes(job: Job, rank: Rank) -> int:
    """Frozen weights of a LoRA job on one rank: whole where the engine shards none, or cannot shard a quantised one.

    ZeRO-3 leaves bitsandbytes' 4- and 8-bit weights as they are; FSDP shards them (bnb_4bit_quant_storage).
    """
    assert job.lora is not None
    sharded = job.engine.name in ("fsdp1", "fsdp2") or (
        job.engine.name == "deepspeed" and job.engine.zero_stage == 3 and job.lora.base == "bf16"
    )
    whole = whole_base_bytes(job, rank)
    return whole // (job.engine.shard_group or job.layout.dp) if sharded else whole


def whole_base_bytes(job: Job, rank: Rank) -> int:
    """Frozen weights of a LoRA job as they are before any engine shards them."""
    assert job.lora is not None
    return int(rank.numel() * _BASE_BITS[job.lora.base] / 8)


def loaded_whole(job: Job) -> float:
    """What speaks for a model that was whole on every card: little where the job says that one rank loads it, to its host."""
    return 0.8 if job.engine.options.get("cpu_ram_efficient_loading") is True else 2.0


def around_steps(job: Job, rank: Rank, static_bytes: int, peak_bytes: int, capacity: int) -> Iterator[Reason]:
    """The whole model that loading or saving puts on one card: where the step fits with room, and of a frozen base that no card holds also
    where it just fits."""
    sharded = job.engine.name in ("fsdp1", "fsdp2")
    if job.layout.dp == 1 or peak_bytes > capacity:
        return
    roomy = peak_bytes <= ROOMY * capacity
    step = f"the step is predicted to take {format_bytes(peak_bytes)} of {format_bytes(capacity)}"
    fits = f"{step}, so it was before or after it" if roomy else step
    if sharded and roomy and job.lora is None:  # PEFT saves adapters alone
        whole = size_bytes(rank.numel(), job.precision.params)
        if static_bytes + whole > ROOMY * capacity:
            yield Reason(
                kind="save",
                weight=2.2,
                why=f"{fits}: a full state dict gathered on the card adds {format_bytes(whole)} to {format_bytes(static_bytes)} of states",
            )
    if sharded or (job.engine.name == "deepspeed" and job.engine.zero_stage == 3):
        whole = size_bytes(rank.numel(), "fp32" if job.precision.params == "fp32" else "bf16")
        if job.lora is not None:
            whole = whole_base_bytes(job, rank)
        if whole > ROOMY * capacity and (roomy or job.lora is not None):
            yield Reason(
                kind="load",
                weight=loaded_whole(job),
                why=f"{fits}: a model loaded whole before it is sharded takes {format_bytes(whole)} on every card",
            )


def host(job: Job, host_bytes: int) -> Iterator[Reason]:
    """States on the host against its memory; host_bytes: of one node."""
    memory = job.cluster.host_memory_bytes
    if memory is not None and host_bytes > ROOMY * memory:
        yield Reason(
            kind="host-memory",
            weight=4.0,
            why=f"states on the host take {format_bytes(host_bytes)} of a node's {format_bytes(memory)}, before loading and pinning",
        )
