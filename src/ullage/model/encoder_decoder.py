"""An encoder and a decoder as one chain of blocks, as T5 has them (arXiv 1910.10683).

The stream goes through the encoder's layers, turns in the block between the two (the encoder's norm, the decoder's embedding), and
goes on through the decoder's. Beside it go the encoder's output, which every decoder layer reads, and for each kind of attention the
terms of the positions, which the first layer makes and all layers add to their scores: one gradient comes back for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ullage.frozen import FrozenMap
from ullage.model.attention import attention
from ullage.model.embedding import embedding
from ullage.model.graph import BATCH, COMPUTE, SEQ, SEQ_SP, STREAM, TARGET, Block, Dim, Graph, Op, Param, Run, Tensor
from ullage.model.head import head
from ullage.model.mlp import mlp
from ullage.model.ops import dropout, norm, residual
from ullage.model.spec import DecoderSpec, Kind

ENCODED = Tensor(name="encoded", dims=STREAM)
CAUSAL = Tensor(name="causal_mask", dims=(BATCH, 1, TARGET, TARGET), grad=False)
_PLAIN = Kind(sparse=False, window=None, roped=False)


def positions(name: str, queries: Dim, keys: Dim) -> Tensor:
    """The terms of positions for one kind of attention, the same for every sequence."""
    return Tensor(name=name, dims=(1, queries, keys, "heads"))


def build(spec: DecoderSpec, sizes: FrozenMap, *, target: int = 0, asks: bool = False) -> Graph:
    """The graph of an encoder and its decoder.

    target: tokens of one sequence that the decoder makes; 0: as many as the encoder reads. asks: whether the zeros that stand for the
    positions of the attention to the encoder ask for a gradient, as transformers' do where layers are checkpointed.
    """
    assert spec.encoder is not None
    seen = positions("positions", SEQ, SEQ)
    own = positions("target_positions", TARGET, TARGET)
    across = replace(positions("cross_positions", TARGET, SEQ), elements=COMPUTE, grad=asks)
    runs = [Run(block=embedding(replace(spec, causal=False)))]
    for name, layers, tensors, beside in (
        ("encoder", spec.encoder.layers, (seen,), ()),
        ("decoder", spec.layers, (own, across), (ENCODED, CAUSAL)),
    ):
        if beside:
            runs.append(Run(block=_turn(spec, seen)))
        runs.append(Run(block=_layer(spec, f"{name}-first", makes=tensors, beside=beside)))
        if layers > 1:
            runs.append(Run(block=_layer(spec, name, beside=(*beside, *tensors)), repeat=layers - 1))
    runs.append(Run(block=_head(spec, spec.encoder.scaled_head, (own, across))))
    table = "embed_tokens.weight"
    tied = [(f"embedding.{table}", f"between.{table}")]
    if spec.tied:
        tied.append((f"embedding.{table}", "head.lm_head.weight"))
    more = {"buckets": spec.encoder.buckets, TARGET: target}
    return Graph(name=spec.name, runs=tuple(runs), sizes=FrozenMap({**sizes, **more}), tied=tuple(tied))


def _layer(spec: DecoderSpec, name: str, *, makes: tuple[Tensor, ...] = (), beside: tuple[Tensor, ...] = ()) -> Block:
    """makes: the terms of positions that a first layer makes."""
    is_decoder = ENCODED in beside
    ops = [*_self_attention(spec, makes, is_decoder=is_decoder)]
    if is_decoder:
        ops = [*_along_target(ops), *_cross_attention(spec, makes)]
    mlp_ops = _mlp(spec, "crossed" if is_decoder else "middle")
    ops += _along_target(mlp_ops) if is_decoder else mlp_ops
    dims = _targets(STREAM) if is_decoder else STREAM
    return Block(
        name=name,
        ops=tuple(ops),
        input=Tensor(name="x", dims=dims),
        output=Tensor(name="y", dims=dims),
        family=spec.family,
        beside=beside,
        lends=tuple(one.name for one in makes),
    )


def _self_attention(spec: DecoderSpec, makes: tuple[Tensor, ...], *, is_decoder: bool) -> Iterator[Op]:
    yield norm(spec, "input_norm", "x", "attention_in")
    name, tokens = ("target_positions", TARGET) if is_decoder else ("positions", SEQ)
    for op in attention(replace(spec, causal=is_decoder), "attention_in", _PLAIN):
        if op.kind == "attention":
            yield from _with_positions(op, name, tokens, tokens, makes)
        else:
            yield op
    yield from _joined(spec, "attention", "attention_out", "x", "middle")


def _with_positions(op: Op, name: str, queries: Dim, keys: Dim, makes: tuple[Tensor, ...]) -> Iterator[Op]:
    made = next((one for one in makes if one.name == name), None)
    if made is not None:
        learned = (Param(name="relative_attention_bias.weight", dims=("buckets", "heads")),) if queries == keys else ()
        yield Op(
            name=name,
            kind="positions",
            inputs=(),
            outputs=(replace(made, elements=None),),
            params=learned,
            attrs=FrozenMap({"queries": queries, "keys": keys, "causal": op.attrs["causal"]}),
            module=op.module,
        )
    attrs = FrozenMap({**op.attrs, "queries": queries, "keys": keys, "positions": name})
    masks = (CAUSAL.name,) if op.attrs["causal"] else ()
    yield replace(op, inputs=(*op.inputs, name, *masks), attrs=attrs)


def _cross_attention(spec: DecoderSpec, makes: tuple[Tensor, ...]) -> Iterator[Op]:
    """Queries of the decoder's tokens, keys and values of the encoder's."""
    (to_target,) = _along_target([norm(spec, "cross_norm", "middle", "cross_in")])
    yield to_target
    for op in attention(replace(spec, causal=False), "cross_in", _PLAIN):
        op = replace(
            op,
            name=f"cross_{op.name}",
            inputs=tuple(one if one == "cross_in" else f"cross_{one}" for one in op.inputs),
            outputs=tuple(replace(one, name=f"cross_{one.name}") for one in op.outputs),
            params=tuple(replace(one, name=f"cross_{one.name}") for one in op.params),
        )
        if op.kind == "attention":
            yield from _along_target(_with_positions(op, "cross_positions", TARGET, SEQ, makes))
        elif op.name in ("cross_k_proj", "cross_v_proj"):
            yield replace(op, inputs=(ENCODED.name,))
        else:
            yield from _along_target([op])
    yield from _along_target(_joined(spec, "cross", "cross_attention_out", "middle", "crossed"))


def _mlp(spec: DecoderSpec, source: str) -> list[Op]:
    """With a dropout before the projection down, whose input takes the type of its weight (transformers keeps it in fp32 under fp16)."""
    ops = [norm(spec, "post_attention_norm", source, "mlp_in"), *mlp(spec, "mlp_in", sparse=False)]
    down = replace(ops[-1], attrs=FrozenMap({**ops[-1].attrs, "as_weight": True}))
    product = ops[-2].outputs[0]
    between = []
    if spec.hidden_dropout:
        dropped = Tensor(name="product_dropped", dims=product.dims)
        between = [replace(dropout("product_dropout", product.name, "", spec.hidden_dropout), outputs=(dropped,))]
        down = replace(down, inputs=(dropped.name,))
    return [*ops[:-1], *between, down, *_joined(spec, "mlp", "mlp_out", source, "y")]


def _joined(spec: DecoderSpec, which: str, branch: str, stream: str, result: str) -> Iterator[Op]:
    if spec.hidden_dropout:
        yield dropout(f"{which}_dropout", branch, f"{branch}_dropped", spec.hidden_dropout)
        branch = f"{branch}_dropped"
    yield residual(f"{which}_add", stream, branch, result)


def _normed(spec: DecoderSpec, name: str, source: str, result: str) -> list[Op]:
    """A stack's last norm, and the dropout behind it."""
    if not spec.hidden_dropout:
        return [norm(spec, name, source, result, module="final_norm")]
    return [
        norm(spec, name, source, f"{result}_normed", module="final_norm"),
        dropout(f"{name}_dropout", f"{result}_normed", result, spec.hidden_dropout),
    ]


def _turn(spec: DecoderSpec, seen: Tensor) -> Block:
    """Ends the encoder and begins the decoder, whose input the model makes of the labels."""
    (look_up, *rest) = embedding(replace(spec, causal=False)).ops
    look_up = replace(look_up, attrs=FrozenMap({**look_up.attrs, "shifted": True}))
    order = Op(name=CAUSAL.name, kind="mask", inputs=(), outputs=(CAUSAL,))
    renamed = {"x": "embedding_out"}

    def told(op: Op) -> Op:
        outputs = tuple(replace(one, name=renamed.get(one.name, one.name)) for one in op.outputs)
        return replace(op, outputs=outputs)

    return Block(
        name="between",
        ops=(*_normed(spec, "norm", "x", ENCODED.name), *_along_target(map(told, (look_up, order, *rest)))),
        input=Tensor(name="x", dims=STREAM),
        output=Tensor(name=renamed["x"], dims=_targets(STREAM)),
        role="between",
        family=spec.family,
        beside=(seen,),
        lends=(ENCODED.name, CAUSAL.name),
    )


def _head(spec: DecoderSpec, scaled: bool, beside: tuple[Tensor, ...]) -> Block:
    block = head(replace(spec, final_norm=False))
    lm_head, loss = _along_target(block.ops)
    ops = list(_along_target(_normed(spec, "norm", "x", "head_in")))
    source = "head_in"
    if scaled:
        output = Tensor(name="head_in_scaled", dims=_targets(STREAM))
        ops.append(Op(name="scale", kind="scale", inputs=(source,), outputs=(output,)))
        source = output.name
    lm_head = replace(lm_head, inputs=(source,))
    return replace(
        block,
        ops=(*ops, lm_head, loss),
        input=Tensor(name="x", dims=_targets(STREAM)),
        beside=(ENCODED, CAUSAL, *beside),
    )


def _along_target(ops: Iterator[Op] | list[Op] | tuple[Op, ...] | map[Op]) -> Iterator[Op]:
    """Ops of the decoder's tokens; terms of positions say by themselves whose they are."""
    for op in ops:
        if op.kind == "positions":
            yield op
        else:
            yield replace(op, outputs=tuple(replace(one, dims=_targets(one.dims)) for one in op.outputs))


def _targets(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple(TARGET if dim in (SEQ, SEQ_SP) else dim for dim in dims)
