"""Bytes that a strategy keeps for parameters, gradients and optimizer at the least: what is proven before anything is replayed.

The table is ZeRO's (arXiv 1910.02054, section 5): which of the three an engine's stage divides over the data-parallel group. It leaves
out padding, rounding, buffers and buckets, so no account is below it (tests/planner holds it against each engine's own).
"""

from __future__ import annotations

from functools import lru_cache

from ullage import dtypes
from ullage.engines.optimizer import MOMENTS
from ullage.frozen import frozen
from ullage.job.adapted import PACKED, QUANTISED, model_type
from ullage.job.job import EngineName, Job, Offload, Optimizer, Precision
from ullage.model.graph import Param
from ullage.timing.partly import of_adapters

_ALONE = ("fsdp1", "fsdp2")
"""Engines with one copy of a parameter: the master, cast for each gather."""


@frozen
class Divided:
    """From which ZeRO stage on an engine divides each kind of state; None: never."""

    parameters: int | None = None
    gradients: int | None = None
    optimizer: int | None = None


DIVIDED = {
    "single": Divided(),
    "ddp": Divided(),
    "zero1": Divided(optimizer=1),
    "fsdp1": Divided(parameters=1, gradients=1, optimizer=1),
    "fsdp2": Divided(parameters=1, gradients=1, optimizer=1),
    "deepspeed": Divided(parameters=3, gradients=2, optimizer=1),
    "megatron": Divided(parameters=3, gradients=2, optimizer=1),
}


@frozen
class BytesPerElement:
    """kept: from the second step on, whatever the moment. end: with the gradients, when the last backward is done."""

    kept: float
    end: float


EachElement = tuple[BytesPerElement, BytesPerElement, BytesPerElement]
"""Of dense parameters, of experts', and of a byte of what is frozen."""


def bytes_per_element(job: Job, shards: int) -> BytesPerElement:
    """Of one element of a parameter on one rank, ``shards`` ranks dividing it."""
    return _bytes(job.engine.name, job.engine.zero_stage, job.precision, job.optimizer, job.offload, shards)


def each_element(job: Job) -> EachElement:
    """Divided as the job divides them."""
    layout, group, trained = job.layout, job.engine.shard_group, of_adapters(job)
    share = _frozen_share(job)
    return (
        bytes_per_element(trained, group or layout.dp * layout.cp),
        bytes_per_element(trained, group or max(1, layout.expert_dp)),
        BytesPerElement(kept=share, end=share),
    )


def frozen_bytes(job: Job, param: Param, numel: int) -> float:
    """What is kept of a frozen parameter where it is whole: packed weights without their scales."""
    if param.elements in QUANTISED:
        return numel * (0.5 if param.elements in PACKED else 1.0)
    kept_as = (model_type(job), "fp8" if _eight_bit(job.engine.name, job.precision) else job.precision.params)
    return numel * min(map(dtypes.bits, kept_as)) / 8


def _frozen_share(job: Job) -> float:
    """Of frozen bytes on one rank: all, or what sharded parameters leave; experts, over fewer ranks, taken as the others."""
    if job.offload.params != "none":
        return 0.0
    least = DIVIDED[job.engine.name].parameters
    divided = least is not None and job.engine.zero_stage >= least
    return 1 / (job.engine.shard_group or job.layout.dp * job.layout.cp) if divided else 1.0


def _eight_bit(name: EngineName, precision: Precision) -> bool:
    """By rows at least, and those outside the linears are more."""
    return name == "megatron" and precision.fp8_params


@lru_cache(maxsize=4096)
def _bytes(
    name: EngineName, stage: int, precision: Precision, optimizer: Optimizer, offload: Offload, shards: int
) -> BytesPerElement:
    masters = dtypes.bits(precision.master) / 8 if precision.master else 0.0
    parameters = dtypes.bits("fp8" if _eight_bit(name, precision) else precision.params) / 8
    copies = 0.0 if masters == 0.0 or precision.master == precision.params else masters
    if name in _ALONE:
        parameters, copies = masters or parameters, 0.0
    states = copies + _moments(optimizer)
    if offload.optimizer != "none":
        states = 0.0
    if offload.params != "none":
        parameters = 0.0
    gradients = min(dtypes.bits(precision.grads), dtypes.bits(precision.params)) / 8
    if offload.optimizer != "none" or offload.params != "none":
        gradients = 0.0
    divided = DIVIDED[name]

    def over(least: int | None) -> int:
        return shards if least is not None and stage >= least else 1

    kept = parameters / over(divided.parameters) + states / over(divided.optimizer)
    at_end = gradients / over(divided.gradients)
    if name == "megatron":  # main gradients have a buffer of their own for the whole run
        kept += dtypes.bits(precision.grads) / 8 / over(divided.gradients)
        at_end = 0.0
    return BytesPerElement(kept=kept, end=kept + at_end)


def _moments(optimizer: Optimizer) -> float:
    if optimizer.paged:
        return 0.0
    bits = 8 if optimizer.state == "8bit" else dtypes.bits(optimizer.state)
    count = 2 if optimizer.name in ("adam", "adamw") else len(MOMENTS.get(optimizer.name, ()))
    return count * bits / 8
