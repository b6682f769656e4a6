"""Unsloth's layers: transformers' models whose adapted projections are one autograd function each, beside a frozen base.

Source: unslothai/unsloth, models/llama.py (LlamaDecoderLayer_fast_forward), kernels/fast_lora.py and its neighbours. A layer
keeps u(6 + 2g + 2a) + 4TH in bf16, and writes gradients over it (u = tokens x hidden x 2 B, g = kv heads / heads, a = MLP width / hidden).
"""

from __future__ import annotations

from functools import partial

from ullage.errors import Unsupported
from ullage.frozen import FrozenMap
from ullage.kernels import fused, transformers, transformers_norm, unsloth_loss
from ullage.kernels import transformers_adapters as adapters
from ullage.kernels import transformers_quantised as quantised
from ullage.kernels.eager import Tape, Value
from ullage.kernels.lowering import refuse_family
from ullage.kernels.step import Buffer, Context, Segment, Step, WeightGrad
from ullage.model.graph import Block, Op

PATCHED = frozenset({"gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"})
"""Families with fast paths of their own in models/*.py; Unsloth compiles the others' transformers code, which is not modelled."""

_OUT_OF_PLACE = frozenset({"gemma", "gemma2"})
"""Families whose norm's gradient is a new tensor (kernels/rms_layernorm.py, ctx.GEMMA)."""

_GROUPS = {"qkv": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj", "act", "down_proj"), "o": ("o_proj",)}


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    """The steps of a block: the fast functions where every linear of one has an adapter without dropout and no bias, else PEFT's."""
    refuse_family(block, context, PATCHED)
    if context.tp > 1:
        raise Unsupported("is not modelled under tensor parallelism", key="stack", value="unsloth")
    named = {op.name: op for op in block.ops}
    fast = {
        group: names
        for group, names in _GROUPS.items()
        if all(_is_fast(named[name]) for name in names if name in named)
    }
    return transformers.written(
        block,
        context,
        transformers.LayerCode(
            kernels={**transformers.KERNELS, "norm": norm, "rope": rope},
            without_logits=unsloth_loss.loss,
            gates_first=False,
            joins=partial(_joins, {name: group for group, names in fast.items() for name in names}),
            together=_together,
        ),
    )


def _is_fast(op: Op) -> bool:
    """models/llama.py, patch_peft_model."""
    if op.kind != "linear":
        return True
    adapter = op.attrs.get("lora")
    return isinstance(adapter, FrozenMap) and not adapter["dropout"] and len(adapters.base(op)) == 1


def _joins(groups: dict[str, str], op: Op) -> str:
    return groups.get(op.name, "") or transformers.joins(op)


def _together(tape: Tape, ops: tuple[Op, ...]) -> None:
    if ops[0].name == "q_proj":
        _qkv(tape, ops)
    elif ops[0].name == "o_proj":
        _out(tape, ops[0])
    elif ops[0].module == "mlp" and ops[-1].name == "down_proj":
        _mlp(tape, ops)
    else:
        transformers.together(tape, ops)


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    """Unsloth has none; a policy by op would see into its functions."""
    raise Unsupported("is not modelled in stack unsloth", key="recompute", value="selective", remedy="use full or none")


def buffers(context: Context) -> tuple[Buffer, ...]:
    """transformers' own."""
    return transformers.buffers(context)


def norm(tape: Tape, op: Op) -> Value:
    """Keeps its input and one number a row; its weight gets no gradient."""
    if op.attrs["norm"] == "layernorm" or any(param.trainable for param in op.params):
        return transformers_norm.norm(tape, op)
    return fused.rms_norm(tape, op, tape[op.inputs[0]], in_place=tape.family not in _OUT_OF_PLACE)


def rope(tape: Tape, op: Op) -> None:
    """q and k as attention takes them lie across their projections, so they are copied and turned there; so are their gradients."""
    tape.module = "rope"
    for name, output in zip(op.inputs, op.outputs, strict=True):
        source = tape[name]
        tape.emit(
            output.name, (source,), Value(output.name, output.dims, source.dtype), what=f"{name} after rotary embedding"
        )


def _qkv(tape: Tape, ops: tuple[Op, ...]) -> None:
    """LoRA_QKV: keeps its input, over which the input's gradient is written."""
    tape.module = "qkv"
    source = tape[ops[0].inputs[0]]
    first, *others = (Value(op.outputs[0].name, op.outputs[0].dims, source.dtype) for op in ops)
    tape.emit(
        "lora_qkv",
        (source,),
        first,
        what="q_proj output",
        beside=tuple(tape.buffer(tape.define(one), f"{one.name}_proj output") for one in others),
        saves=(source,),
        reuses=(source,),
        scratch=_dequantised(tape, ops),
        backward_scratch=_dequantised(tape, ops),
        weights=_adapters(tape, ops),
    )


def _out(tape: Tape, op: Op) -> None:
    """LoRA_W: keeps its input, which attention keeps anyway."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    tape.emit(
        "lora_o",
        (source,),
        Value(op.outputs[0].name, op.outputs[0].dims, source.dtype),
        what="o_proj output",
        saves=(source,),
        scratch=_dequantised(tape, (op,)),
        backward_scratch=_dequantised(tape, (op,)),
        weights=_adapters(tape, (op,)),
    )


def _mlp(tape: Tape, ops: tuple[Op, ...]) -> None:
    """LoRA_MLP: keeps its input, gate and up. The gated activation is made again over the gradient of itself, the gradients of gate and
    up are written over them, and the input's over the input."""
    tape.module = "mlp"
    gate, up, act, down = ops
    source = tape[gate.inputs[0]]
    wide = [Value(op.outputs[0].name, op.outputs[0].dims, source.dtype) for op in (gate, up, act)]
    linears = (gate, up, down)
    kept = tuple(tape.buffer(one, f"{one.name}_proj output") for one in wide[:2])
    product = tape.buffer(wide[2], "gated activation")
    tape.emit(
        "lora_mlp",
        (source,),
        Value(down.outputs[0].name, down.outputs[0].dims, source.dtype),
        what="down_proj output",
        beside=kept,
        saves=(source, *(one.name for one in kept)),
        reuses=(source,),
        scratch=(product, *_dequantised(tape, linears)),
        backward_scratch=(tape.scratch("lora_mlp.grad", wide[2]), *_dequantised(tape, linears)),
        weights=_adapters(tape, linears),
    )


def _adapters(tape: Tape, ops: tuple[Op, ...]) -> tuple[WeightGrad, ...]:
    found = []
    for op in ops:
        adapter = op.attrs["lora"]
        assert isinstance(adapter, FrozenMap)
        found += [tape.context.weight(param.name, param.dims, str(adapter["dtype"])) for param in op.params[-2:]]
    return tuple(found)


def _dequantised(tape: Tape, ops: tuple[Op, ...]) -> tuple[Buffer, ...]:
    """The largest of the weights whole, with its scales in fp32; of a base in 16 bits nothing (kernels/utils.py, fast_dequantize)."""
    quantised_ops = [op for op in ops if quantised.is_quantised(op)]
    if not quantised_ops:
        return ()
    largest = max((adapters.base(op)[0] for op in quantised_ops), key=lambda param: tape.context.numel(param.dims))
    scales = -(-tape.context.numel(largest.dims) // quantised.BLOCK)
    return (
        tape.context.buffer("dequantised", largest.dims, tape.context.compute, f"{largest.name}, dequantised"),
        tape.context.buffer("scales", (scales,), "fp32", f"scales of {largest.name}"),
    )
