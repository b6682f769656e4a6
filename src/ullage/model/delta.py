"""Gated DeltaNet as ops: projections, a convolution, the gated delta rule, a gated norm, a projection."""

from __future__ import annotations

from ullage.model.graph import BATCH, SEQ, STREAM, Dim, Op, Param, Tensor
from ullage.model.ops import linear
from ullage.model.spec import DecoderSpec, Delta

MODULE = "linear_attn"
CHUNK = 64
"""Tokens that the rule is computed for at once (chunk_size, both in transformers' code and in flash-linear-attention's)."""


def delta_net(spec: DecoderSpec, source: str) -> list[Op]:
    """From ``source`` to "attention_out" (arXiv 2412.06464, figure 1; transformers models/qwen3_next/modeling_qwen3_next.py)."""
    delta = spec.delta
    assert delta is not None
    heads: tuple[Dim, ...] = (BATCH, SEQ, "delta_heads", "delta_v_dim")
    return [
        *(_joined(source) if delta.joined else _apart(source)),
        _convolution(delta),
        Op(
            name="delta_rule",
            kind="delta_rule",
            inputs=("convolved", "b", "a"),
            outputs=(Tensor(name="recalled", dims=heads),),
            params=tuple(Param(name=name, dims=("delta_heads",)) for name in ("dt_bias", "A_log")),
            module=MODULE,
        ),
        Op(
            name="delta_norm",
            kind="gated_norm",
            inputs=("recalled", "z"),
            outputs=(Tensor(name="recalled_gated", dims=heads),),
            params=(Param(name="delta_norm.weight", dims=("delta_v_dim",)),),
            module=MODULE,
        ),
        linear(
            "out_proj",
            "recalled_gated",
            Tensor(name="attention_out", dims=STREAM),
            ("hidden",),
            ("delta_values",),
            parallel="replicated",
            module=MODULE,
        ),
    ]


def _convolution(delta: Delta) -> Op:
    return Op(
        name="conv1d",
        kind="causal_conv",
        inputs=("qkv",),
        outputs=(Tensor(name="convolved", dims=(BATCH, SEQ, "delta_qkv")),),
        params=(Param(name="conv1d.weight", dims=("delta_qkv", 1, delta.conv)),),
        module=MODULE,
    )


def _joined(source: str) -> list[Op]:
    """Heads of the two joint projections have their parts side by side: all is copied into its own order."""
    split = Op(
        name="delta_split",
        kind="delta_split",
        inputs=("qkvz", "ba"),
        outputs=(_tensor("qkv", "delta_qkv"), _heads("z"), *(_tensor(name, "delta_heads") for name in ("b", "a"))),
        module=MODULE,
    )
    return [
        _projection("in_proj_qkvz", source, "qkvz", "delta_qkvz"),
        _projection("in_proj_ba", source, "ba", "delta_rates"),
        split,
    ]


def _apart(source: str) -> list[Op]:
    parts = {"qkv": "delta_qkv", "z": "delta_values", "b": "delta_heads", "a": "delta_heads"}
    return [_projection(f"in_proj_{name}", source, name, dim) for name, dim in parts.items()]


def _projection(name: str, source: str, result: str, dim: str) -> Op:
    return linear(name, source, _tensor(result, dim), (dim,), ("hidden",), parallel="replicated", module=MODULE)


def _tensor(name: str, dim: str) -> Tensor:
    return Tensor(name=name, dims=(BATCH, SEQ, dim))


def _heads(name: str) -> Tensor:
    return Tensor(name=name, dims=(BATCH, SEQ, "delta_heads", "delta_v_dim"))
