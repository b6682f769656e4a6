"""The ops that decoders are made of, as kernels meet them.

By kind (inputs -> outputs; b = batch, T = seq_sp outside and seq inside tensor-parallel regions):

    embedding     () -> x                        attrs: positions (learned table), token_types, rotary (elements of a head, or 0)
    conv2d        images -> patches              a convolution whose steps are as long as it is wide; attrs: patches of an image
    patch_positions patches -> x                 the token of the whole image before the patches, a learned position added to each
    norm          x -> h                         attrs: norm = rmsnorm | layernorm, per_head
    linear        h -> y                         attrs: parallel = column | row | replicated, group, fused, bias
    rope          q, k -> q_roped, k_roped       attrs: fraction
    mla_assemble  q_up, kv_up, k_pe -> q, k, v   latent attention: rope and concatenation into whole heads
    attention     q, k, v -> context             attrs: causal, window, softcap, dropout, alibi
    activation    gate, up -> product            attrs: act, form, glu=True; or up -> act: glu=False
    dropout       a -> d                         attrs: p
    residual      x, a -> y
    router        h -> scores                    attrs: top_k, ...
    dispatch      h, scores -> rows              rows are (routed, hidden), or of the experts' own width
    grouped_linear rows -> y                     attrs: group
    combine       rows, scores -> out
    ssm           projected -> scanned           convolution and chunked scan of a Mamba-2 mixer; attrs: chunk
    ssm_norm      scanned -> gated               norm over the channels of each group, gated
    query_gate    q_and_gate -> q, gate          two halves of each head
    output_gate   context, gate -> gated         attention's output times the sigmoid of its gate
    delta_split   qkvz, ba -> qkv, z, b, a       what a gated DeltaNet's joint projections hold, in its order
    causal_conv   qkv -> convolved               taps over the tokens of each channel, and silu
    delta_rule    convolved, b, a -> out         a state for each head, in chunks; its rates and its decay
    gated_norm    out, z -> gated                norm over the channels of each head, times silu(z)
    first_token   x -> h                         of each sequence
    loss          logits -> loss                 attrs: softcap; predicts = words | classes | numbers | several-classes, or the next token
    add_losses    two losses -> loss
"""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.model.graph import STREAM, Dim, Op, Param, Tensor
from ullage.model.spec import DecoderSpec


def norm(spec: DecoderSpec, name: str, source: str, result: str, module: str = "layernorm") -> Op:
    return Op(
        name=name,
        kind="norm",
        inputs=(source,),
        outputs=(Tensor(name=result, dims=STREAM),),
        params=norm_params(spec, name, ("hidden",)),
        attrs=FrozenMap({"norm": spec.norm}),
        module=module,
    )


def norm_params(spec: DecoderSpec, name: str, dims: tuple[Dim, ...]) -> tuple[Param, ...]:
    if not spec.norm_affine:
        return ()
    has_bias = spec.norm_bias if spec.norm_bias is not None else spec.norm == "layernorm"
    weight = Param(name=f"{name}.weight", dims=dims)
    return (weight, Param(name=f"{name}.bias", dims=dims)) if has_bias else (weight,)


def linear(
    name: str,
    source: str,
    result: Tensor,
    dims: tuple[Dim, ...],
    inner: tuple[Dim, ...],
    *,
    parallel: str,
    bias: bool = False,
    group: str = "",
    fused: bool = False,
    module: str = "",
) -> Op:
    """dims: of the output features; inner: of the input features (both can be several named dimensions).

    group: neighbours that a stack may compute in one matmul; fused: config.json's own code does.
    """
    params = [Param(name=f"{name}.weight", dims=(*dims, *inner))]
    if bias:
        params.append(Param(name=f"{name}.bias", dims=dims))
    return Op(
        name=name,
        kind="linear",
        inputs=(source,),
        outputs=(result,),
        params=tuple(params),
        attrs=FrozenMap({"parallel": parallel, "group": group, "fused": fused, "bias": bias, "out": dims, "in": inner}),
        module=module or name,
    )


def residual(name: str, left: str, right: str, result: str) -> Op:
    return Op(name=name, kind="residual", inputs=(left, right), outputs=(Tensor(name=result, dims=STREAM),))


def dropout(name: str, source: str, result: str, p: float, dims: tuple[Dim, ...] = STREAM) -> Op:
    return Op(
        name=name,
        kind="dropout",
        inputs=(source,),
        outputs=(Tensor(name=result, dims=dims),),
        attrs=FrozenMap({"p": p}),
    )
