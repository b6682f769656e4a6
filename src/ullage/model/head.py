"""The last block: final norm, output projection, loss; multi-token prediction and BERT's further heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ullage.frozen import FrozenMap
from ullage.model.graph import BATCH, SEQ, SEQ_SP, STREAM, Block, Dim, Op, Param, Tensor
from ullage.model.layer import layer_ops
from ullage.model.ops import linear, norm
from ullage.model.spec import DecoderSpec, Kind, hybrid_kind
from ullage.model.task import activation, dense, task_ops


def _head_ops(spec: DecoderSpec, source: str, *, loss: str = "loss", shared: bool = False) -> tuple[Op, ...]:
    """The output projection and the loss; ``shared``: with the weight of the main head."""
    head = linear(
        "lm_head",
        source,
        Tensor(name="logits", dims=(BATCH, SEQ, "vocab")),
        ("vocab",),
        ("hidden",),
        parallel="column",
        bias=spec.head_bias,
    )
    if shared:
        head = replace(head, params=(), attrs=FrozenMap({**head.attrs, "shared": "lm_head.weight"}))
    return (
        head,
        Op(
            name="loss",
            kind="loss",
            inputs=("logits",),
            outputs=(Tensor(name=loss, dims=(1,), elements="fp32"),),
            attrs=FrozenMap({"softcap": spec.logits_softcap}),
        ),
    )


def head(spec: DecoderSpec) -> Block:
    """Final norm, output projection and loss; before them the multi-token prediction modules, whose losses are added."""
    ops: list[Op] = []
    losses: list[str] = []
    source = "x"
    for depth in range(spec.mtp_layers):
        prefix = f"mtp{depth}_"
        ops += [_prefixed(op, prefix, outer=source) for op in _mtp_ops(spec)]
        losses.append(f"{prefix}loss")
        source = f"{prefix}y"
    normed = "x"
    if spec.final_norm:
        ops.append(norm(spec, "norm", "x", "head_in", module="final_norm"))
        normed = "head_in"
    if spec.task is not None:
        return _block(spec, [*ops, *task_ops(spec, spec.task, normed)])
    if spec.bert_head:
        ops += _bert_ops(spec, normed)
        losses.append("binary_logits")
        normed = "transformed"
    ops += _head_ops(spec, normed, loss="main_loss" if losses else "loss")
    if losses:
        ops.append(
            Op(
                name="add_losses",
                kind="add_losses",
                inputs=("main_loss", *losses),
                outputs=(Tensor(name="loss", dims=(1,), elements="fp32"),),
            )
        )
    return _block(spec, ops)


def _block(spec: DecoderSpec, ops: list[Op]) -> Block:
    return Block(
        name="head",
        ops=tuple(ops),
        input=Tensor(name="x", dims=STREAM),
        output=Tensor(name="loss", dims=(1,), elements="fp32"),
        role="head",
        family=spec.family,
    )


def _bert_ops(spec: DecoderSpec, source: str) -> list[Op]:
    """What BERT has beside a vocabulary: a dense layer with its norm before it, and a classifier of the first token (arXiv 1810.04805).

    The classifier's cross entropy over two classes is left out; its logits stand for it.
    """
    first_token: tuple[Dim, ...] = (BATCH, "hidden")
    return [
        dense("lm_dense", source, Tensor(name="lm_up", dims=STREAM), "hidden"),
        activation("lm_act", spec.mlp, "lm_up", Tensor(name="lm_product", dims=STREAM)),
        norm(spec, "lm_norm", "lm_product", "transformed", module="head"),
        dense("pooler", source, Tensor(name="pooler_up", dims=first_token), "hidden"),
        activation("pooler_act", "tanh", "pooler_up", Tensor(name="pooled", dims=first_token)),
        dense("binary_head", "pooled", Tensor(name="binary_logits", dims=(BATCH, 2)), 2),
    ]


def _prefixed(op: Op, prefix: str, outer: str) -> Op:
    """The op under names of its own; "x" is the tensor ``outer`` of the surrounding block."""
    group = op.attrs.get("group")
    return replace(
        op,
        name=prefix + op.name,
        attrs=FrozenMap({**op.attrs, "group": f"{prefix}{group}"}) if group else op.attrs,
        inputs=tuple(outer if name == "x" else prefix + name for name in op.inputs),
        outputs=tuple(replace(tensor, name=prefix + tensor.name) for tensor in op.outputs),
        params=tuple(replace(param, name=prefix + param.name) for param in op.params),
    )


def _mtp_ops(spec: DecoderSpec) -> list[Op]:
    """One multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2): two norms, a projection, a layer, a loss.

    It reads the stream and the embedding of the next token, and shares the main head and the embedding, of which its pipeline stage has a
    copy (megatron/core/models/gpt/gpt_model.py: pre_process or mtp_process).
    """
    return [
        Op(
            name="embed_tokens",
            kind="embedding",
            inputs=(),
            outputs=(Tensor(name="next_embedded", dims=STREAM),),
            params=(Param(name="embed_tokens.weight", dims=("vocab", "hidden")),),
            module="mtp",
        ),
        norm(spec, "enorm", "next_embedded", "e_normed", module="mtp"),
        norm(spec, "hnorm", "x", "h_normed", module="mtp"),
        Op(
            name="concat",
            kind="concat",
            inputs=("e_normed", "h_normed"),
            outputs=(Tensor(name="joined", dims=(BATCH, SEQ_SP, 2, "hidden")),),
            module="mtp",
        ),
        linear(
            "eh_proj",
            "joined",
            Tensor(name="mtp_part", dims=(BATCH, SEQ, "mtp_out")),
            ("mtp_out",),
            (2, "hidden"),
            parallel="column",
            module="mtp",
        ),
        Op(
            name="gather",
            kind="gather_features",
            inputs=("mtp_part",),
            outputs=(Tensor(name="mtp_x", dims=STREAM),),
            module="mtp",
        ),
        *_mtp_layers(spec),
        norm(spec, "mtp_norm", "y", "mtp_head_in", module="mtp"),
        *_head_ops(spec, "mtp_head_in", shared=True),
    ]


def _mtp_layers(spec: DecoderSpec) -> Iterator[Op]:
    """From "mtp_x" to "y": a layer like the model's, or those that a hybrid names."""
    if not spec.mtp_mixers:
        kind = Kind(sparse=spec.experts is not None, window=None, roped=spec.positions == "rope")
        yield from layer_ops(spec, kind, source="mtp_x", result="y")
        return
    stream = ["mtp_x", *(f"mtp_{mixer}" for mixer in spec.mtp_mixers[:-1]), "y"]
    for mixer, (source, result) in zip(spec.mtp_mixers, pairwise(stream), strict=True):
        yield from layer_ops(spec, hybrid_kind(mixer), source=source, result=result)
