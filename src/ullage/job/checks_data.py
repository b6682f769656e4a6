"""Combinations of engine, stage, offload, adapters and device that no engine runs."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.errors import UllageError
from ullage.job.adapted import PACKED, STORAGE, longest_of
from ullage.job.architecture import Architecture
from ullage.job.checks import Violation, contradiction, infeasible, warning
from ullage.job.job import Job
from ullage.model.build import TARGET_LENGTH
from ullage.model.hf_config import has_encoder

_TORCH_ENGINES = ("single", "ddp", "zero1")
_MOST_TOKENS = (1 << 31) - 1


def _stage(job: Job, arch: Architecture) -> Iterator[Violation]:
    engine = job.engine
    if engine.name == "deepspeed" and engine.zero_stage >= 2 and job.layout.pp > 1:
        what = "DeepSpeed's pipeline engine accumulates whole gradients and refuses stages 2 and 3"
        yield infeasible("engine.zero_stage", engine.zero_stage, what, "use stage 0 or 1, or pp 1")


def _offload(job: Job, arch: Architecture) -> Iterator[Violation]:
    offload, engine = job.offload, job.engine
    if engine.name == "deepspeed":
        if offload.params != "none" and engine.zero_stage < 3:
            what = f"DeepSpeed offloads parameters at ZeRO stage 3, and this is stage {engine.zero_stage}"
            yield contradiction("offload.params", offload.params, what, "set engine.zero_stage: 3, or leave it out")
        if offload.optimizer != "none" and engine.zero_stage < 1:
            yield contradiction(
                "offload.optimizer",
                offload.optimizer,
                "DeepSpeed offloads a sharded optimizer",
                "set engine.zero_stage: 1 or more",
            )
        if offload.optimizer == "nvme" and engine.zero_stage < 3:
            yield contradiction(
                "offload.optimizer",
                "nvme",
                "DeepSpeed swaps the optimizer to NVMe at stage 3 alone",
                "use cpu, or stage 3",
            )
    else:
        for what_is, where in (("optimizer", offload.optimizer), ("params", offload.params)):
            if where == "nvme":
                yield contradiction(
                    f"offload.{what_is}", where, f"{engine.name} has no NVMe offload", "use cpu, or deepspeed"
                )
        if offload.params != "none" and engine.name in (*_TORCH_ENGINES, "megatron"):
            what = f"engine {engine.name} keeps its parameters on the GPU"
            yield contradiction("offload.params", offload.params, what, "use fsdp1, fsdp2 or deepspeed")
        elif offload.params == "cpu" and offload.optimizer == "none":
            what = "FSDP's CPU offload moves the shards and with them the optimizer"
            yield contradiction("offload.params", "cpu", what, "set offload.optimizer: cpu too")
    if offload.activations == "nvme":
        yield contradiction("offload.activations", "nvme", "no engine keeps activations on NVMe", "use cpu or none")


_OF_DEEPSPEEDS_CHECKPOINTS = ("partition_activations", "cpu_checkpointing")


def _checkpoints(job: Job, arch: Architecture) -> Iterator[Violation]:
    if job.engine.name != "deepspeed" or job.stack == "megatron":
        return
    for name in _OF_DEEPSPEEDS_CHECKPOINTS:
        if job.engine.options.get(name) is True:
            what = f"does nothing in stack {job.stack}, whose layers call torch's checkpoint and not DeepSpeed's"
            remedy = "say offload: {activations: cpu} where the training script offloads them"
            yield warning(f"engine.options.{name}", "true", what, remedy)


def _stack(job: Job, arch: Architecture) -> Iterator[Violation]:
    if job.engine.name == "megatron" and job.stack != "megatron" and job.engine.zero_stage < 2:
        what = "Megatron runs its own layers, unless Megatron-FSDP (zero_stage 2 or 3) wraps another's"
        yield contradiction("stack", job.stack, what, "leave stack out, or use another engine")


def _lora(job: Job, arch: Architecture) -> Iterator[Violation]:
    lora = job.lora
    if lora is None:
        return
    if arch.hidden and lora.rank > arch.hidden:
        yield infeasible("lora.rank", lora.rank, f"is above the model's hidden size {arch.hidden}", "use 8, 16 or 64")
    if lora.base != "bf16" and job.engine.name == "megatron":
        what = "Megatron's layers hold no bitsandbytes weights"
        yield contradiction("lora.base", lora.base, what, "use bf16, or a stack of transformers")
    sharded = job.engine.name in ("fsdp1", "fsdp2") and job.stack != "torchtune"
    if sharded and lora.base in PACKED and STORAGE not in job.engine.options:
        key, what = (
            f"engine.options.{STORAGE}",
            "is taken as recipes for FSDP set it; as bytes, bitsandbytes' default,",
        )
        yield warning(key, "bf16", f"{what} the base is whole on every rank", "name the type that yours sets")


def _optimizer_in_backward(job: Job, arch: Architecture) -> Iterator[Violation]:
    """Each parameter is stepped in its own backward hook: its gradient never meets another's, nor the next micro-batch's."""
    if job.engine.options.get("optimizer_in_bwd") is not True:
        return
    if job.grad_clip:
        what = "optimizer_in_bwd frees each gradient before the global norm of all is known"
        yield contradiction("grad_clip", True, what, "set grad_clip: false")
    if job.data.grad_accum > 1:
        what = "optimizer_in_bwd steps in every backward, so nothing accumulates"
        yield contradiction("data.grad_accum", job.data.grad_accum, what, "use 1, or a larger micro_batch")


def _gradients_on_host(job: Job, arch: Architecture) -> Iterator[Violation]:
    if job.engine.options.get("offload_gradients") is True and job.data.grad_accum > 1:
        what = "offload_gradients drops each gradient in every backward, so nothing accumulates"
        yield contradiction("data.grad_accum", job.data.grad_accum, what, "use 1, or a larger micro_batch")


def _reduced_in_place(job: Job, arch: Architecture) -> Iterator[Violation]:
    if job.engine.options.get("reduce_in_place") is not True:
        return
    for name in ("bucket_cap_mb", "gradient_as_bucket_view"):
        if name in job.engine.options:
            what = "is of DDP's buckets, and reduce_in_place has none"
            yield contradiction(f"engine.options.{name}", job.engine.options[name], what, "leave one of them out")


def _cast_once(job: Job, arch: Architecture) -> Iterator[Violation]:
    if job.engine.options.get("cast_once") is not True:
        return
    wrong = {
        "precision": (job.precision.compute, "runs without autocast, and nothing is cast", job.precision.autocast),
        "stack": (job.stack, "has linears of its own, and cast_once is of transformers'", job.stack == "transformers"),
        "lora": (
            "set",
            "cast_once is of models that are trained whole: adapters cast for themselves",
            job.lora is None,
        ),
    }
    for key, (value, what, right) in wrong.items():
        if not right:
            yield contradiction(key, value, what, "leave engine.options.cast_once out")


def _precision(job: Job, arch: Architecture) -> Iterator[Violation]:
    capability = job.cluster.device.compute_capability
    if capability is None:
        return
    if job.attention == "flash" and capability < (8, 0):
        what = f"{job.cluster.device.name} has no flash kernel in torch; it would take the memory-efficient one"
        yield warning("attention", job.attention, what, "set attention: mem-efficient")
    if job.precision.compute == "bf16" and capability < (8, 0):
        what = f"{job.cluster.device.name} has no bf16 units; it emulates them slowly"
        yield warning("precision", "bf16", what, "use fp16-mixed")
    if job.precision.compute == "fp8" and capability < (8, 9):
        what = f"{job.cluster.device.name} has no fp8 units"
        yield infeasible("precision", "fp8", what, "use bf16-mixed, or an H100 or newer")
    if job.precision.compute == "fp4" and capability < (10, 0):
        what = f"{job.cluster.device.name} has no fp4 units"
        yield infeasible("precision", "fp4", what, "use fp8 or bf16-mixed, or a Blackwell GPU")


def _multimodal(job: Job, arch: Architecture) -> Iterator[Violation]:
    if job.model.beside:
        what = f"is the decoder of a multimodal model: what stands beside it ({', '.join(job.model.beside)}) is not modelled"
        yield warning("model", job.model.name, what, "add the tower's weights, states and activations")


def _length(job: Job, arch: Architecture) -> Iterator[Violation]:
    """A learned table has a row for each position: torch's embedding refuses an index beyond it, Megatron the arguments.

    A default that is longer is nobody's claim: it is said, and answered as any other.
    """
    try:
        longest = longest_of(job)
    except UllageError:  # a model that no account can read is refused there, in its own words
        return
    length = job.data.seq_len
    if longest is not None and length > longest:
        what = f"is longer than the model's learned table of {longest} positions, where a run stops"
        if f"data.seq_len = {length}" in job.defaults:
            yield warning("data.seq_len", length, f"the default, {what}", f"set it, up to {longest}")
        else:
            yield infeasible("data.seq_len", length, what, f"use up to {longest}, or a model of more positions")


def _tokens(job: Job, arch: Architecture) -> Iterator[Violation]:
    """FlashAttention counts the tokens of a batch in int32 (flash_attn_interface.py, cu_seqlens), as do most kernels their rows."""
    data = job.data
    if data.seq_len * data.micro_batch > _MOST_TOKENS:
        key, value = (
            ("seq_len", data.seq_len) if data.seq_len >= data.micro_batch else ("micro_batch", data.micro_batch)
        )
        what = f"a micro-batch of {data.seq_len * data.micro_batch} tokens is more than kernels count ({_MOST_TOKENS}, an int32)"
        yield infeasible(f"data.{key}", value, what, "use fewer")


def _target(job: Job, arch: Architecture) -> Iterator[Violation]:
    if TARGET_LENGTH in job.engine.options and not has_encoder(job.model):
        key, what = (
            f"engine.options.{TARGET_LENGTH}",
            f"is of a decoder behind an encoder, and {job.model.name} has none",
        )
        yield contradiction(key, job.engine.options[TARGET_LENGTH], what, "set data.seq_len alone")


def _encoder(job: Job, arch: Architecture) -> Iterator[Violation]:
    """transformers has no plan that cuts a T5, and its blocks hand on more than a stream."""
    if not has_encoder(job.model):
        return
    for name in ("tp", "pp", "cp", "ep"):
        degree = getattr(job.layout, name)
        if degree > 1:
            what = f"{job.model.model_type}, a decoder behind an encoder, is modelled with data parallelism alone"
            yield infeasible(f"layout.{name}", degree, what, "use 1, and fsdp1, fsdp2, ddp or zero1 over more GPUs")
    if not job.data.padding_mask:  # which is refused: engines/reach.py
        what = "batches without padding are counted; of padded ones each layer keeps the terms of positions for every sequence"
        yield warning(
            "data.padding_mask", False, what, "pack or bucket sequences, or leave room for batch times these terms"
        )


def _layers_again(job: Job, arch: Architecture) -> Iterator[Violation]:
    count = job.recompute.layers
    if arch.layers is not None and count > arch.layers:
        yield warning("recompute.layers", count, f"the model has {arch.layers}, all of which run again", "write full")


CHECKS = (
    _stage,
    _stack,
    _length,
    _target,
    _encoder,
    _tokens,
    _layers_again,
    _offload,
    _checkpoints,
    _lora,
    _optimizer_in_backward,
    _gradients_on_host,
    _reduced_in_place,
    _cast_once,
    _precision,
    _multimodal,
)
