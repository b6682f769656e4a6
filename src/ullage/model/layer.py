"""One decoder layer: attention and MLP with their norms, dropouts and residual additions, in the order of the architecture; of a hybrid
one branch alone."""

from __future__ import annotations

from ullage.model.attention import attention
from ullage.model.delta import delta_net
from ullage.model.graph import STREAM, Block, Op, Tensor
from ullage.model.mamba import mamba
from ullage.model.mlp import mlp
from ullage.model.ops import dropout, norm, residual
from ullage.model.spec import DecoderSpec, Kind


def layer(spec: DecoderSpec, kind: Kind) -> Block:
    name = "layer"
    if kind.mixer:
        name += f"-{kind.mixer}"
    elif spec.experts or spec.windows:
        name += "-sparse" if kind.sparse else "-dense"
    if kind.window is not None:
        name += "-window"
    if spec.rope_layers and not kind.roped:
        name += "-nope"
    if kind.linear:
        name += "-linear"
    return Block(
        name=name,
        ops=layer_ops(spec, kind, source="x", result="y"),
        input=Tensor(name="x", dims=STREAM),
        output=Tensor(name="y", dims=STREAM),
        family=spec.family,
    )


def layer_ops(spec: DecoderSpec, kind: Kind, *, source: str, result: str) -> tuple[Op, ...]:
    if kind.mixer:
        return _one_branch(spec, kind, source, result)
    ops: list[Op] = []
    attention_input = source
    if spec.pre_norms:
        ops.append(norm(spec, "input_norm", source, "attention_in"))
        attention_input = "attention_in"
    ops += delta_net(spec, attention_input) if kind.linear else attention(spec, attention_input, kind)
    branch = _after_branch(spec, ops, "attention_out", "attention")
    if spec.parallel_residual:
        mlp_input = attention_input
        if not spec.shared_norm:
            ops.append(norm(spec, "post_attention_norm", source, "mlp_in"))
            mlp_input = "mlp_in"
        ops += mlp(spec, mlp_input, kind.sparse)
        mlp_branch = _after_branch(spec, ops, "mlp_out", "mlp")
        ops.append(residual("add_branches", branch, mlp_branch, "branches"))
        ops.append(residual("add", source, "branches", result))
        return tuple(ops)
    _add(spec, ops, "attention", source, branch, "middle")
    mlp_input = "middle"
    if spec.pre_norms:
        ops.append(norm(spec, "post_attention_norm", "middle", "mlp_in"))
        mlp_input = "mlp_in"
    ops += mlp(spec, mlp_input, kind.sparse)
    mlp_branch = _after_branch(spec, ops, "mlp_out", "mlp")
    _add(spec, ops, "mlp", "middle", mlp_branch, result)
    return tuple(ops)


def _add(spec: DecoderSpec, ops: list[Op], which: str, source: str, branch: str, result: str) -> None:
    """The branch added to the stream, with the norm of their sum where the architecture has one."""
    total = f"{which}_sum" if spec.stream_norms else result
    ops.append(residual(f"{which}_add", source, branch, total))
    if spec.stream_norms:
        ops.append(norm(spec, f"{which}_norm", total, result))


def _one_branch(spec: DecoderSpec, kind: Kind, source: str, result: str) -> tuple[Op, ...]:
    """A hybrid's layer: one norm, one mixer, one residual addition."""
    which = "mlp" if kind.mixer == "moe" else kind.mixer
    read = f"{which}_in"
    ops = [norm(spec, "post_attention_norm" if which == "mlp" else "input_norm", source, read)]
    if which == "mamba":
        ops += mamba(spec, read)
    elif which == "attention":
        ops += attention(spec, read, kind)
    else:
        ops += mlp(spec, read, kind.sparse)
    branch = _after_branch(spec, ops, f"{which}_out", which)
    ops.append(residual(f"{which}_add", source, branch, result))
    return tuple(ops)


def _after_branch(spec: DecoderSpec, ops: list[Op], name: str, which: str) -> str:
    """Dropout and a norm after a branch, where the architecture has them; returns the branch's last tensor."""
    if spec.post_norms:
        ops.append(norm(spec, f"{which}_post_norm", name, f"{name}_normed"))
        name = f"{name}_normed"
    if spec.hidden_dropout and (spec.attention_out_dropout or which != "attention"):
        ops.append(dropout(f"{which}_dropout", name, f"{name}_dropped", spec.hidden_dropout))
        name = f"{name}_dropped"
    return name
