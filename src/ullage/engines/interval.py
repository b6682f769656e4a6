"""How sure an estimate is: a bracket around the device's bytes, wider for each thing that is not known.

The widths are shares of reserved memory (of an upcast its bytes), chosen and not calibrated: EVIDENCE says what each is for and what was
looked at when it was set, docs/accuracy.md how often the bracket holds.
"""

from __future__ import annotations

from ullage import dtypes
from ullage.engines.base import Account
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
class Doubt:
    """A reason for a wider bracket: shares of reserved memory below and above the estimate."""

    what: str
    below: float
    above: float


EVIDENCE = {
    "model": "what remains where everything that matters is stated (a chosen width, wider than the median miss, narrower than the "
    "worst tenth)",
    "compile": "the compiler's partitioner chooses what to save; no closed form follows it exactly (a chosen width)",
    "routing": "dropless experts receive as many tokens as the router sends; the estimate takes balanced routing (a chosen width)",
    "lengths": "sequences of varying length fragment the allocator (a chosen width)",
    "option": "an option that matters and is not modelled (a chosen width)",
    "fork": "Megatron-DeepSpeed of 2022: its readings are nvidia-smi's, whole GB of some node; set by looking at its 81 records' misses",
    "upcast": "PEFT's prepare_model_for_kbit_training makes fp32 of all weights of a 4-bit model that are not packed; recipes call it or "
    "do not, and whoever writes a 16-bit precision may not know which: the high end has room for it",
    "checkpoints": "DeepSpeed's ZeRO-3 example of Megatron-LM 1.1.5 is started by scripts that pass --partition-activations and "
    "--checkpoint-in-cpu; a job that names other flags of that example and not these may have run with them: the low end has none of what "
    "checkpoints keep (DeepSpeedExamples ds_pretrain_gpt2-zero3.sh; bigscience experiments/gpt2-meg-ds-zero)",
    "fragmentation": "what is reserved and unused follows the order of every small allocation; a share of the simulated waste, set by "
    "looking at 63 pipelines read by nvidia-smi (bigscience's tables, 2022)",
}


LEAST_ABOVE = 0.05
"""No high estimate is less than this share of reserved memory above it: a search may count on it."""


def doubts(job: Job, account: Account) -> tuple[Doubt, ...]:
    """What is uncertain in a job, beside the fixed overheads outside the allocator."""
    found = [Doubt(what="model", below=0.04, above=LEAST_ABOVE)]
    if job.compile:
        found.append(Doubt(what="compile", below=0.10, above=0.06))
    if _dropless(job):
        found.append(Doubt(what="routing", below=0.05, above=0.10))
    if job.engine.name == "deepspeed" and job.stack == "megatron":
        found.append(Doubt(what="fork", below=0.12, above=0.14))
    if job.data.seq_len_mean is not None:
        found.append(Doubt(what="lengths", below=0.05, above=0.10))
    unmodelled = sum("not modelled" in warning for warning in (*job.warnings, *account.warnings))
    if unmodelled:
        found.append(Doubt(what="option", below=0.15, above=0.15))
    return tuple(found)


_OF_THE_WASTE = 0.6


def fragmentation(account: Account, reserved_bytes: int) -> Doubt:
    """The simulated waste itself is uncertain by a share of it."""
    waste = max(0, reserved_bytes - account.program.peak_bytes) / max(1, reserved_bytes)
    return Doubt(what="fragmentation", below=_OF_THE_WASTE * waste, above=_OF_THE_WASTE * waste)


def upcast_bytes(job: Job, account: Account) -> int:
    """What weights beside packed ones would take more in fp32 than in the 16 bits that the job says."""
    if job.lora is None or job.lora.base not in QUANTISED or dtypes.bits(job.precision.params) != 16:
        return 0
    return sum(item.bytes * count for item, count in account.static if item.what == FROZEN)


_OF_THE_EXAMPLE = ("split_transformers", "scattered_embeddings")
_CHECKPOINTS_GO = ("partition_activations", "cpu_checkpointing")


def checkpoint_bytes(job: Job, account: Account) -> int:
    """What checkpoints keep on the device at the peak, where it may be on the host and the job does not say."""
    options = job.engine.options
    of_the_example = job.engine.name == "deepspeed" and any(options.get(name) for name in _OF_THE_EXAMPLE)
    if not of_the_example or any(name in options for name in _CHECKPOINTS_GO):
        return 0
    live = locate_peak(account.program).live
    return sum(item.bytes * count for item, count in live.items() if item is boundary(item.bytes))


def interval(job: Job, account: Account, reserved_bytes: int, outside: tuple[Overhead, ...]) -> Interval:
    """low..high of the device's bytes: independent doubts add in squares, overheads outside the allocator in full."""
    found = (*doubts(job, account), fragmentation(account, reserved_bytes))
    below = sum(doubt.below**2 for doubt in found) ** 0.5
    above = sum(doubt.above**2 for doubt in found) ** 0.5
    low = (reserved_bytes - checkpoint_bytes(job, account)) * (1 - below) + sum(one.low_bytes for one in outside)
    high = reserved_bytes * (1 + above) + sum(one.high_bytes for one in outside) + upcast_bytes(job, account)
    return Interval(low_bytes=int(low), high_bytes=int(high))


def _dropless(job: Job) -> bool:
    keys = job.model.keys
    experts = any(keys.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return experts and not job.engine.options.get("moe_pad_expert_input_to_capacity")
