"""How sure an estimate is: a bracket around the device's bytes, as wide as measured runs lay from theirs where the same was uncertain.

It has two parts. A job may mean either of two runs whose difference is known in bytes: weights are upcast or not, checkpoints are on the
device or on the host, lengths vary or do not, and what is outside the allocator is known from a least to a most. That is its Bracket. What
is uncertain beside is one of KINDS, and data/residuals.toml says of each how far beyond their brackets measurements of such jobs lay: it is
made of measured runs (validation/residuals.py, `make residuals`).
"""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Iterable
from math import inf, log
from pathlib import Path

from ullage import dtypes
from ullage.engines.base import Account
from ullage.engines.lengths import kept_bytes
from ullage.engines.quantised import FROZEN
from ullage.frozen import frozen
from ullage.hardware.overheads import Overhead
from ullage.job.adapted import QUANTISED
from ullage.job.job import Job
from ullage.memory.block import boundary
from ullage.memory.program import locate_peak


@frozen
class Interval:
    low_bytes: int
    high_bytes: int


@frozen
class Spread:
    """Where measurements lay, as shares of the least and the most that was estimated inside the allocator: low < 1 < high."""

    low: float
    high: float


TEXTS, ALL_MODELLED = "texts", "model"
KINDS = {
    "fork": "Megatron-DeepSpeed of 2022: its readings are nvidia-smi's, whole GB of some node",
    TEXTS: "layer code of transformers on one device or on replicas, as trainers fine-tune on texts: lengths vary, and what the "
    "allocator keeps follows their order",
    "routing": "Megatron's dropless experts receive as many tokens as the router sends; the estimate takes balanced routing",
    "experts": "dropless experts receive as many tokens as the router sends, and stacks compute them in ways that change from release to "
    "release; the estimate takes balanced routing",
    "compile": "the compiler's partitioner chooses what to save; no closed form follows it exactly",
    "option": "an option that is known to matter and is not modelled",
    "megatron": "everything that matters is modelled, and the code is Megatron's, whose flags say all that it does",
    ALL_MODELLED: "everything that matters is modelled, and the rest of a run (a recipe's own code, versions) is not in the job",
}
"""What is uncertain, the largest first: of a job's the first one decides, for whatever else is uncertain in it is so in its like."""

ANY = "any"
"""All kinds together: the spread of one that was measured too seldom."""

LEAST_ABOVE = 0.05
"""No high estimate is less than this share of reserved memory above it: a search may count on it. As much may what is counted tensor by
tensor be too large (padding, a table that a recipe leaves out)."""

_OF_TRAINERS = ("transformers", "liger", "unsloth")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
BALANCED = ("moe_pad_expert_input_to_capacity", "moe_router_force_load_balancing", "force_load_balance")
"""Options under which every expert receives equally many tokens, as the estimate takes it."""


def kind(job: Job, account: Account) -> str:
    """The largest uncertainty of a job: a key of KINDS."""
    return _kind(job, account.warnings)


def _kind(job: Job, warnings: tuple[str, ...]) -> str:
    """warnings: of the job's account."""
    if job.engine.name == "deepspeed" and job.stack == "megatron":
        return "fork"
    of_a_trainer = job.stack in _OF_TRAINERS and job.engine.name in ("single", "ddp")
    if of_a_trainer or job.data.seq_len_mean is not None:
        return TEXTS
    experts = any(job.model.keys.get(name) for name in _EXPERTS)
    if experts and not any(job.engine.options.get(name) for name in BALANCED):
        return "routing" if job.stack == "megatron" else "experts"
    if job.compile:
        return "compile"
    if any("not modelled" in warning for warning in (*job.warnings, *warnings)):
        return "option"
    return "megatron" if job.stack == "megatron" else ALL_MODELLED


def spread(name: str) -> Spread:
    """How far measurements lay from estimates where ``name`` (one of KINDS) was uncertain."""
    found = _measured()
    return found.get(name, found[ANY])


@functools.cache
def _measured() -> dict[str, Spread]:
    text = (Path(__file__).parent / "data" / "residuals.toml").read_text(encoding="utf-8")
    kinds = tomllib.loads(text)["kinds"]
    return {name: Spread(low=entry["low"], high=entry["high"]) for name, entry in kinds.items()}


def upcast_bytes(job: Job, account: Account) -> int:
    """What weights beside packed ones would take more in fp32 than in the 16 bits that the job says.

    PEFT's prepare_model_for_kbit_training makes fp32 of all weights of a 4-bit model that are not packed; recipes call it or do not, and
    whoever writes a 16-bit precision may not know which.
    """
    if job.lora is None or job.lora.base not in QUANTISED or dtypes.bits(job.precision.params) != 16:
        return 0
    return sum(item.bytes * count for item, count in account.static if item.what == FROZEN)


_OF_THE_EXAMPLE = ("split_transformers", "scattered_embeddings")
_CHECKPOINTS_GO = ("partition_activations", "cpu_checkpointing")


def checkpoint_bytes(job: Job, account: Account) -> int:
    """What checkpoints keep on the device at the peak, where it may be on the host and the job does not say.

    DeepSpeed's ZeRO-3 example of Megatron-LM 1.1.5 is started by scripts that pass --partition-activations and --checkpoint-in-cpu
    (DeepSpeedExamples ds_pretrain_gpt2-zero3.sh; bigscience experiments/gpt2-meg-ds-zero); a job that names other flags of that example
    and not these may have run with them.
    """
    if not _checkpoints_may_go(job):
        return 0
    live = locate_peak(account.program).live
    return sum(item.bytes * count for item, count in live.items() if item is boundary(item.bytes))


_OF_STATES = ("parameters", "buffers", "gradients", "optimizer")


def held_bytes(account: Account) -> int:
    """What is live at the peak and is no step's own: weights, gradients, states."""
    live = locate_peak(account.program).live
    return sum(item.bytes * count for item, count in live.items() if item.category in _OF_STATES)


def _checkpoints_may_go(job: Job) -> bool:
    options = job.engine.options
    of_the_example = job.engine.name == "deepspeed" and any(options.get(name) for name in _OF_THE_EXAMPLE)
    return of_the_example and not any(name in options for name in _CHECKPOINTS_GO)


def is_filled(high_bytes: int, capacity_bytes: int) -> bool:
    """Whether a high end is what the allocator's cache may take, and gives back, and not what is needed."""
    return high_bytes == _filled(capacity_bytes)


def _filled(capacity_bytes: int) -> int:
    """A card whose cache takes what is left of it."""
    return capacity_bytes - 1


@frozen
class Demand:
    """What a job asks of a card at the least, where little is known of its account: an end of its interval, from below.

    share: of what is allocated. tight: the low end, above which nothing runs; else the high one, below which all fits.
    """

    share: float
    tight: bool

    def device_bytes(self, allocated_bytes: int, outside: Iterable[Overhead]) -> int:
        return int(allocated_bytes * self.share) + sum(self._end(one) for one in outside)

    def is_over(self, device_bytes: int, capacity_bytes: int) -> bool:
        return device_bytes > capacity_bytes if self.tight else device_bytes >= capacity_bytes

    def room_bytes(self, capacity_bytes: int, outside: Overhead) -> int:
        """What may be allocated at the most."""
        return int((capacity_bytes + self.tight - self._end(outside)) / self.share) if self.share else sys.maxsize

    def _end(self, outside: Overhead) -> int:
        return outside.low_bytes if self.tight else outside.high_bytes


def demand(job: Job, *, tight: bool = False) -> Demand:
    """Of any account of a job: whether that warns of something is all that a kind reads of it."""
    kinds = [_kind(job, warnings) for warnings in ((), ("not modelled",))]
    if not tight:
        return Demand(share=min(spread(name).high for name in kinds), tight=False)
    return Demand(share=0.0 if _checkpoints_may_go(job) else min(spread(name).low for name in kinds), tight=True)


@frozen
class Bracket:
    """What a job leaves open of its device's bytes, before measured runs widen it.

    least_bytes..most_bytes: inside the allocator, and what these are shares of. needed_bytes: of the most, without what a cache only
    keeps. below_bytes, above_bytes: beside them, in full. sure_bytes: no less is allocated. capacity_bytes: of the device.
    """

    least_bytes: int
    most_bytes: int
    needed_bytes: int
    below_bytes: int
    above_bytes: int
    sure_bytes: int
    capacity_bytes: int

    def widened(self, by: Spread) -> Interval:
        """What is cached is given back before anything fails (CUDACachingAllocator.cpp, release_cached_blocks): it takes a card to its
        capacity and not above it."""
        low = max(self.least_bytes * by.low, self.sure_bytes) + self.below_bytes
        high = self.most_bytes * by.high + self.above_bytes
        if self.most_bytes > self.needed_bytes:
            high = min(high, max(self.needed_bytes * by.high + self.above_bytes, _filled(self.capacity_bytes)))
        return Interval(low_bytes=int(low), high_bytes=int(high))

    def beyond(self, measured_bytes: float) -> tuple[float, float]:
        """log of the shares of the least and of the most that was measured: what a spread's ends are held against."""
        return (
            _log_share(measured_bytes - self.below_bytes, self.least_bytes),
            _log_share(measured_bytes - self.above_bytes, self.most_bytes),
        )


def _log_share(size: float, of: int) -> float:
    return log(size / max(1, of)) if size > 0 else -inf


def bracket(
    job: Job, account: Account, reserved_bytes: int, outside: tuple[Overhead, ...], *, cached: bool = True
) -> Bracket:
    """cached: ``reserved_bytes`` are the allocator's, with its cache; else bytes of tensors alone.

    Weights, gradients and states are counted tensor by tensor: whatever is uncertain of what a step saves, no run needs less than those.
    """
    held = min(held_bytes(account), reserved_bytes)
    varies = cached and kind(job, account) == TEXTS
    return Bracket(
        least_bytes=reserved_bytes - checkpoint_bytes(job, account),
        most_bytes=reserved_bytes + (kept_bytes(job, held, reserved_bytes) if varies else 0),
        needed_bytes=reserved_bytes,
        below_bytes=sum(one.low_bytes for one in outside),
        above_bytes=sum(one.high_bytes for one in outside) + upcast_bytes(job, account),
        sure_bytes=int(held * (1 - LEAST_ABOVE)),
        capacity_bytes=job.cluster.device.capacity_bytes,
    )


def interval(job: Job, account: Account, reserved_bytes: int, outside: tuple[Overhead, ...]) -> Interval:
    """low..high of the device's bytes."""
    return bracket(job, account, reserved_bytes, outside).widened(spread(kind(job, account)))
