"""Attention as ops: projections, norms of q and k, rotary embedding, the core, the output; plain or latent."""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.model.graph import BATCH, SEQ, SEQ_SP, STREAM, Op, Param, Tensor
from ullage.model.ops import linear, norm_params
from ullage.model.spec import DecoderSpec, Kind, Latent


def attention(spec: DecoderSpec, source: str, kind: Kind) -> list[Op]:
    ops = _latent_projections(spec, source) if spec.latent is not None else _projections(spec, source, roped=kind.roped)
    sinks = (Param(name="sinks", dims=("heads",)),) if spec.attention_sinks else ()
    ops.append(
        Op(
            name="attention",
            kind="attention",
            inputs=("q_final", "k_final", "v"),
            outputs=(Tensor(name="context", dims=(BATCH, SEQ, "heads", "v_head_dim")),),
            params=sinks,
            attrs=FrozenMap(
                {
                    "causal": spec.causal,
                    "window": kind.window,
                    "softcap": spec.attention_softcap,
                    "dropout": spec.attention_dropout,
                    "alibi": spec.positions == "alibi",
                    "roped": spec.positions == "rope",
                }
            ),
            module="core_attn",
        )
    )
    context = "context"
    if spec.gated:
        ops.append(_output_gate())
        context = "context_gated"
    ops.append(
        linear(
            "o_proj",
            context,
            Tensor(name="attention_out", dims=STREAM),
            ("hidden",),
            ("heads", "v_head_dim"),
            parallel="row",
            bias=spec.out_bias,
        )
    )
    return ops


def _projections(spec: DecoderSpec, source: str, *, roped: bool) -> list[Op]:
    normed = spec.qk_norm is not None and (roped or spec.qk_norm != "unscaled")
    names = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    results = {"q": "q", "k": "k", "v": "v"} if roped or normed else {"q": "q_final", "k": "k_final", "v": "v"}
    widths = dict.fromkeys(names, "head_dim")
    if spec.gated:
        results["q"], widths["q"] = "q_and_gate", "q_and_gate"
    ops = [
        linear(
            f"{letter}_proj",
            source,
            Tensor(name=results[letter], dims=(BATCH, SEQ, heads, widths[letter])),
            (heads, widths[letter]),
            ("hidden",),
            parallel="column",
            bias=spec.qkv_bias,
            group="qkv",
            fused=spec.fused_qkv,
        )
        for letter, heads in names.items()
    ]
    q, k = results["q"], results["k"]
    if spec.gated:
        ops.insert(1, _query_and_gate())
        q = "q"
    if normed:
        suffix = "normed" if roped else "final"
        ops += [_head_norm(spec, letter, names[letter], f"{letter}_{suffix}") for letter in ("q", "k")]
        q, k = "q_normed", "k_normed"
    if roped:
        ops.append(_rope(spec, q, k))
    return ops


def _query_and_gate() -> Op:
    """Half of each head's part of the query's projection is the gate of the attention's output."""
    heads = tuple(Tensor(name=name, dims=(BATCH, SEQ, "heads", "head_dim")) for name in ("q", "output_gate"))
    return Op(name="q_split", kind="query_gate", inputs=("q_and_gate",), outputs=heads, module="q_proj")


def _output_gate() -> Op:
    """The attention's output times the sigmoid of the gate (arXiv 2505.06708)."""
    return Op(
        name="output_gate",
        kind="output_gate",
        inputs=("context", "output_gate"),
        outputs=(Tensor(name="context_gated", dims=(BATCH, SEQ, "heads", "v_head_dim")),),
        module="output_gate",
    )


def _head_norm(spec: DecoderSpec, letter: str, heads: str, result: str) -> Op:
    """A norm of the query or key."""
    name = f"{letter}_norm"
    params: tuple[Param, ...] = ()
    if spec.qk_norm == "heads":
        params = (Param(name=f"{name}.weight", dims=(heads, "head_dim")),)
    elif spec.qk_norm != "unscaled":
        params = norm_params(spec, name, ("head_dim",) if spec.qk_norm == "head" else (heads, "head_dim"))
    return Op(
        name=name,
        kind="norm",
        inputs=(letter,),
        outputs=(Tensor(name=result, dims=(BATCH, SEQ, heads, "head_dim")),),
        params=params,
        attrs=FrozenMap({"norm": spec.norm, "per_head": spec.qk_norm != "all"}),
        module="qk_layernorm",
    )


def _rope(spec: DecoderSpec, q: str, k: str) -> Op:
    return Op(
        name="rope",
        kind="rope",
        inputs=(q, k),
        outputs=(
            Tensor(name="q_final", dims=(BATCH, SEQ, "heads", "head_dim")),
            Tensor(name="k_final", dims=(BATCH, SEQ, "kv_heads", "head_dim")),
        ),
        attrs=FrozenMap({"fraction": spec.rope_fraction, "scaled": spec.rope_scaled}),
        module="rope",
    )


def _latent_projections(spec: DecoderSpec, source: str) -> list[Op]:
    """Query, key and value through low ranks; the rotary part of the key is shared by all heads (arXiv 2405.04434, section 2.1)."""
    latent = spec.latent
    assert latent is not None
    return [*_latent_query(spec, latent, source), *_latent_key_value(spec, latent, source), _assembled()]


def _latent_query(spec: DecoderSpec, latent: Latent, source: str) -> list[Op]:
    up = Tensor(name="q_up", dims=(BATCH, SEQ, "heads", "head_dim"))
    if not latent.q_rank:
        return [linear("q_proj", source, up, ("heads", "head_dim"), ("hidden",), parallel="column")]
    ops = [_down(latent, "q_a_proj", source, "q_down", "q_rank")]
    q_in = "q_down"
    if latent.norms:
        ops.append(_latent_norm(spec, "q_a_norm", "q_down", "q_latent", "q_rank"))
        q_in = "q_latent"
    ops.append(
        linear("q_b_proj", q_in, up, ("heads", "head_dim"), ("q_rank",), parallel="column", module="mla_up_proj")
    )
    return ops


def _latent_key_value(spec: DecoderSpec, latent: Latent, source: str) -> list[Op]:
    split = Op(
        name="kv_split",
        kind="split",
        inputs=("kv_down",),
        outputs=(
            Tensor(name="kv_compressed", dims=(BATCH, SEQ_SP, "kv_rank")),
            Tensor(name="k_pe", dims=(BATCH, SEQ_SP, "rope_dim")),
        ),
    )
    ops = [_down(latent, "kv_a_proj", source, "kv_down", "kv_rank_rope"), split]
    kv_in = "kv_compressed"
    if latent.norms:
        ops.append(_latent_norm(spec, "kv_a_norm", "kv_compressed", "kv_latent", "kv_rank"))
        kv_in = "kv_latent"
    up = Tensor(name="kv_up", dims=(BATCH, SEQ, "heads", "kv_up_dim"))
    ops.append(
        linear("kv_b_proj", kv_in, up, ("heads", "kv_up_dim"), ("kv_rank",), parallel="column", module="mla_up_proj")
    )
    return ops


def _down(latent: Latent, name: str, source: str, result: str, rank: str) -> Op:
    return linear(
        name,
        source,
        Tensor(name=result, dims=(BATCH, SEQ_SP, rank)),
        (rank,),
        ("hidden",),
        parallel="replicated",
        bias=latent.down_bias,
        module=result,
    )


def _assembled() -> Op:
    return Op(
        name="mla_assemble",
        kind="mla_assemble",
        inputs=("q_up", "kv_up", "k_pe"),
        outputs=(
            Tensor(name="q_final", dims=(BATCH, SEQ, "heads", "head_dim")),
            Tensor(name="k_final", dims=(BATCH, SEQ, "heads", "head_dim")),
            Tensor(name="v", dims=(BATCH, SEQ, "heads", "v_head_dim")),
        ),
        module="mla_up_proj",
    )


def _latent_norm(spec: DecoderSpec, name: str, source: str, result: str, rank: str) -> Op:
    return Op(
        name=name,
        kind="norm",
        inputs=(source,),
        outputs=(Tensor(name=result, dims=(BATCH, SEQ_SP, rank)),),
        params=norm_params(spec, name, (rank,)),
        attrs=FrozenMap({"norm": spec.norm}),
        module="qk_layernorm",
    )
