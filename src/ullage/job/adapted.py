"""What a job trains: its model's graph, with low-rank adapters beside the linears that it names and everything else frozen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from math import prod

from ullage.errors import InvalidInput, Unsupported
from ullage.frozen import FrozenMap, replace
from ullage.job import adapted_experts, adapted_litgpt, adapted_megatron, freezing
from ullage.job.adapted_experts import Experts
from ullage.job.engine import OF_TRANSFORMERS
from ullage.job.job import Job, Lora
from ullage.job.saved_modules import trained_in_full
from ullage.job.wide import left_wide
from ullage.job.widened import widened, widens
from ullage.model import delta
from ullage.model.build import CHECKPOINTED, MEGATRON_ARGUMENTS, TARGET_LENGTH, table_of_positions
from ullage.model.build import graph as build
from ullage.model.graph import Block, Graph, Op, Param
from ullage.model.hf_config import has_encoder

ADAPTERS = "fp32"
"""PEFT makes adapters of a 16-bit model in fp32 (tuners/tuners_utils.py, cast_adapter_dtype; autocast_adapter_dtype=True)."""

ALL_LINEAR = "all-linear"
HEAD = "lm_head"
"""The output projection, which all-linear leaves out (peft tuners/tuners_utils.py, _maybe_include_all_linear_layers)."""

STACKS = (*OF_TRANSFORMERS, "torchtune", "litgpt", "megatron")
"""Stacks in which adapters are known."""

OF_ONE_TYPE = ("torchtune", "litgpt", "megatron")
"""Stacks whose adapters have the model's own type."""

PACKED = ("nf4", "nf4-double")
"""Bases in four bits."""
STORAGE = "bnb_4bit_quant_storage"
"""The option that says as which type torch sees the bytes of such a weight (transformers' BitsAndBytesConfig)."""
QUANTISED = (*PACKED, "int8")
"""Bases whose linears bitsandbytes keeps quantised: every nn.Linear of the layers (transformers integrations/bitsandbytes.py,
replace_with_bnb_linear; the head and what is tied to it stay, quantizers/base.py, get_keys_to_not_convert)."""

_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NEOX = {"qkv": "query_key_value", "o_proj": "dense", "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}
_LATENT = {"kv_a_proj": "kv_a_proj_with_mqa"}
NAMES: dict[str, dict[str, str]] = {
    "baichuan": {"qkv": "W_pack"},
    "bloom": _NEOX,
    "chatglm": {**_NEOX, "gate_up": "dense_h_to_4h"},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon": _NEOX,
    "glm": {"gate_up": "gate_up_proj"},
    "glm4": {"gate_up": "gate_up_proj"},
    "glm4_moe_lite": _LATENT,
    "gpt2": {"qkv": "c_attn", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj"},
    "gpt_neox": _NEOX,
    "gptj": {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"},
    "internlm2": {"qkv": "wqkv", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "kimi_k2": _LATENT,
    "mpt": {"qkv": "Wqkv", "o_proj": "out_proj"},
    "opt": {"o_proj": "out_proj", "up_proj": "fc1", "down_proj": "fc2"},
    "phi": {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2"},
    "phi3": {"qkv": "qkv_proj", "gate_up": "gate_up_proj"},
    "starcoder2": {"up_proj": "c_fc", "down_proj": "c_proj"},
}
"""What the classes of a model call the linears of a layer, where they have other names than Llama's; fused ones by their group.

tests/trace holds them against transformers' classes, but for those whose code is the checkpoint's own (baichuan, chatglm, internlm2).
"""


_OF_SOME_MODEL = frozenset(_LLAMA).union(*(of.values() for of in NAMES.values()))
"""What recipes name together though no model has them all: PEFT leaves out what it does not find beside what it does
(tuners/tuners_utils.py, inject_adapter)."""


def adapters_type(job: Job) -> str:
    """The element type in which a job keeps its adapters; DeepSpeed casts the whole module (runtime/engine.py), and torchtune and litgpt
    make it in one type (modules/peft/lora.py; litgpt/lora.py), as Megatron-Bridge does (peft/utils.py: bfloat16()). Under FSDP1 and mixed
    precision accelerate makes all that is trained fp32 (accelerator.py, prepare_model)."""
    assert job.lora is not None
    of_the_module = job.engine.name == "deepspeed" or job.stack in OF_ONE_TYPE
    if job.engine.name == "fsdp1" and not of_the_module and job.precision.master is not None:
        return job.precision.master
    return job.precision.params if of_the_module else job.lora.dtype or ADAPTERS


def model_type(job: Job) -> str:
    """The element type of the model's own parameters: of a frozen base, the type that it was loaded in, unless DeepSpeed or litgpt casts
    it; of a quantised one, what its norms, embedding and head have (fp32 after PEFT's prepare_model_for_kbit_training)."""
    casts = job.engine.name == "deepspeed" or job.stack == "litgpt"
    as_loaded = job.lora is not None and job.lora.base == "bf16" and not casts
    return "bf16" if as_loaded else job.precision.params


def saved_type(job: Job) -> str:
    """The element type of modules trained in full: that of what they replace (peft utils/other.py, ModulesToSaveWrapper). Under
    FSDP and mixed precision accelerate makes all that is trained fp32 (utils/fsdp_utils.py, fsdp2_prepare_model, but beside four bits;
    accelerator.py, prepare_model)."""
    four_bits = job.lora is not None and job.lora.base in PACKED
    made_fp32 = job.engine.name == "fsdp1" or (job.engine.name == "fsdp2" and not four_bits)
    return job.precision.master if made_fp32 and job.precision.master is not None else model_type(job)


def is_adapted(op: Op) -> bool:
    """Whether an adapter stands beside a linear."""
    return "lora" in op.attrs


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter: A, B, or DoRA's magnitude."""
    return ".lora_" in name


def graph_of(job: Job) -> Graph:
    """The graph of what the job trains."""
    return left_wide(trained(model_of(job), job), job.precision.compute, job.engine.options)


def model_of(job: Job) -> Graph:
    """The graph of the job's model as its engine builds it, before any adapters."""
    return build(job.model, mtp=job.engine.name == "megatron", arguments=_arguments(job))


def longest_of(job: Job) -> int | None:
    """The tokens of the longest sequence that the job's model has positions for; None: any number."""
    return table_of_positions(job.model, _arguments(job))


def _arguments(job: Job) -> FrozenMap:
    options = job.engine.options
    if has_encoder(job.model):
        told = {TARGET_LENGTH: options[TARGET_LENGTH]} if TARGET_LENGTH in options else {}
        return FrozenMap({**told, CHECKPOINTED: job.recompute.kind != "none"})
    megatron = MEGATRON_ARGUMENTS if job.engine.name == "megatron" else ()
    return FrozenMap({name: options[name] for name in megatron if name in options})


def trained(graph: Graph, job: Job) -> Graph:
    """A graph with the job's adapters, as PEFT puts them into transformers' classes, torchtune, litgpt and Megatron-Bridge into their own,
    and what it freezes; in other stacks no account reads either."""
    if job.stack not in STACKS or (job.lora is None and not job.freeze):
        return graph
    if job.freeze and job.stack not in OF_TRANSFORMERS:
        raise Unsupported(
            f"is not modelled in stack {job.stack}, whose parameters have other names",
            key="freeze",
            value=", ".join(job.freeze),
            remedy="use stack transformers",
        )
    if job.lora is not None and job.lora.base in QUANTISED:
        _refuse_base(graph, job, job.lora.base)
    if job.lora is not None:
        _refuse_together(job, job.lora)
    types = ("", "", "", "")
    if job.lora is not None:
        in_full = job.precision.compute if job.engine.name in ("fsdp1", "fsdp2") else saved_type(job)
        types = (adapters_type(job), _seen_as(job), in_full, _given(job))
    rest = (job.freeze, _asks_for_input_gradients(job), job.stack, adapted_experts.of(job))
    found = _trained(graph, job.lora, types, *rest)
    quantised = job.lora is not None and job.lora.base in QUANTISED
    return widened(found) if quantised and widens(found, job) else found


def _asks_for_input_gradients(job: Job) -> bool:
    """Whether the embedding's output asks for a gradient though nothing before it is trained (enable_input_require_grads): where
    transformers checkpoints layers it sees to it (modeling_utils.py, _activation_checkpointing_enable), and reentrant checkpoints, as
    before 5.0, work with it alone; beside adapters PEFT does."""
    reentrant = job.stack_version is not None and not job.stack_version.startswith("5")
    beside = job.lora is not None and job.stack in (*OF_TRANSFORMERS, "megatron")  # Megatron-Bridge peft/recompute.py
    by_layer = reentrant or job.recompute.kind not in ("sqrt", "modules")
    return job.recompute.kind != "none" and (beside or (by_layer and job.stack in OF_TRANSFORMERS))


def _seen_as(job: Job) -> str:
    """The type in which the layer code sees the adapters: FSDP gathers them in the compute type (MixedPrecisionPolicy.param_dtype)."""
    return job.precision.compute if job.engine.name in ("fsdp1", "fsdp2") else adapters_type(job)


def _given(job: Job) -> str:
    """The type to which PEFT casts an adapter's input: that of the weight which it finds before the module runs. Under FSDP1 this is a view
    of what was gathered last, but with ``use_orig_params`` the shard (torch distributed/fsdp/_flat_param.py, _use_sharded_views); autocast
    casts again then."""
    shards = job.engine.name == "fsdp1" and job.engine.options.get("use_orig_params")
    return adapters_type(job) if shards else _seen_as(job)


@lru_cache(maxsize=64)
def _trained(
    graph: Graph,
    lora: Lora | None,
    types: tuple[str, str, str, str],
    freeze: tuple[str, ...],
    input_grads: bool,
    stack: str,
    experts: Experts,
) -> Graph:
    """types: of the adapters, as they are kept and as the layer code sees them, of modules trained in full as it sees them, and of what
    adapters are given."""
    found = graph if lora is None else _with_adapters(graph, lora, types, stack, experts)
    found = freezing.without(found, freeze) if freeze else found
    return found if input_grads else freezing.from_the_first_trained(found)


def _refuse_together(job: Job, lora: Lora) -> None:
    """What adapters do not go with, or not yet."""
    adapted_experts.refuse_together(job, lora, QUANTISED)
    if lora.modules_to_save and job.freeze:
        raise Unsupported(
            "is not modelled beside freeze", key="lora.modules_to_save", value=", ".join(lora.modules_to_save)
        )
    if HEAD in lora.targets and job.loss.kind == "fused-linear":
        raise Unsupported("as a target is not modelled with a loss that has no logits", key="lora.targets", value=HEAD)


def _with_adapters(graph: Graph, lora: Lora, types: tuple[str, str, str, str], stack: str, experts: Experts) -> Graph:
    for key, value in unmodelled(lora).items():
        raise Unsupported("is not modelled yet", key=key, value=value)
    if stack == "megatron":
        return adapted_megatron.adapted(graph, lora, types[0])
    if stack == "litgpt":
        return adapted_litgpt.adapted(graph, lora, types[0], NAMES.get(graph.runs[0].block.family, {}))
    found: set[str] = set()
    runs = [replace(run, block=_adapted(graph, run.block, lora, types, found, experts)) for run in graph.runs]
    missing = [target for target in lora.targets if target != ALL_LINEAR and target not in found]
    leaves_out = stack in OF_TRANSFORMERS and found and set(missing) <= _OF_SOME_MODEL
    if missing and not leaves_out:
        raise InvalidInput(
            "is no linear of this model's layers",
            key="lora.targets",
            value=", ".join(missing),
            allowed=", ".join(sorted({*names(graph), HEAD, ALL_LINEAR})),
        )
    adapted_experts.refuse_unmet(graph, experts)
    found_graph = replace(graph, runs=tuple(runs))
    return trained_in_full(found_graph, lora.modules_to_save, types[2]) if lora.modules_to_save else found_graph


def _refuse_base(graph: Graph, job: Job, base: str) -> None:
    """What a quantised base does not go with yet."""
    ops = [op for run in graph.runs for op in run.block.ops]
    if any(op.kind == "grouped_linear" for op in ops):
        adapted_experts.refuse_packed(graph, job, base)
    if (
        job.precision.autocast
        and job.precision.params != "fp32"
        and any(op.attrs.get("norm") == "layernorm" for op in ops)
    ):
        # autocast's layer norm gives fp32, a 4-bit linear what it was given, and so the stream becomes fp32 on its way
        raise Unsupported(
            f"with layer norms under autocast is not modelled beside {job.precision.params} parameters",
            key="lora.base",
            value=base,
            remedy="set precision.params: fp32, as prepare_model_for_kbit_training does, or precision.autocast: false",
        )


def unmodelled(lora: Lora) -> dict[str, object]:
    """What of it nothing here knows yet, by key."""
    found: dict[str, object] = {
        "lora.base": lora.base if lora.base not in ("bf16", *QUANTISED) else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def left_out(job: Job) -> tuple[str, ...]:
    """A warning of targets that the model has no linear for, where others are there."""
    if job.lora is None or job.stack not in OF_TRANSFORMERS:
        return ()
    known = {*names(model_of(job)), HEAD, ALL_LINEAR}
    missing = ", ".join(target for target in job.lora.targets if target not in known)
    return (f"lora.targets = {missing}: no linear of this model is called so; PEFT leaves it out",) if missing else ()


def names(graph: Graph) -> Iterator[str]:
    """What a target may name."""
    for run in graph.runs:
        if run.block.role == "layer":
            for ops in _called(run.block):
                yield from _names(run.block, ops)


def _called(block: Block) -> Iterator[tuple[Op, ...]]:
    """A block's ops, the projections that are one linear together."""

    def joined(op: Op) -> object:
        return op.attrs["group"] if op.kind == "linear" and op.attrs["fused"] and op.attrs["group"] else op.name

    for _, ops in groupby(block.ops, joined):
        yield tuple(ops)


def _names(block: Block, ops: tuple[Op, ...]) -> tuple[str, ...]:
    """The last parts of a linear's path, of which a target is one; a shared expert's linears have the names of a layer's own."""
    if ops[0].kind == "shared_gate":
        return ("shared_expert_gate",)
    if ops[0].kind != "linear":
        return ()
    name = ops[0].name if len(ops) == 1 else str(ops[0].attrs["group"])
    bare = name.removeprefix("shared_")
    called = NAMES.get(block.family, {}).get(bare, bare)
    if ops[0].module == delta.MODULE:
        return (called, f"{delta.MODULE}.{called}")
    return (called,) if bare == name else (called, f"shared_expert.{called}", f"shared_experts.{called}")


def _adapted(
    graph: Graph,
    block: Block,
    lora: Lora,
    types: tuple[str, str, str, str],
    found: set[str],
    experts: Experts,
) -> Block:
    """found: the targets that were met, which this adds to."""
    packed = ("linear", "shared_gate", "grouped_linear") if experts.packed else ("linear", "shared_gate")
    made: list[Op] = []
    for ops in _called(block):
        base = lora.base if block.role == "layer" and ops[0].kind in packed else "bf16"
        frozen = [_frozen(op, base) for op in ops]
        known = _names(block, ops) if block.role == "layer" else (HEAD,) if ops[0].name == HEAD else ()
        meant = [target for target in lora.targets if target in known]
        found.update(meant)
        if meant or (known and block.role == "layer" and ALL_LINEAR in lora.targets):
            frozen[0] = _with_adapter(graph, frozen[0], ops, lora, types)
        made += frozen
    return adapted_experts.adapted(graph, replace(block, ops=tuple(made)), lora, types, experts)


def _frozen(op: Op, base: str) -> Op:
    """base: what a weight is kept as; biases have the model's type."""
    kept = base if base in QUANTISED else None
    return replace(
        op,
        params=tuple(
            replace(param, trainable=False, elements=kept if param.name.endswith(".weight") else None)
            for param in op.params
        ),
    )


def _with_adapter(graph: Graph, op: Op, ops: tuple[Op, ...], lora: Lora, types: tuple[str, str, str, str]) -> Op:
    """An op with A, [rank, in], and B, [out, rank], before them DoRA's magnitude, [out]; of projections that are one linear the first
    has them for all."""
    inner, outer = op.attrs["in"], op.attrs["out"]
    assert isinstance(inner, tuple)
    assert isinstance(outer, tuple)
    if len(ops) > 1:
        outer = (sum(prod(graph.size(dim) for dim in one.outputs[0].dims[2:]) for one in ops),)
    name = op.name if len(ops) == 1 else str(op.attrs["group"])
    kept_as, seen_as, _, given = types
    low = Param(name=f"{name}.lora_A", dims=(lora.rank, *inner), elements=kept_as)
    high = Param(name=f"{name}.lora_B", dims=(*outer, lora.rank), elements=kept_as)
    adapter = {"rank": lora.rank, "dropout": lora.dropout, "dtype": seen_as, "dora": lora.dora}
    if given != seen_as:
        adapter["given"] = given
    magnitude = Param(name=f"{name}.lora_magnitude_vector", dims=outer, elements=kept_as)
    return replace(
        op,
        params=(*op.params, *((magnitude,) if lora.dora else ()), low, high),
        attrs=FrozenMap({**op.attrs.as_dict(), "lora": adapter}),
    )
