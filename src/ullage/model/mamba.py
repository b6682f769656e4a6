"""The Mamba-2 mixer as ops: a projection into gate, channels, both state vectors and step size; convolution and scan; norm; projection."""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.model.graph import BATCH, SEQ, STREAM, Op, Param, Tensor
from ullage.model.ops import linear
from ullage.model.spec import DecoderSpec


def mamba(spec: DecoderSpec, source: str) -> list[Op]:
    """From ``source`` to "mamba_out" (arXiv 2405.21060, section 7; its norm over the channels of a group, gated by the scan's gate)."""
    mixer = spec.mamba
    assert mixer is not None
    inner = (BATCH, SEQ, "ssm_inner")
    conv = [Param(name="conv1d.weight", dims=("ssm_conv", mixer.conv))]
    if mixer.conv_bias:
        conv.append(Param(name="conv1d.bias", dims=("ssm_conv",)))
    scan = [Param(name=name, dims=("ssm_heads",)) for name in ("dt_bias", "A_log", "D")]
    return [
        linear(
            "in_proj",
            source,
            Tensor(name="projected", dims=(BATCH, SEQ, "ssm_in")),
            ("ssm_in",),
            ("hidden",),
            parallel="column",
            bias=mixer.proj_bias,
            module="mamba",
        ),
        Op(
            name="ssm",
            kind="ssm",
            inputs=("projected",),
            outputs=(Tensor(name="scanned", dims=inner),),
            params=(*conv, *scan),
            attrs=FrozenMap({"chunk": mixer.chunk}),
            module="mamba",
        ),
        Op(
            name="mamba_norm",
            kind="ssm_norm",
            inputs=("scanned",),
            outputs=(Tensor(name="gated", dims=inner),),
            params=(Param(name="mamba_norm.weight", dims=("ssm_inner",)),),
            module="mamba",
        ),
        linear(
            "out_proj",
            "gated",
            Tensor(name="mamba_out", dims=STREAM),
            ("hidden",),
            ("ssm_inner",),
            parallel="row",
            bias=mixer.proj_bias,
            module="mamba",
        ),
    ]
