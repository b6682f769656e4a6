"""litgpt's layer code (Lightning-AI/litgpt, litgpt/model.py and lora.py), op by op as its eager PyTorch runs it.

One model for every family: queries, keys and values in one linear, rotary embedding in fp32 and joined anew, keys and values copied for
every query head, norms in fp32. A stack version is the day of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ullage.errors import Unsupported
from ullage.frozen import FrozenMap
from ullage.job.adapted_litgpt import QKV, grouped
from ullage.kernels import (
    litgpt_attention,
    litgpt_loss,
    transformers_linear,
    transformers_mlp,
    transformers_norm,
)
from ullage.kernels import transformers_quantised as quantised
from ullage.kernels.eager import Tape, Value
from ullage.kernels.lowering import kernel_of, refuse_family
from ullage.kernels.step import Buffer, Context, Segment, Step
from ullage.model.graph import SEQ, Block, Op

Emit = Callable[[Tape, Op], object]

FAMILIES = frozenset(
    {
        "falcon", "gemma", "gemma2", "gemma3_text", "gpt", "gpt_neox", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi", "phi3",
        "qwen2", "qwen3", "qwen3_moe", "stablelm",
    }
)  # fmt: skip
"""What its one class is configured as (litgpt/config.py); models with a table of positions, ALiBi or latent attention are not."""


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    refuse_family(block, context, FAMILIES)
    tape = Tape(context, block)
    for ops in grouped(block):
        first = ops[0]
        if first.attrs.get("group") == QKV:
            litgpt_attention.projected(tape, ops)
            continue
        kernel_of(KERNELS, first, context)(tape, first)
    return tuple(tape.steps)


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    raise Unsupported(
        "is not modelled for litgpt",
        key="recompute",
        value="selective",
        remedy="use full, which is each Block, or none",
    )


def buffers(context: Context) -> tuple[Buffer, ...]:
    """cos and sin in fp32, of as many positions as the longest sequence has (model.py, rope_cache; finetune sets max_seq_length)."""
    if "head_dim" not in context.sizes:
        return ()
    return tuple(
        context.buffer(name, (SEQ, "head_dim"), "fp32", f"{name} of the rotary embedding") for name in ("cos", "sin")
    )


def left(block: Block, context: Context) -> tuple[Buffer, ...]:
    """Inputs that bitsandbytes' node keeps in an attribute of its own, which goes with the node: the training loop's ``loss`` names the
    graph until the next one is there. Until 2024-02-29 the first batch alone had the longest sample: what it left fell in a lower place.
    """
    if not quantised.keeps_inputs(context) or (context.version or "") < litgpt_loss.LONGEST_FIRST_UNTIL:
        return ()
    steps = lower(block, context)
    made = {buffer.name: buffer for step in steps for buffer in step.writes}
    viewed = {view.name if isinstance(view, Buffer) else view: of for step in steps for view, of in step.aliases}
    kept = {name: None for step in steps if step.op == quantised.OP for name in step.saves}
    roots = {_root(name, viewed): None for name in kept}
    what = "input of a 4-bit linear, of the micro-batch before"
    return tuple(made[name]._replace(what=what) for name in roots if name in made)


def named(block: Block, context: Context) -> tuple[Buffer, ...]:
    """The fp32 logits, which the loop calls ``logits`` until it has the next ones."""
    made = (buffer for step in lower(block, context) for buffer in step.writes) if block.role == "head" else ()
    return tuple(buffer for buffer in made if buffer.what == litgpt_loss.NAMED)


def _root(name: str, viewed: Mapping[str, str]) -> str:
    while name in viewed:
        name = viewed[name]
    return name


def embedding(tape: Tape, op: Op) -> Value:
    """The look-up; Gemma's is scaled."""
    tape.module = "embedding"
    (param,) = op.params
    output = tape.like(op.outputs[0], tape.weight_dtype)
    scales = tape.family.startswith("gemma")
    looked = Value(f"{output.name}.unscaled", output.dims, output.dtype) if scales else output
    weights = (tape.weight(param.name, param.dims),)
    tape.emit(looked.name, (), looked, what="embedding output", weights=weights)
    return tape.scale(looked, output.name) if scales else looked


NORMS_NARROW = ("2024-02-23", "2024-07-23")
"""From Gemma's support to Gemma 2's the norm came back from fp32 before its weight, before and after only behind it."""


def norm(tape: Tape, op: Op) -> Value:
    """torch's layer norm, or an RMSNorm in fp32 (rmsnorm.py, later in model.py)."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    if op.attrs["norm"] == "layernorm":
        return transformers_norm.layer_norm(tape, op, source)
    since, until = NORMS_NARROW
    narrow = since <= (tape.context.version or "9") < until
    return (transformers_norm.rms if narrow else transformers_norm.wide_rms)(tape, op, source)


def linear(tape: Tape, op: Op) -> Value:
    if op.name == "lm_head":
        return litgpt_loss.head(tape, op)
    made = transformers_linear.linear(tape, op)
    if op.name == "o_proj":
        litgpt_attention.returns(tape)
    return made


def activation(tape: Tape, op: Op) -> Value:
    """silu or gelu, each one kernel: what transformers composes for the tanh approximation is F.gelu here."""
    fused = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
    form = str(op.attrs["form"])
    attrs = FrozenMap({**op.attrs.as_dict(), "form": fused.get(form, form)})
    return transformers_mlp.activation(tape, replace(op, attrs=attrs))


def residual(tape: Tape, op: Op) -> Value:
    tape.module = ""
    left, right = (tape[name] for name in op.inputs)
    return tape.add(left, right, tape.like(op.outputs[0], tape.context.residual), "residual stream")


KERNELS: Mapping[str, Emit] = {
    "embedding": embedding,
    "norm": norm,
    "linear": linear,
    "rope": litgpt_attention.rope,
    "attention": litgpt_attention.attention,
    "activation": activation,
    "residual": residual,
    "loss": litgpt_loss.loss,
}
