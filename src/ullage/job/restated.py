"""Options that say again, in an engine's words, what a key of the job says: the two must agree, or the job is two jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ullage.errors import Contradiction
from ullage.job import recurrent
from ullage.job.fields import show
from ullage.job.job import Job

_Agrees = Callable[[object, Job], bool]

_FSDP1_STAGES = {"FULL_SHARD": (3,), "HYBRID_SHARD": (3,), "SHARD_GRAD_OP": (2,), "_HYBRID_SHARD_ZERO2": (2,)}
_CP_COMM = {"a2a": "ulysses", "p2p": "ring", "a2a+p2p": "ring", "all_gather": "allgather", "allgather": "allgather"}
_RECOMPUTE_OF_GRANULARITY = {"full": ("full", "layers", "every", "sqrt"), "selective": ("selective", "modules")}


def _reshard(value: object, job: Job) -> bool:
    if value == "default":
        return True
    return job.engine.zero_stage == (2 if value in (False, "never") else 3)


def _granularity(value: object, job: Job) -> bool:
    if job.engine.options.get("recompute_modules") == ():
        return job.recompute.kind == "none"  # selective over no module is how recipes switch it off
    return job.recompute.kind in _RECOMPUTE_OF_GRANULARITY.get(str(value), (job.recompute.kind,))


def _modules(value: object, job: Job) -> bool:
    if job.recompute.kind != "modules" or not isinstance(value, tuple):
        return True
    return set(value) == set(job.recompute.modules)


# option -> (the key that says the same, does its value agree with the job?)
_RULES: dict[str, tuple[str, _Agrees]] = {
    "use_distributed_optimizer": (
        "engine.zero_stage",
        lambda value, job: job.engine.name != "megatron" or value is (job.engine.zero_stage >= 1),
    ),
    "use_megatron_fsdp": ("engine.zero_stage", lambda value, job: value is True or job.engine.zero_stage <= 1),
    "sharding_strategy": (
        "engine.zero_stage",
        lambda value, job: job.engine.zero_stage in _FSDP1_STAGES.get(str(value).upper(), (job.engine.zero_stage,)),
    ),
    "reshard_after_forward": ("engine.zero_stage", _reshard),
    "zero_hpz_partition_size": (
        "engine.shard_group",
        lambda value, job: value == 1 or job.engine.shard_group in (None, value),
    ),
    "recompute_granularity": ("recompute", _granularity),
    "recompute_modules": ("recompute", _modules),
    "checkpoint_activations": ("recompute", lambda value, job: value is (job.recompute.kind != "none")),
    "activation_checkpointing": ("recompute", lambda value, job: value is (job.recompute.kind != "none")),
    "accumulate_allreduce_grads_in_fp32": (
        "precision.grads",
        lambda value, job: value is False or job.precision.grads == "fp32",
    ),
    "grad_reduce_in_bf16": ("precision.reduce", lambda value, job: value is False or job.precision.reduce == "bf16"),
    "reduce_dtype": ("precision.reduce", lambda value, job: value == job.precision.reduce),
    "cross_entropy_loss_fusion": (
        "loss",
        lambda value, job: job.engine.name != "megatron" or value is (job.loss.kind == "vocab-parallel-fused"),
    ),
    "cp_comm_type": (
        "layout.cp_kind",
        lambda value, job: _CP_COMM.get(str(value), job.layout.cp_kind) == job.layout.cp_kind,
    ),
    "optimizer_cpu_offload": (
        "offload.optimizer",
        lambda value, job: value is (job.offload.optimizer == "cpu"),
    ),
    "cpu_checkpointing": (
        "offload.activations",
        lambda value, job: value is True or job.stack != "megatron" or job.offload.activations == "none",
    ),
    "offload_gradients": (
        "offload.optimizer",
        lambda value, job: value is False or job.offload.optimizer == "cpu",
    ),
    "lora_dtype": ("lora", lambda value, job: job.lora is not None),
    "use_dora": ("lora", lambda value, job: value is False or job.lora is not None),
    "use_rslora": ("lora", lambda value, job: value is False or job.lora is not None),
    "xielu_cuda": ("model.model_type", lambda value, job: value is False or job.model.model_type == "apertus"),
    **{
        name: ("model.model_type", lambda value, job: value is False or job.model.model_type in recurrent.FAMILIES)
        for name in recurrent.DEFAULTS
    },
    "device_map": ("engine.name", lambda value, job: job.engine.name == "single"),
}


def contradictions(job: Job) -> Iterator[Contradiction]:
    """Each option that contradicts the key that says the same."""
    for option, value in job.engine.options.items():
        if option not in _RULES:
            continue
        key, agrees = _RULES[option]
        if not agrees(value, job):
            yield Contradiction(
                f"contradicts {key} = {show(_value(job, key))}",
                key=f"engine.options.{option}",
                value=show(value),
                remedy="keep one of the two",
            )


def _value(job: Job, key: str) -> object:
    if key == "recompute":
        return list(job.recompute.modules) if job.recompute.kind == "modules" else job.recompute.kind
    if key == "loss":
        return job.loss.kind
    value: object = job
    for part in key.split("."):
        value = getattr(value, part)
    return value
