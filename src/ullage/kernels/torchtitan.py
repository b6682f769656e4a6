"""torchtitan's layer code in bf16 under FSDP2's mixed precision (parameters arrive in bf16; no autocast).

Sources: pytorch/torchtitan by date (``stack_version``): models/llama/model.py and models/common (layers), parallelisms and
infra/parallelize.py (tensor parallelism), distributed/activation_checkpoint.py (what selective checkpointing saves), components/loss.py.

Eager, each op saves what its autograd node saves. ``compile: true`` compiles each block by itself: inductor fuses pointwise ops, so norms,
rotary embedding and SwiGLU have no intermediate tensors, and its partitioner then saves, of a llama block without checkpointing: the
block's input, both norm outputs, q and k after rotary embedding, v, the attention's output and statistics, the output projection, gate,
up and their product. Traced on torch 2.13 (min_cut_rematerialization_partition on a block of these proportions).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.errors import Unsupported
from ullage.kernels import pointwise, torchtitan_attention, torchtitan_captured, torchtitan_loss, torchtitan_moe
from ullage.kernels.lowering import lower_ops
from ullage.kernels.step import Buffer, Context, Segment, Step, WeightGrad
from ullage.kernels.torchtitan_linear import embedding, linear
from ullage.kernels.torchtitan_selective import policy
from ullage.kernels.torchtitan_version import FUSED_NORM_SINCE, OWN_NORM_UNTIL, QKV_FUSED_SINCE, before
from ullage.model.graph import Block, Op


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    if context.autocast:
        raise Unsupported(
            "torchtitan's layers are modelled under FSDP's mixed precision, not under autocast",
            key="engine.name",
            remedy="use engine fsdp2, or precision bf16 or fp32",
        )
    if any(op.name == "add_branches" for op in block.ops):
        raise Unsupported("torchtitan has no layer of parallel branches", key="stack", value=context.stack)
    if context.compile and block.role != "layer" and not str(context.option("compile_scope", "")).startswith("whole"):
        context = replace(context, compile=False)
    fused = frozenset[str]() if before(context, QKV_FUSED_SINCE) else frozenset({"linear"})
    return lower_ops(block, context, _KERNELS, fused=fused)


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    """The per-op policy (selective_ac_option "op"): saves attention and every second matmul. A captured graph has policies of its own."""
    if torchtitan_captured.is_captured(context):
        return torchtitan_captured.policy(steps, context)
    return policy(steps, context)


def norm(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """RMSNorm. Fused kernel (torch from about 2025-08, or compiled): saves its input and one fp32 statistic a row.

    torchtitan's own class until 2025-03-19 casts up, normalises, casts down and scales: saves the fp32 copy and the bf16 factor. torch's
    own op before its fused kernel scales before casting down: saves two fp32 copies (aten/native/layer_norm.cpp ``rms_norm_composite``).
    """
    (op,) = ops
    output = context.tensor(op.outputs[0], f"{op.name} output")
    dims = op.outputs[0].dims
    weights = tuple(context.weight(param.name, param.dims) for param in op.params)
    stats = context.buffer(f"{op.name}.stats", dims[:-1], "fp32", f"{op.name} statistics")
    layernorm = op.attrs["norm"] == "layernorm"
    if context.compile or layernorm or not before(context, FUSED_NORM_SINCE):
        return [
            Step(
                name=op.name,
                reads=op.inputs,
                writes=(output, stats),
                saves=(*op.inputs, stats.name),
                weights=weights,
                module=op.module,
            )
        ]
    return _composed_norm(op, output, stats, weights, context)


def _composed_norm(
    op: Op, output: Buffer, stats: Buffer, weights: tuple[WeightGrad, ...], context: Context
) -> list[Step]:
    """RMSNorm out of single ops, in fp32: each reads and writes whole tensors.

    Normalising: pow, mean and mul. Backward: two of the mul's gradients and the sum of one, the mean's gradient expanded, pow's (x to the
    first power, times two, times the gradient), and their sum (torch/csrc/autograd/FunctionsManual.cpp, pow_backward, mean_backward).
    Scaling: a mul; backward two, of which one is summed over rows.
    """
    dims = op.outputs[0].dims
    numel = context.numel(dims)
    upcast = context.buffer(f"{op.name}.upcast", dims, "fp32", f"fp32 copy of the input of {op.name}")
    cast = Step(name=f"{op.name}.upcast", reads=op.inputs, writes=(upcast,), module=op.module)
    own = before(context, OWN_NORM_UNTIL) and context.option("rmsnorm") != "torch.nn.RMSNorm"
    whole = context.buffer(f"{op.name}.normed_fp32", dims, "fp32", f"{op.name}: normalised, fp32")
    normed = whole if not own else Buffer(f"{op.name}.normed", output.bytes, f"{op.name}: normalised", output.formula)
    scratch = (whole,) if own else (context.buffer(f"{op.name}.scaled", dims, "fp32", f"{op.name}: scaled, fp32"),)
    rescale = context.buffer(f"{op.name}.grad", dims, "fp32", f"{op.name}: fp32 gradient")
    return [
        cast,
        Step(
            name=f"{op.name}.normalise",
            reads=(upcast.name,),
            writes=(normed, stats),
            saves=(upcast.name, stats.name),
            scratch=scratch if own else (),
            backward_scratch=(rescale,),
            moves=(numel * (20 + (6 if own else 0)), numel * (68 + (6 if own else 0))),
            module=op.module,
        ),
        Step(
            name=op.name,
            reads=(normed.name,),
            writes=(output,),
            saves=(normed.name,),
            scratch=() if own else scratch,
            weights=weights,
            moves=(numel * 4, numel * 12) if own else (numel * 14, numel * 30),
            module=op.module,
        ),
    ]


def activation(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """SwiGLU: silu(gate) * up as two autograd nodes; compiled, one that saves gate and up."""
    (op,) = ops
    output = context.tensor(op.outputs[0], f"{op.name} output")
    if context.compile or not op.attrs["glu"]:
        return [Step(name=op.name, reads=op.inputs, writes=(output,), saves=op.inputs, module=op.module)]
    return pointwise.gated(op, output)


_KERNELS = {
    "norm": norm,
    "linear": linear,
    "rope": torchtitan_attention.rope,
    "attention": torchtitan_attention.attention,
    "split": torchtitan_attention.latent_split,
    "mla_assemble": torchtitan_attention.latent_assemble,
    "activation": activation,
    "residual": pointwise.residual,
    "dropout": pointwise.dropout,
    "embedding": embedding,
    "router": torchtitan_moe.router,
    "dispatch": torchtitan_moe.dispatch,
    "grouped_linear": torchtitan_moe.grouped_linear,
    "combine": torchtitan_moe.combine,
    "shared_gate": torchtitan_moe.shared_gate,
    "concat": pointwise.concat,
    "add_losses": pointwise.concat,
    "loss": torchtitan_loss.loss,
}
