"""What each engine's account reads of a job: a key that it would ignore is refused by name instead."""

from __future__ import annotations

from collections.abc import Callable

from ullage import dtypes
from ullage.engines import offloaded, quantised
from ullage.engines.fsdp2.policy import wraps_adapters
from ullage.errors import Unsupported
from ullage.job.adapted import PACKED, STORAGE, adapters_type, model_type
from ullage.job.adapted_experts import packs_experts
from ullage.job.engine import OF_TRANSFORMERS
from ullage.job.job import Job
from ullage.kernels.torchtitan_captured import CAPTURES
from ullage.model.hf_config import has_encoder

OFFLOADS: dict[str, tuple[str, ...]] = {
    "single": ("optimizer", "activations"),
    "ddp": ("activations",),
    "zero1": ("activations",),
    "fsdp1": ("optimizer", "params", "activations"),
    "fsdp2": ("optimizer", "params", "activations"),
    "deepspeed": ("optimizer", "params", "activations"),
    "megatron": ("optimizer",),
}
"""Which of ``offload``'s keys an engine's account reads."""

OFFLOADS_OF_MEGATRON = ("fine_grained_activation_offloading", "cpu_offloading_num_layers")
"""Megatron's options, which say what of its activations is offloaded."""

ALONG_THE_SEQUENCE = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose layers have the names and the calls of a llama's, which trace/sequence.py cuts along the sequence in transformers' own code:
its plans of tensor parallelism divide no sequence, and its switch for it does nothing yet."""

LOSSES = {
    "transformers": ("full", "fused-linear"),
    "liger": ("full", "fused-linear"),
    "unsloth": ("full", "fused-linear"),
    "torchtune": ("full", "chunked"),
    "litgpt": ("full", "chunked"),
    "torchtitan": ("full", "chunked", "fused-linear", "vocab-parallel"),
    "megatron": ("full", "vocab-parallel", "vocab-parallel-fused"),
}
"""Kinds of loss by stack; of a traced module the loss is its own."""

STEPS_IN_BACKWARD = ("single",)
"""Engines whose account knows the optimizer's step inside the backward (optimizer_in_bwd)."""

CAPTURED = ("fsdp2", "torchtitan")
"""Whose account knows a captured graph, and of whose layer code."""


def refuse_what_is_not_read(job: Job) -> None:
    """Raises Unsupported for the first key of the job that moves memory and that its engine's account does not read."""
    if job.layout.sp and job.stack in OF_TRANSFORMERS and not runs_along_the_sequence(job):
        raise Unsupported(
            "has no sequence parallelism of its own in transformers' code; ullage train adds it under fsdp2, without pipeline or context "
            f"parallelism, to {', '.join(ALONG_THE_SEQUENCE)}",
            key="layout.sp",
            value="true",
            remedy="leave it out, or use stack torchtitan or megatron",
        )
    losses = LOSSES.get(job.stack)
    if losses is not None and job.loss.kind not in losses:
        raise Unsupported(
            f"is not modelled in stack {job.stack}", key="loss", value=job.loss.kind, allowed=", ".join(losses)
        )
    if job.stack == "unsloth" and job.lora is None:
        raise Unsupported(
            "is modelled beside a frozen base alone, where its own functions run",
            key="stack",
            value="unsloth",
            remedy="set lora, or use stack transformers",
        )
    if job.stack == "torchtitan" and job.loss.kind == "fused-linear" and job.engine.name == "deepspeed":
        raise Unsupported(
            "hands the head's gradient on in the forward, which is not modelled under engine deepspeed",
            key="loss",
            value=job.loss.kind,
            remedy="use full, or engine fsdp2",
        )
    if has_encoder(job.model):
        _refuse_beside_an_encoder(job)
    for key, is_set in _KEYS.items():
        value = is_set(job)
        if value is not None:
            allowed = ", ".join(("bf16", *_packed(job))) if key == "lora.base" else None
            remedy = _other_base(job) if key == "lora.base" else None
            if key == "offload.optimizer" and job.engine.name in ("fsdp1", "fsdp2"):
                remedy = "set offload.params: cpu too, for FSDP moves shards with their states"
            if key == "precision.params":
                remedy = f"use precision {job.precision.compute}, so that all of a layer is one type, or engine fsdp2"
            raise Unsupported(
                f"is not modelled {_where(job, key)} yet", key=key, value=value, allowed=allowed, remedy=remedy
            )


_RUN_AGAIN_BESIDE_AN_ENCODER = ("none", "full", "selective")


def _refuse_beside_an_encoder(job: Job) -> None:
    """What no account knows of a model whose decoder reads an encoder's output, which blocks hand on beside their stream."""
    kept_wide = job.precision.params == "fp16"  # transformers keeps a part in fp32, and clamps the stream
    refused: dict[str, object] = {
        "stack": job.stack if job.stack != "transformers" else None,
        "engine.name": job.engine.name if job.engine.name in ("deepspeed", "megatron") else None,
        "data.padding_mask": "true" if job.data.padding_mask else None,
        "attention": job.attention if job.attention == "math" else None,
        "loss": job.loss.kind if job.loss.kind != "full" else None,
        "recompute": job.recompute.kind if job.recompute.kind not in _RUN_AGAIN_BESIDE_AN_ENCODER else None,
        "precision": "fp16" if kept_wide else None,
        "lora": "set" if job.lora is not None else None,
        "freeze": list(job.freeze) or None,
        "offload.activations": job.offload.activations if job.offload.activations != "none" else None,
        "compile": "true" if job.compile else None,
    }
    for key, value in refused.items():
        if value is not None:
            what = f"is not modelled of {job.model.model_type}, a decoder behind an encoder, yet"
            raise Unsupported(what, key=key, value=value, remedy="leave it out")


def runs_along_the_sequence(job: Job) -> bool:
    """Whether transformers' code runs the job's tensor parallelism with the stream cut by tokens."""
    layout = job.layout
    cut_by_tp_alone = layout.tp > 1 == layout.pp == layout.cp
    known = job.engine.name == "fsdp2" and job.model.model_type in ALONG_THE_SEQUENCE
    return job.stack == "transformers" and cut_by_tp_alone and known


def _where(job: Job, key: str) -> str:
    """What of a job stands against a key of it."""
    beside = f" beside a base in {job.lora.base}" if job.lora is not None and key in _BESIDE_A_BASE else ""
    return f"under engine {job.engine.name} in stack {job.stack}{beside}"


_BESIDE_A_BASE = ("lora.dora", "lora.modules_to_save")


def offloads_activations(job: Job) -> bool:
    """Whether the host takes some of what a forward leaves."""
    told = job.offload.activations != "none" or offloaded.inputs(job) is not None
    return told or any(map(job.engine.options.get, OFFLOADS_OF_MEGATRON))


def _offload(part: str) -> Callable[[Job], object]:
    def value(job: Job) -> object:
        place = getattr(job.offload, part)
        chosen = part == "activations" and any(map(job.engine.options.get, OFFLOADS_OF_MEGATRON))
        known = part in OFFLOADS.get(job.engine.name, ()) or chosen
        if (
            job.engine.name in ("fsdp1", "fsdp2") and part == "optimizer"
        ):  # they take parameters, and with them their states
            known = job.offload.params != "none"
        return None if place == "none" or known else place

    return value


ADAPTERS = {
    "single": (*OF_TRANSFORMERS, "torchtune", "litgpt"),
    "ddp": OF_TRANSFORMERS,
    "fsdp1": ("transformers", "liger", "torchtune", "litgpt"),
    "fsdp2": (*OF_TRANSFORMERS, "torchtune"),
    "deepspeed": OF_TRANSFORMERS,
    "megatron": ("megatron",),
}
"""Engines whose account knows adapters beside a frozen model, and in whose layer code."""


FREEZES = ("single", "ddp", "fsdp2", "deepspeed")
"""Engines whose account knows a model of which only a part is trained, in transformers' layer code."""

SAVES = ("single", "ddp", "fsdp1", "fsdp2", "deepspeed")
"""Engines whose account knows modules that PEFT trains in full beside adapters."""


def _freezes(job: Job) -> bool:
    return job.engine.name in FREEZES and job.stack in OF_TRANSFORMERS and job.layout.world == job.layout.dp


def _lora(job: Job) -> object:
    known = job.stack in ADAPTERS.get(job.engine.name, ())
    if job.engine.name == "megatron":
        known = known and job.engine.zero_stage <= 1 and job.layout.etp == 1
    else:
        known = known and job.layout.tp == 1 and (job.layout.pp == 1 or job.engine.name == "single")
    return None if job.lora is None or (known and (job.engine.name != "fsdp1" or _flattens(job))) else "set"


def _flattens(job: Job) -> bool:
    """FSDP1 joins what has one type, and what is trained with what is not where ``use_orig_params`` lets it (torch
    distributed/fsdp/_flat_param.py, _validate_tensors_to_flatten): under Fabric a whole block, elsewhere each adapter by itself."""
    options = job.engine.options
    if job.stack != "litgpt":
        return job.engine.zero_stage in (2, 3)
    original = options.get("use_orig_params", True)  # Fabric's default (lightning/fabric/strategies/fsdp.py)
    one_type = adapters_type(job) == model_type(job)
    return one_type and bool(original) and options.get("auto_wrap_policy") in (None, "Block")


def _knows(job: Job, engines: tuple[str, ...]) -> bool:
    """Whether the job runs PEFT's layers under one of these engines."""
    return job.engine.name in engines and job.stack in ("transformers", "liger")


def _saved(job: Job) -> object:
    """Modules trained in full. Of norms that FSDP1 flattens each by itself, as PEFT's policy has it, torch fails to make the views."""
    modules = job.lora.modules_to_save if job.lora is not None else ()
    if not _knows(job, SAVES):
        return ", ".join(modules) or None
    norms = (module for module in modules if "norm" in module and job.engine.name == "fsdp1")
    return ", ".join(norms) or None


def _knows_dora(job: Job) -> bool:
    """Beside four bits on whole replicas, and without autocast: under it DoRA widens what the layers after it are given, which is not
    modelled. Under FSDP1 and mixed precision torch gives the optimizer gradients in 16 bits for magnitudes in 32."""
    if job.lora is None or job.lora.base == "bf16":
        return _knows(job, ("single", "ddp", "fsdp2", "deepspeed"))
    whole = _knows(job, ("single", "ddp")) or _replicates_packed(job)
    return job.lora.base in PACKED and not job.precision.autocast and whole


_PACKED = {
    "transformers": ("nf4", "nf4-double", "int8"),
    "liger": ("nf4", "nf4-double", "int8"),
    "unsloth": ("nf4", "nf4-double"),
    "litgpt": ("nf4", "nf4-double"),
    "torchtune": ("nf4-double",),  # torchao quantises the scales always
}
"""In what a stack packs a frozen base."""
_SHARDS_PACKED = ("transformers", "liger", "torchtune")
"""Stacks of which FSDP2's shards of a packed base are known."""


def _packed(job: Job) -> tuple[str, ...]:
    """Bases that the job's engine knows: replicas keep all; FSDP shards four bits, but for experts, which axolotl packs as bytes; torchao's
    have no FSDP1. On the host are those that are sharded: bitsandbytes' scales and levels are attributes that stay."""
    known = _PACKED.get(job.stack, ())
    if job.engine.name in ("single", "ddp") or _replicates_packed(job):
        return known
    sharded = _has_shards_of(job) and dtypes.bits(job.precision.compute) == 16
    moves = job.offload.params == "none" or (job.stack in OF_TRANSFORMERS and quantised.shards(job))
    in_reach = sharded and moves and not packs_experts(job)
    return tuple(base for base in known if base in PACKED) if in_reach else ()


def _replicates_packed(job: Job) -> bool:
    """DeepSpeed below ZeRO-3 divides what is trained alone: a packed base is whole on every rank, as the module has it
    (runtime/zero/stage_1_and_2.py groups the optimizer's parameters)."""
    return job.engine.zero_stage < 3 and _knows(job, ("deepspeed",))


def _has_shards_of(job: Job) -> bool:
    """Whether the job's engine shards packed weights of its stack."""
    knows = _SHARDS_PACKED if job.engine.name == "fsdp2" else _SHARDS_PACKED[:2]
    return job.engine.name in ("fsdp1", "fsdp2") and job.stack in knows


def _flattened_with(job: Job) -> object:
    """Beside a packed base FSDP1 flattens norms, embedding and head with bytes that are seen as the compute type, if they have that."""
    packed = job.engine.name == "fsdp1" and job.lora is not None and job.lora.base in PACKED
    return job.precision.params if packed and model_type(job) != job.precision.compute else None


def _original(job: Job) -> object:
    """FSDP1's views of shards beside adapters: in a recomputed layer PEFT finds others than in its forward, and torch fails where layers
    stay whole."""
    known = job.recompute.kind == "none" and job.engine.zero_stage == 3
    return True if wraps_adapters(job) and job.engine.options.get("use_orig_params") and not known else None


def _other_base(job: Job) -> str | None:
    """What to do about a base that is not known.

    transformers loads a quantised model whole on every rank, without ZeRO's Init (modeling_utils.py, _is_quantized), and stage 3 divides
    its bytes afterwards. FSDP2 casts what it gathers, bytes too (_fsdp_param.py, all_gather_inputs): axolotl changes torch so that eight
    bits stay what they are (monkeypatch/fsdp2_qlora.py). Of neither is a run known that an account could be held against."""
    others = ("fsdp1", "deepspeed", "zero1")
    lora = job.lora
    if lora is None or packs_experts(job):
        return None
    if lora.base in PACKED and job.engine.name in others and job.stack in _SHARDS_PACKED:
        return "use engine fsdp2, which shards four bits"
    if lora.base == "int8" and job.engine.name in ("fsdp1", "fsdp2"):
        return "use engine ddp, or four bits: FSDP itself casts the bytes that it gathers"
    return None


def _storage(job: Job) -> object:
    """FSDP gathers in the compute type: bytes that are seen as another would be cast, and are no packed weight any more. FSDP1 flattens
    floating numbers alone (_flat_param.py, _validate_tensors_to_flatten)."""
    said = job.engine.options.get(STORAGE)
    sharded = job.engine.name in ("fsdp1", "fsdp2") and job.lora is not None and job.lora.base in PACKED
    known: tuple[str, ...] = (
        (job.precision.compute,) if job.stack != "torchtune" else ()
    )  # torchao's is a type of its own
    known += (quantised.AS_BYTES,) if known and job.engine.name == "fsdp2" else ()
    return said if sharded and said not in (None, *known) else None


def _captured(option: str) -> Callable[[Job], object]:
    def value(job: Job) -> object:
        return True if job.engine.options.get(option) and (job.engine.name, job.stack) != CAPTURED else None

    return value


def _base(job: Job) -> object:
    return None if job.lora is None or job.lora.base in ("bf16", *_packed(job)) else job.lora.base


def _adapters_type(job: Job) -> object:
    """Where adapters have the module's type."""
    said = None if job.lora is None else job.lora.dtype
    return None if said is None or said == adapters_type(job) else said


_KEYS: dict[str, Callable[[Job], object]] = {
    "lora": _lora,
    "lora.base": _base,
    f"engine.options.{STORAGE}": _storage,
    "engine.options.use_orig_params": _original,
    "precision.params": _flattened_with,
    "lora.dora": lambda job: "true" if job.lora is not None and job.lora.dora and not _knows_dora(job) else None,
    "lora.modules_to_save": _saved,
    "lora.dtype": _adapters_type,
    "freeze": lambda job: list(job.freeze) or None if not _freezes(job) else None,
    "offload.optimizer": _offload("optimizer"),
    "offload.params": _offload("params"),
    "offload.activations": _offload("activations"),
    **{f"engine.options.{option}": _captured(option) for option in CAPTURES},
    "engine.options.optimizer_in_bwd": lambda job: (
        True if job.engine.options.get("optimizer_in_bwd") and job.engine.name not in STEPS_IN_BACKWARD else None
    ),
}
