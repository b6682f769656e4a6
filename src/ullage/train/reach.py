"""What is run of a job, by name: a key that would be ignored is refused instead."""

from __future__ import annotations

from ullage.engines.reach import runs_along_the_sequence
from ullage.errors import Unsupported
from ullage.frozen import replace
from ullage.job.adapted import adapters_type, unmodelled
from ullage.job.job import Job
from ullage.job.precision import resolve
from ullage.model.hf_config import decoder_spec, has_encoder
from ullage.trace.reach import not_built

TORCH = ("single", "ddp", "zero1", "fsdp2")
ENGINES = (*TORCH, "deepspeed")
_MIXED = ("fp32", "bf16-mixed", "fp16-mixed")
PRECISIONS = {"deepspeed": _MIXED}
ALL_PRECISIONS = (*_MIXED, "bf16")
WITH_ADAPTERS = ("single", "ddp", "fsdp2", "deepspeed")
OF_ADAPTERS = ("bf16-mixed", "bf16")
"""The frozen base is in bf16."""
OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""layout.schedule, and its class in torch.distributed.pipelining."""
HALVED = ("zb-h1", "zbv", "dualpipev")
"""Those that halve backwards, which take a list of stages."""
ATTENTION = ("flash", "math", "eager")
_OF_ALL = ("momentum",)
_OF_DDP = (*_OF_ALL, "gradient_as_bucket_view", "bucket_cap_mb", "reduce_in_place", "cast_once")
_OF_DEEPSPEED = """
    reduce_bucket_size overlap_comm contiguous_gradients sub_group_size stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
    stage3_max_reuse_distance grad_accum_dtype communication_data_type loss_scale initial_scale_power
    loss_scale_window hysteresis min_loss_scale"""
OPTIONS = {
    "single": (*_OF_ALL, "cast_once"),
    "ddp": _OF_DDP,
    "zero1": _OF_DDP,
    "fsdp2": (*_OF_ALL, "reshard_after_forward", "reduce_dtype", "sync_each_batch"),
    "deepspeed": (*_OF_ALL, *_OF_DEEPSPEED.split()),
}
"""Engine options that reach the engine."""


def refuse_what_is_not_run(job: Job) -> None:
    """Raises Unsupported for the first key of the job that the trainer does not carry out."""
    layout, engine = job.layout, job.engine
    refused: dict[str, object] = {
        "model": job.model.name if decoder_spec(job.model).task is not None else None,
        "model.model_type": job.model.model_type if has_encoder(job.model) else None,
        "engine.name": engine.name if engine.name not in ENGINES else None,
        "stack": job.stack if job.stack != "transformers" else None,
        "stack_version": job.stack_version,
        "layout.sp": "true" if layout.sp and not runs_along_the_sequence(job) else None,
        "layout.schedule": layout.schedule if layout.schedule not in SCHEDULES else None,
        "layout.cp": layout.cp if layout.cp > 1 else None,
        "layout.ep": layout.ep if layout.ep > 1 else None,
        "data.padding_mask": "true" if job.data.padding_mask else None,
        "data.seq_len_mean": job.data.seq_len_mean,
        "recompute": not_built(job.recompute),
        "attention": job.attention if job.attention not in ATTENTION else None,
        "loss": job.loss.kind if job.loss.kind != "full" else None,
        "lora": "set" if job.lora is not None and not _adapts(job) else None,
        "lora.base": job.lora.base if job.lora is not None and job.lora.base != "bf16" else None,
        **(unmodelled(job.lora) if job.lora is not None else {}),
        "freeze": list(job.freeze) or None,
        "compile": "true" if job.compile else None,
        "optimizer": job.optimizer.name if job.optimizer.name not in OPTIMIZERS else None,
        "optimizer.paged": "true" if job.optimizer.paged else None,
        **{f"offload.{part}": _not_offloaded(job, part) for part in ("optimizer", "params", "activations")},
    }
    for key, value in refused.items():
        if value is not None:
            raise Unsupported("is not run yet", key=key, value=value, remedy="docs/train.md lists what is")
    _refuse_options(job)
    _refuse_types(job)
    _refuse_groups(job)
    if layout.pp > 1:
        _refuse_of_pipelines(job)
    if engine.name == "deepspeed":
        _refuse_of_deepspeed(job)


def _adapts(job: Job) -> bool:
    return job.engine.name in WITH_ADAPTERS and job.layout.tp == job.layout.pp == 1


def _not_offloaded(job: Job, part: str) -> str | None:
    """FSDP2's policy takes parameters and states to the host together."""
    place: str = getattr(job.offload, part)
    whole = job.engine.name == "fsdp2" and job.offload.params == "cpu" and job.layout.tp == job.layout.pp == 1
    runs = place == "cpu" and part != "activations" and (whole or job.engine.name == "deepspeed")
    return None if runs or place == "none" else place


def _refuse_options(job: Job) -> None:
    known = OPTIONS[job.engine.name]
    for name, value in job.engine.options.items():
        if name not in known:
            raise Unsupported(
                f"does not reach {job.engine.name} yet",
                key=f"engine.options.{name}",
                value=value,
                allowed=", ".join(known),
            )


def _refuse_types(job: Job) -> None:
    options = job.engine.options
    known: tuple[str, ...] = PRECISIONS.get(job.engine.name, ALL_PRECISIONS)
    if job.lora is not None:
        known = tuple(name for name in known if name in OF_ADAPTERS)
    found = [resolve(name, job.engine.name, options, job.stack) for name in known]
    if job.engine.name == "fsdp2":  # reduces in any
        found = [replace(one, reduce=job.precision.reduce) for one in found]
    if job.precision not in found:
        raise Unsupported("these element types are not run yet", key="precision", allowed=", ".join(known))
    if job.engine.name == "fsdp2" and job.optimizer.name == "sgd" and job.optimizer.impl == "fused":
        raise Unsupported(
            "torch has no fused SGD of sharded parameters", key="optimizer.impl", value="fused", remedy="use foreach"
        )
    stepped = job.precision.master or job.precision.params
    if job.lora is not None and job.engine.name != "deepspeed":  # which keeps masters beside adapters too
        stepped = adapters_type(job)
    default = job.lora is not None and job.optimizer.state == job.precision.params
    if job.optimizer.state != stepped and not default:
        raise Unsupported(
            f"torch's optimizers keep moments in the type of what they step, {stepped}",
            key="optimizer.state",
            value=job.optimizer.state,
        )


def _refuse_groups(job: Job) -> None:
    shard = job.engine.shard_group
    if job.engine.name == "fsdp2" and job.layout.world == 1:
        raise Unsupported("has one rank, and nothing to shard", key="layout.dp", value=1, remedy="use engine single")
    if shard is not None and (job.engine.name != "fsdp2" or shard == 1 < job.layout.dp):
        raise Unsupported("is not run yet", key="engine.shard_group", value=shard, remedy="use fsdp2 with 2 or more")


def _refuse_of_pipelines(job: Job) -> None:
    layout, count = job.layout, job.data.grad_accum
    if job.recompute.kind == "sqrt":
        raise Unsupported("groups layers of the model, not of a stage", key="recompute", value="sqrt")
    if job.engine.options.get("sync_each_batch"):
        raise Unsupported(
            "a pipeline reduces after its last micro-batch", key="engine.options.sync_each_batch", value="true"
        )
    if layout.schedule == "1f1b" and count < layout.pp:
        raise Unsupported(
            f"torch's 1F1B takes no fewer micro-batches than its {layout.pp} stages",
            key="data.grad_accum",
            value=count,
            remedy="use gpipe",
        )


def _refuse_of_deepspeed(job: Job) -> None:
    """What DeepSpeed takes and does otherwise than one device."""
    if job.engine.zero_stage == 0 and job.precision.params != "fp32":
        raise Unsupported(
            "DeepSpeed 0.19.8 without ZeRO steps Adam once before the first step, and divides by a loss scale that it has not "
            "multiplied by (fp16/unfused_optimizer.py, engine.py backward)",
            key="engine.zero_stage",
            value=0,
            remedy="use 1, 2 or 3, or engine ddp",
        )
    for name, value in job.engine.options.items():
        if value == "auto":
            raise Unsupported(
                "is a word of transformers' Trainer", key=f"engine.options.{name}", value=value, remedy="write a number"
            )
    if job.lora is not None and job.lora.dtype == "fp32":
        raise Unsupported(
            f"DeepSpeed casts adapters too, to {job.precision.params}",
            key="lora.dtype",
            value="fp32",
            remedy="leave it out",
        )
