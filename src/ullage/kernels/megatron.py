"""Megatron-Core's layer code, with Transformer Engine (the default) or its local layers (``transformer_impl: local``).

Sources: NVIDIA/Megatron-LM megatron/core (transformer/attention.py, mlp.py, moe/, tensor_parallel/layers.py, cross_entropy.py) and
NVIDIA/TransformerEngine pytorch/module, pytorch/attention. Unless noted, what is saved was traced on Megatron-Core itself.

With sequence parallelism a column-parallel linear saves its *sharded* input and gathers it again in the backward.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ullage.errors import Unsupported
from ullage.job.adapted import is_adapted, is_adapter
from ullage.kernels import megatron_adapters, megatron_attention, megatron_loss, megatron_mamba, megatron_moe, pointwise
from ullage.kernels.lowering import lower_ops, module_segments
from ullage.kernels.megatron_common import gathers, is_local, narrow_input
from ullage.kernels.megatron_graphs import captures, replayed
from ullage.kernels.megatron_offload import offloaded
from ullage.kernels.step import Buffer, Context, Segment, Step, WeightGrad
from ullage.model.graph import BATCH, SEQ, Block, Op

FUSED = frozenset({"linear", "grouped_linear"})


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    if context.autocast:
        raise Unsupported(
            "Megatron's layers run in the parameters' own type, not under autocast",
            key="engine.name",
            remedy="use engine megatron or deepspeed, or precision bf16 or fp32",
        )
    steps = eager_steps(block, context)
    if captures(context):
        steps = replayed(steps, context)
    return offloaded(steps, context) if context.option("fine_grained_activation_offloading") else steps


def eager_steps(block: Block, context: Context) -> tuple[Step, ...]:
    """The steps of a block as they run outside of CUDA graphs, with everything on the device."""
    block = _up_projections_last(block)
    return lower_ops(block if is_local(context) else _fused_norms(block), context, _KERNELS, fused=FUSED)


@lru_cache(maxsize=256)
def _up_projections_last(block: Block) -> Block:
    """Latent attention makes both down-projections first, and recomputes both up-projections as one (multi_latent_attention.py)."""
    places = [at for at, op in enumerate(block.ops) if op.module == "mla_up_proj"]
    if not places:
        return block
    region = block.ops[places[0] : places[-1] + 1]
    down = [op for op in region if op.module != "mla_up_proj"]
    up = [op for op in region if op.module == "mla_up_proj"]
    return replace(block, ops=(*block.ops[: places[0]], *down, *up, *block.ops[places[-1] + 1 :]))


@lru_cache(maxsize=256)
def _fused_norms(block: Block) -> Block:
    """Transformer Engine makes the norm before column-parallel linears in their own module, where --recompute-modules layernorm has nothing
    to do and mlp runs it again too (core/models/gpt/gpt_layer_specs.py: TELayerNormColumnParallelLinear, IdentityOp for the norm)."""

    def fused(op: Op) -> Op:
        readers = [one for one in block.ops if op.outputs[0].name in one.inputs] if op.module == "layernorm" else []
        if readers and all(one.attrs.get("parallel") == "column" for one in readers):
            return replace(op, module=readers[0].module)
        return op

    return replace(block, ops=tuple(map(fused, block.ops)))


RECOMPUTABLE = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""--recompute-modules (megatron/core/transformer/transformer_config.py)."""

INSIDE = (("moe_act", "moe"), ("shared_experts", "moe"))
"""Modules that are part of another one, and it."""

_DISCARDED = frozenset({"layernorm", "moe_act", "mla_up_proj"})


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    """--recompute-granularity selective without modules: core attention alone (Korthikanti et al., arXiv 2205.05198, section 5)."""
    return modules(steps, ("core_attn",))


def modules(steps: tuple[Step, ...], names: tuple[str, ...]) -> tuple[Segment, ...]:
    """--recompute-modules. layernorm, moe_act and mla_up_proj drop their output too (CheckpointWithoutOutput); moe is the whole layer of
    experts, with its activation and what is shared (moe_layer.py, custom_forward)."""
    return module_segments(steps, names, discards_output=_DISCARDED, inside=INSIDE)


def norm(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Fused norm: saves its input and one or two fp32 statistics a row."""
    (op,) = ops
    output = op.outputs[0]
    per_row = output.dims[:-1]
    statistics = 2 if op.attrs["norm"] == "layernorm" else 1
    stats = context.buffer(f"{op.name}.stats", per_row, "fp32", f"{op.name} statistics", copies=statistics)
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(context.tensor(output, f"{op.name} output"), stats),
            saves=(*op.inputs, stats.name),
            weights=tuple(context.weight(param.name, param.dims) for param in op.params),
            module=op.module,
        )
    ]


def linear(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """One matmul: a linear, or neighbours fused into one (qkv; gate and up)."""
    first = ops[0]
    weights = tuple(weight for op in ops for weight in linear_weights(op, context))
    name = first.name if len(ops) == 1 else str(first.attrs["group"])
    if len(ops) == 1:
        output = context.tensor(first.outputs[0], f"{name} output")
    else:
        total = sum(context.tensor(op.outputs[0]).bytes for op in ops)
        formula = " + ".join(context.tensor(op.outputs[0]).formula for op in ops)
        output = Buffer(fused_name(first), total, f"{name} projection output", formula)
    adapted = is_adapted(first)
    kept = narrow_input(first, name, context)
    saved = tuple(buffer.name for buffer in kept) or first.inputs
    forward, backward = _forward_buffers(first, name, context), _backward_buffers(first, name, context)
    steps = [
        Step(
            name=name,
            reads=first.inputs,
            writes=(megatron_adapters.beside(output) if adapted else output, *kept),
            saves=saved,
            scratch=forward,
            backward_scratch=backward,
            weights=weights,
            serves=_serves(first, saved, forward, weights, returned=adapted and not is_local(context)),
            module=first.module,
        )
    ]
    if adapted:
        steps += megatron_adapters.added(first, output, context)
    if len(ops) > 1:
        steps.append(_split(ops, output, name, context))
    return steps


def _serves(
    op: Op, saved: tuple[str, ...], gathered: tuple[Buffer, ...], weights: tuple[WeightGrad, ...], *, returned: bool
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a linear keeps, and gathers again, for its weights' gradients alone: a frozen one has no use for it.

    returned: to an adapter. Transformer Engine keeps a norm's output that it returns, whoever asks for it (module/layernorm_linear.py,
    ln_out_to_save): that of column-parallel linears but of shared experts, whose norm is the layer's own.
    """
    params = tuple(weight.param for weight in weights)
    with_norm = op.attrs.get("parallel") == "column" and not op.name.startswith("shared_")
    kept = () if returned and with_norm else saved
    again = gathered if op.attrs.get("parallel") == "column" else ()
    return tuple((name, params) for name in (*kept, *(buffer.name for buffer in again)))


def output_layer(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Megatron's own ColumnParallelLinear, under Transformer Engine too (tensor_parallel/layers.py).

    It gathers into the global buffer "mpu", which the engine counts; its fused weight gradient still returns a new empty
    tensor of the weight's shape to autograd (LinearWithGradAccumulationAndAsyncCommunication.backward).
    """
    (op,) = ops
    weights = tuple(linear_weights(op, context))
    scratch = []
    if gathers(context):
        scratch.append(
            _whole(f"{op.name}.dgrad", op.attrs["in"], context, "input gradient of the head before reduce-scatter")
        )
    if context.option("gradient_accumulation_fusion", True):
        scratch.append(
            context.buffer(f"{op.name}.dummy", ("vocab", "hidden"), what="empty weight gradient that autograd is given")
        )
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(context.tensor(op.outputs[0], "logits"),),
            saves=op.inputs,
            backward_scratch=tuple(scratch),
            weights=weights,
            serves=tuple((name, tuple(one.param for one in weights)) for name in (*op.inputs, f"{op.name}.dummy")),
            module=op.module,
        )
    ]


def fused_name(first: Op) -> str:
    """The output of a fused projection, named after the first of its parts."""
    return f"{first.outputs[0].name}.fused"


def linear_weights(op: Op, context: Context) -> list[WeightGrad]:
    """The weight gradients of a linear; of the weight that it shares where it has none of its own."""
    shared = op.attrs.get("shared")
    if isinstance(shared, str):
        return [context.weight(shared, ("vocab", "hidden"), fusable=True)]
    own = [param for param in op.params if not is_adapter(param.name)]
    return [context.weight(param.name, param.dims, fusable=len(param.dims) > 1) for param in own]


def _split(ops: tuple[Op, ...], fused: Buffer, name: str, context: Context) -> Step:
    """Views of a fused projection's output; their gradients are written into one buffer again."""
    return Step(
        name=f"{name}.split",
        reads=(fused.name,),
        aliases=tuple((context.tensor(op.outputs[0]), fused.name) for op in ops),
        module=ops[0].module,
    )


def _forward_buffers(op: Op, name: str, context: Context) -> tuple[Buffer, ...]:
    if not gathers(context):
        return ()
    if op.attrs["parallel"] == "column":
        return (_whole(f"{name}.gathered", op.attrs["in"], context, f"input of {name}, gathered over the sequence"),)
    if op.attrs["parallel"] == "row":
        return (_whole(f"{name}.partial", op.attrs["out"], context, f"partial output of {name} before reduce-scatter"),)
    return ()


def _backward_buffers(op: Op, name: str, context: Context) -> tuple[Buffer, ...]:
    if not gathers(context):
        return ()
    if op.attrs["parallel"] == "column":
        return (
            _whole(f"{name}.gathered", op.attrs["in"], context, f"input of {name}, gathered over the sequence"),
            _whole(f"{name}.dgrad", op.attrs["in"], context, f"input gradient of {name} before reduce-scatter"),
        )
    if op.attrs["parallel"] == "row":
        return (_whole(f"{name}.gathered_grad", op.attrs["out"], context, f"gathered output gradient of {name}"),)
    return ()


def _whole(name: str, features: object, context: Context, what: str) -> Buffer:
    assert isinstance(features, tuple)
    return context.buffer(name, (BATCH, SEQ, *features), what=what)


def activation(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Bias and activation in one kernel saves the projection's output alone; unfused, every factor of the product too."""
    (op,) = ops
    output = context.tensor(op.outputs[0], f"{op.name} output")
    fused = context.option("bias_swiglu_fusion" if op.attrs["glu"] else "bias_gelu_fusion", True)
    if op.attrs.get("experts") and not megatron_moe.weighted_after(context):
        if op.attrs["act"] == "squared-relu":
            fused = context.option("use_fused_weighted_squared_relu", False)
        elif not op.attrs["glu"]:
            fused = False  # of experts, which have no bias, only SwiGLU is fused with its weighting (moe/experts.py)
        return megatron_moe.expert_activation(op, context, fused=bool(fused))
    if fused and op.attrs["glu"]:  # reads the fused projection, and writes one gradient for it
        whole = f"{op.inputs[0]}.fused"
        return [Step(name=op.name, reads=(whole,), writes=(output,), saves=(whole,), module=op.module)]
    if not op.attrs["glu"]:
        return [Step(name=op.name, reads=op.inputs, writes=(output,), saves=op.inputs, module=op.module)]
    return pointwise.gated(op, output)


def embedding(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Vocabulary-parallel look-up: a whole-sequence partial result, then reduced (and scattered under sequence parallelism)."""
    (op,) = ops
    output = context.tensor(op.outputs[0], "embedding output")
    scratch: tuple[Buffer, ...] = ()
    if context.tp > 1:
        scratch = (context.buffer("embedding.partial", (BATCH, SEQ, "hidden"), what="embedding before its reduction"),)
    return [
        Step(
            name=op.name,
            writes=(output,),
            scratch=scratch,
            backward_scratch=scratch if gathers(context) else (),
            weights=tuple(context.weight(param.name, param.dims) for param in op.params),
            module="embedding",
        )
    ]


def gather_features(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """A column-parallel output made whole again. Under sequence parallelism a rank goes on with a view of its own rows, which keeps all of
    them (core/transformer/multi_token_prediction.py, _concat_embeddings; tensor_parallel/mappings.py, _split_along_first_dim)."""
    (op,) = ops
    (part,) = op.inputs
    output = context.tensor(op.outputs[0])
    if context.tp == 1:
        return [Step(name=op.name, reads=(part,), aliases=((output, part),), module=op.module)]
    whole = context.buffer(f"{output.name}.whole", (BATCH, SEQ, "hidden"), what=f"{op.name}: all features of all rows")
    pieces = whole._replace(name=f"{output.name}.pieces", what=f"{op.name}: features by rank, before they are joined")
    return [
        Step(name=op.name, reads=(part,), writes=(whole,), scratch=(pieces,), module=op.module),
        Step(name=f"{op.name}.own", reads=(whole.name,), aliases=((output, whole.name),), module=op.module),
    ]


_KERNELS = {
    "norm": norm,
    "linear": lambda ops, context: (
        output_layer(ops, context) if ops[0].name.endswith("lm_head") else linear(ops, context)
    ),
    "rope": megatron_attention.rope,
    "attention": megatron_attention.attention,
    "split": megatron_attention.latent_split,
    "mla_assemble": megatron_attention.latent_assemble,
    "activation": activation,
    "residual": pointwise.residual,
    "dropout": pointwise.dropout,
    "embedding": embedding,
    "router": megatron_moe.router,
    "dispatch": megatron_moe.dispatch,
    "grouped_linear": megatron_moe.grouped_linear,
    "combine": megatron_moe.combine,
    "shared_gate": megatron_moe.shared_gate,
    "ssm": megatron_mamba.scan,
    "ssm_norm": megatron_mamba.norm,
    "concat": pointwise.concat,
    "gather_features": gather_features,
    "add_losses": pointwise.concat,
    "loss": megatron_loss.loss,
}
