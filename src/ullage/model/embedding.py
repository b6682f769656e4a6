"""The first block: token, position and type embeddings, with what follows them; of images their patches."""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.model.graph import BATCH, IMAGES, SEQ, STREAM, Block, Op, Param, Tensor
from ullage.model.ops import dropout, norm
from ullage.model.spec import DecoderSpec, Patches


def embedding(spec: DecoderSpec) -> Block:
    if spec.patches is not None:
        return _of_patches(spec, spec.patches)
    params = [Param(name="embed_tokens.weight", dims=("vocab", "hidden"))]
    if spec.positions == "learned":
        params.append(Param(name="embed_positions.weight", dims=("positions", "hidden")))
    if spec.token_types:
        types = Param(name="token_type_embeddings.weight", dims=(spec.token_types, "hidden"))
        params.insert(1 if spec.types_first else len(params), types)
    p = spec.hidden_dropout if spec.embedding_dropout is None else spec.embedding_dropout
    embedded = "embedded" if spec.embedding_norm or p else "x"
    ops = [
        Op(
            name="embed_tokens",
            kind="embedding",
            inputs=(),
            outputs=(Tensor(name=embedded, dims=STREAM),),
            params=tuple(params),
            attrs=FrozenMap(
                {
                    "positions": spec.positions == "learned",
                    "token_types": bool(spec.token_types),
                    "rotary": _rotary_dim(spec),
                    "windows": tuple(dict.fromkeys(spec.windows or (None,))),
                    "softcap": spec.attention_softcap,
                    "causal": spec.causal,
                }
            ),
        )
    ]
    if spec.embedding_norm:
        result = "embedded_normed" if p else "x"
        ops.append(norm(spec, "embed_norm", embedded, result, module="embedding"))
        embedded = result
    if p:
        ops.append(dropout("embed_dropout", embedded, "x", p))
    return Block(
        name="embedding",
        ops=tuple(ops),
        input=Tensor(name="ids", dims=(BATCH, SEQ), elements="int64"),
        output=Tensor(name="x", dims=STREAM),
        role="embedding",
        family=spec.family,
    )


def _of_patches(spec: DecoderSpec, patches: Patches) -> Block:
    """A convolution makes a token of each patch."""
    pixels = Tensor(name="pixel_values", dims=IMAGES, elements="fp32")
    embedded = "embedded" if spec.hidden_dropout else "x"
    ops = [
        Op(
            name="patches",
            kind="conv2d",
            inputs=("pixel_values",),
            outputs=(Tensor(name="patches", dims=(BATCH, "patches", "hidden")),),
            params=(
                Param(name="patches.weight", dims=("hidden", patches.channels, *patches.patch)),
                Param(name="patches.bias", dims=("hidden",)),
            ),
            module="embedding",
        ),
        Op(
            name="embed_positions",
            kind="patch_positions",
            inputs=("patches",),
            outputs=(Tensor(name=embedded, dims=STREAM),),
            params=(
                Param(name="first_token", dims=(1, 1, "hidden")),
                Param(name="embed_positions.weight", dims=(1, "positions", "hidden")),
            ),
            module="embedding",
        ),
    ]
    if spec.hidden_dropout:
        ops.append(dropout("embed_dropout", embedded, "x", spec.hidden_dropout))
    return Block(
        name="embedding",
        ops=tuple(ops),
        input=pixels,
        output=Tensor(name="x", dims=STREAM),
        role="embedding",
        family=spec.family,
    )


def _rotary_dim(spec: DecoderSpec) -> int:
    """Elements of a head that the rotary embedding turns; 0 without one."""
    if spec.positions != "rope":
        return 0
    return spec.latent.qk_rope_dim if spec.latent is not None else int(spec.head_dim * spec.rope_fraction)
