"""Transformer decoders as a Graph: one description, one builder. A family maps its config.json onto DecoderSpec.

The ops that kernels meet, by kind (inputs -> outputs; b = batch, T = seq_sp outside and seq inside tensor-parallel regions):

    embedding     () -> x                        attrs: positions (learned table), token_types
    norm          x -> h                         attrs: norm = rmsnorm | layernorm, per_head
    linear        h -> y                         attrs: parallel = column | row | replicated, group, fused, bias
    rope          q, k -> q_roped, k_roped       attrs: fraction
    mla_assemble  q_up, kv_up, k_pe -> q, k, v   latent attention: rope and concatenation into whole heads
    attention     q, k, v -> context             attrs: causal, window, softcap, dropout, alibi
    activation    gate, up -> product            attrs: act, form, glu=True; or up -> act: glu=False
    dropout       a -> d                         attrs: p
    residual      x, a -> y
    router        h -> scores                    attrs: top_k, ...
    dispatch      h, scores -> rows              rows are (routed, hidden)
    grouped_linear rows -> y                     attrs: group
    combine       rows, scores -> out
    loss          logits -> loss                 attrs: softcap
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ullage.frozen import FrozenMap
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, STREAM, Block, Dim, Graph, Op, Param, Run, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: ``dense_layers`` leading layers (and those off the frequency) stay dense."""

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()  # indices of layers without experts
    router_bias: bool = False
    expert_bias: bool = False
    score_bias: bool = False  # a buffer that balances the load without a loss (DeepSeek-V3's e_score_correction_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None
    kv_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    norms: bool = True
    down_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder's architecture. Names are config.json's; dims are before any layout.

    mlp: the activation ("silu", "gelu", "relu", "squared-relu"); glu: gated by a second projection.
    mlp_form: its name in config.json where that is another ("gelu_new" is composed of small ops, "gelu" is one kernel).
    qk_norm: None | "head" (over head_dim) | "all" (over all heads at once) | "heads" (over head_dim, a weight for each head)
    | "unscaled" (over head_dim, no weight, roped layers only). post_norms: norms after attention and MLP too (gemma2).
    parallel_residual: attention and MLP read the same stream and are added together (gpt_neox); shared_norm: by one norm.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    mlp: str = "silu"
    mlp_form: str = ""
    glu: bool = True
    norm: str = "rmsnorm"
    norm_bias: bool | None = None  # None: layernorm has one, rmsnorm has not
    norm_affine: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str | None = None
    pre_norms: bool = True
    post_norms: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False
    final_norm: bool = True
    embedding_norm: bool = False
    positions: str = "rope"  # rope | learned | alibi | none
    rope_fraction: float = 1.0
    rope_layers: tuple[bool, ...] = ()  # per layer, empty: every layer, where positions is rope
    max_positions: int = 0
    position_offset: int = 0
    tied: bool = False
    hidden_dropout: float = 0.0
    embedding_dropout: float | None = None  # None: hidden_dropout
    attention_dropout: float = 0.0
    causal: bool = True
    attention_softcap: bool = False
    logits_softcap: bool = False
    windows: tuple[int | None, ...] = ()  # per layer, empty: no window anywhere
    experts: Experts | None = None
    latent: Latent | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    mtp_layers: int = 0
    token_types: int = 0
    attention_sinks: bool = False
    bert_head: bool = (
        False  # a dense layer and a norm before the vocabulary; pooler and next-sentence classifier beside it
    )


def build(spec: DecoderSpec) -> Graph:
    """The graph of a decoder: embedding, layers (equal neighbours in one run), head with loss (and multi-token prediction)."""
    runs: list[Run] = [Run(block=_embedding(spec))]
    kinds: dict[_Kind, Block] = {}
    for index in range(spec.layers):
        kind = _kind(spec, index)
        block = kinds[kind] = kinds.get(kind) or _layer(spec, kind)
        if runs[-1].block == block:
            runs[-1] = Run(block=block, repeat=runs[-1].repeat + 1)
        else:
            runs.append(Run(block=block))
    runs.append(Run(block=_head(spec)))
    tied = [("embedding.embed_tokens.weight", "head.lm_head.weight")] if spec.tied else []
    return Graph(name=spec.name, runs=tuple(runs), sizes=_sizes(spec), tied=tuple(tied))


def _sizes(spec: DecoderSpec) -> FrozenMap:
    sizes: dict[str, object] = {
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "vocab": spec.vocab,
        "positions": spec.max_positions + spec.position_offset,
    }
    if spec.latent is not None:
        latent = spec.latent
        sizes |= {
            "head_dim": latent.qk_nope_dim + latent.qk_rope_dim,
            "nope_dim": latent.qk_nope_dim,
            "rope_dim": latent.qk_rope_dim,
            "v_head_dim": latent.v_dim,
            "q_rank": latent.q_rank or 0,
            "kv_rank": latent.kv_rank,
            "kv_rank_rope": latent.kv_rank + latent.qk_rope_dim,
            "kv_up_dim": latent.qk_nope_dim + latent.v_dim,
        }
    if spec.experts is not None:
        experts = spec.experts
        sizes |= {
            "experts": experts.count,
            "router": experts.count,
            "top_k": experts.top_k,
            "expert_ffn": experts.ffn,
            "shared_ffn": experts.shared_ffn,
        }
    return FrozenMap(sizes)


def _norm(spec: DecoderSpec, name: str, source: str, result: str, module: str = "layernorm") -> Op:
    return Op(
        name=name,
        kind="norm",
        inputs=(source,),
        outputs=(Tensor(name=result, dims=STREAM),),
        params=_norm_params(spec, name, ("hidden",)),
        attrs=FrozenMap({"norm": spec.norm}),
        module=module,
    )


def _norm_params(spec: DecoderSpec, name: str, dims: tuple[Dim, ...]) -> tuple[Param, ...]:
    if not spec.norm_affine:
        return ()
    has_bias = spec.norm_bias if spec.norm_bias is not None else spec.norm == "layernorm"
    weight = Param(name=f"{name}.weight", dims=dims)
    return (weight, Param(name=f"{name}.bias", dims=dims)) if has_bias else (weight,)


def _linear(
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


def _residual(name: str, left: str, right: str, result: str) -> Op:
    return Op(name=name, kind="residual", inputs=(left, right), outputs=(Tensor(name=result, dims=STREAM),))


def _dropout(name: str, source: str, result: str, p: float) -> Op:
    return Op(
        name=name,
        kind="dropout",
        inputs=(source,),
        outputs=(Tensor(name=result, dims=STREAM),),
        attrs=FrozenMap({"p": p}),
    )


def _embedding(spec: DecoderSpec) -> Block:
    params = [Param(name="embed_tokens.weight", dims=("vocab", "hidden"))]
    if spec.positions == "learned":
        params.append(Param(name="embed_positions.weight", dims=("positions", "hidden")))
    if spec.token_types:
        params.append(Param(name="token_type_embeddings.weight", dims=(spec.token_types, "hidden")))
    dropout = spec.hidden_dropout if spec.embedding_dropout is None else spec.embedding_dropout
    embedded = "embedded" if spec.embedding_norm or dropout else "x"
    ops = [
        Op(
            name="embed_tokens",
            kind="embedding",
            inputs=(),
            outputs=(Tensor(name=embedded, dims=STREAM),),
            params=tuple(params),
            attrs=FrozenMap({"positions": spec.positions == "learned", "token_types": bool(spec.token_types)}),
        )
    ]
    if spec.embedding_norm:
        result = "embedded_normed" if dropout else "x"
        ops.append(_norm(spec, "embed_norm", embedded, result, module="embedding"))
        embedded = result
    if dropout:
        ops.append(_dropout("embed_dropout", embedded, "x", dropout))
    return Block(
        name="embedding",
        ops=tuple(ops),
        input=Tensor(name="ids", dims=(BATCH, SEQ), elements="int64"),
        output=Tensor(name="x", dims=STREAM),
        role="embedding",
    )


class _Kind(NamedTuple):
    """What layers may differ in."""

    sparse: bool
    window: int | None
    roped: bool


def _kind(spec: DecoderSpec, index: int) -> _Kind:
    return _Kind(
        sparse=spec.experts is not None and index not in spec.experts.dense_layers,
        window=spec.windows[index] if spec.windows else None,
        roped=spec.positions == "rope" and (not spec.rope_layers or spec.rope_layers[index]),
    )


def _layer(spec: DecoderSpec, kind: _Kind) -> Block:
    name = "layer"
    if spec.experts or spec.windows:
        name += "-sparse" if kind.sparse else "-dense"
    if kind.window is not None:
        name += "-window"
    if spec.rope_layers and not kind.roped:
        name += "-nope"
    return Block(
        name=name,
        ops=_layer_ops(spec, kind, source="x", result="y"),
        input=Tensor(name="x", dims=STREAM),
        output=Tensor(name="y", dims=STREAM),
    )


def _layer_ops(spec: DecoderSpec, kind: _Kind, *, source: str, result: str) -> tuple[Op, ...]:
    ops: list[Op] = []
    attention_input = source
    if spec.pre_norms:
        ops.append(_norm(spec, "input_norm", source, "attention_in"))
        attention_input = "attention_in"
    ops += _attention(spec, attention_input, kind)
    branch = _after_branch(spec, ops, "attention_out", "attention")
    if spec.parallel_residual:
        mlp_input = attention_input
        if not spec.shared_norm:
            ops.append(_norm(spec, "post_attention_norm", source, "mlp_in"))
            mlp_input = "mlp_in"
        ops += _mlp(spec, mlp_input, kind.sparse)
        mlp_branch = _after_branch(spec, ops, "mlp_out", "mlp")
        ops.append(_residual("add_branches", branch, mlp_branch, "branches"))
        ops.append(_residual("add", source, "branches", result))
        return tuple(ops)
    ops.append(_residual("attention_add", source, branch, "middle"))
    mlp_input = "middle"
    if spec.pre_norms:
        ops.append(_norm(spec, "post_attention_norm", "middle", "mlp_in"))
        mlp_input = "mlp_in"
    ops += _mlp(spec, mlp_input, kind.sparse)
    mlp_branch = _after_branch(spec, ops, "mlp_out", "mlp")
    ops.append(_residual("mlp_add", "middle", mlp_branch, result))
    return tuple(ops)


def _after_branch(spec: DecoderSpec, ops: list[Op], name: str, which: str) -> str:
    """Dropout and a norm after a branch, where the architecture has them; returns the branch's last tensor."""
    if spec.post_norms:
        ops.append(_norm(spec, f"{which}_post_norm", name, f"{name}_normed"))
        name = f"{name}_normed"
    if spec.hidden_dropout:
        ops.append(_dropout(f"{which}_dropout", name, f"{name}_dropped", spec.hidden_dropout))
        name = f"{name}_dropped"
    return name


def _attention(spec: DecoderSpec, source: str, kind: _Kind) -> list[Op]:
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
    ops.append(
        _linear(
            "o_proj",
            "context",
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
    ops = [
        _linear(
            f"{letter}_proj",
            source,
            Tensor(name=results[letter], dims=(BATCH, SEQ, heads, "head_dim")),
            (heads, "head_dim"),
            ("hidden",),
            parallel="column",
            bias=spec.qkv_bias,
            group="qkv",
            fused=spec.fused_qkv,
        )
        for letter, heads in names.items()
    ]
    q, k = results["q"], results["k"]
    if normed:
        suffix = "normed" if roped else "final"
        ops += [_head_norm(spec, letter, names[letter], f"{letter}_{suffix}") for letter in ("q", "k")]
        q, k = "q_normed", "k_normed"
    if roped:
        ops.append(_rope(spec, q, k))
    return ops


def _head_norm(spec: DecoderSpec, letter: str, heads: str, result: str) -> Op:
    """A norm of the query or key."""
    name = f"{letter}_norm"
    params: tuple[Param, ...] = ()
    if spec.qk_norm == "heads":
        params = (Param(name=f"{name}.weight", dims=(heads, "head_dim")),)
    elif spec.qk_norm != "unscaled":
        params = _norm_params(spec, name, ("head_dim",) if spec.qk_norm == "head" else (heads, "head_dim"))
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
        attrs=FrozenMap({"fraction": spec.rope_fraction}),
        module="rope",
    )


def _latent_projections(spec: DecoderSpec, source: str) -> list[Op]:
    latent = spec.latent
    assert latent is not None
    q_up = Tensor(name="q_up", dims=(BATCH, SEQ, "heads", "head_dim"))
    ops: list[Op] = []
    if latent.q_rank:
        down = Tensor(name="q_down", dims=(BATCH, SEQ_SP, "q_rank"))
        ops.append(
            _linear(
                "q_a_proj",
                source,
                down,
                ("q_rank",),
                ("hidden",),
                parallel="replicated",
                bias=latent.down_bias,
                module="q_down",
            )
        )
        q_in = "q_down"
        if latent.norms:
            ops.append(_latent_norm(spec, "q_a_norm", "q_down", "q_latent", "q_rank"))
            q_in = "q_latent"
        ops.append(
            _linear("q_b_proj", q_in, q_up, ("heads", "head_dim"), ("q_rank",), parallel="column", module="mla_up_proj")
        )
    else:
        ops.append(_linear("q_proj", source, q_up, ("heads", "head_dim"), ("hidden",), parallel="column"))
    kv_down = Tensor(name="kv_down", dims=(BATCH, SEQ_SP, "kv_rank_rope"))
    ops.append(
        _linear(
            "kv_a_proj",
            source,
            kv_down,
            ("kv_rank_rope",),
            ("hidden",),
            parallel="replicated",
            bias=latent.down_bias,
            module="kv_down",
        )
    )
    split = Op(
        name="kv_split",
        kind="split",
        inputs=("kv_down",),
        outputs=(
            Tensor(name="kv_compressed", dims=(BATCH, SEQ_SP, "kv_rank")),
            Tensor(name="k_pe", dims=(BATCH, SEQ_SP, "rope_dim")),
        ),
    )
    ops.append(split)
    kv_in = "kv_compressed"
    if latent.norms:
        ops.append(_latent_norm(spec, "kv_a_norm", "kv_compressed", "kv_latent", "kv_rank"))
        kv_in = "kv_latent"
    ops.append(
        _linear(
            "kv_b_proj",
            kv_in,
            Tensor(name="kv_up", dims=(BATCH, SEQ, "heads", "kv_up_dim")),
            ("heads", "kv_up_dim"),
            ("kv_rank",),
            parallel="column",
            module="mla_up_proj",
        )
    )
    ops.append(
        Op(
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
    )
    return ops


def _latent_norm(spec: DecoderSpec, name: str, source: str, result: str, rank: str) -> Op:
    return Op(
        name=name,
        kind="norm",
        inputs=(source,),
        outputs=(Tensor(name=result, dims=(BATCH, SEQ_SP, rank)),),
        params=_norm_params(spec, name, (rank,)),
        attrs=FrozenMap({"norm": spec.norm}),
        module="qk_layernorm",
    )


def _mlp(spec: DecoderSpec, source: str, sparse: bool) -> list[Op]:
    if sparse:
        return _sparse_mlp(spec, source)
    return _dense_mlp(spec, source, "mlp_out", "ffn", "", "mlp")


def _dense_mlp(spec: DecoderSpec, source: str, result: str, ffn: str, prefix: str, module: str) -> list[Op]:
    inner = Tensor(name=f"{prefix}up", dims=(BATCH, SEQ, ffn))
    gate = Tensor(name=f"{prefix}gate", dims=(BATCH, SEQ, ffn))
    ops: list[Op] = []
    if spec.glu:
        ops.append(
            _linear(
                f"{prefix}gate_proj",
                source,
                gate,
                (ffn,),
                ("hidden",),
                parallel="column",
                bias=spec.mlp_bias,
                group=f"{prefix}gate_up",
                fused=spec.fused_gate_up,
                module=module,
            )
        )
    ops.append(
        _linear(
            f"{prefix}up_proj",
            source,
            inner,
            (ffn,),
            ("hidden",),
            parallel="column",
            bias=spec.mlp_bias,
            group=f"{prefix}gate_up",
            fused=spec.fused_gate_up,
            module=module,
        )
    )
    ops.append(
        Op(
            name=f"{prefix}act",
            kind="activation",
            inputs=(gate.name, inner.name) if spec.glu else (inner.name,),
            outputs=(Tensor(name=f"{prefix}product", dims=(BATCH, SEQ, ffn)),),
            attrs=FrozenMap({"act": spec.mlp, "form": _form(spec), "glu": spec.glu, "bias": spec.mlp_bias}),
            module=module,
        )
    )
    ops.append(
        _linear(
            f"{prefix}down_proj",
            f"{prefix}product",
            Tensor(name=result, dims=STREAM),
            ("hidden",),
            (ffn,),
            parallel="row",
            bias=spec.mlp_bias,
            module=module,
        )
    )
    return ops


def _form(spec: DecoderSpec) -> str:
    return spec.mlp_form or spec.mlp


def _sparse_mlp(spec: DecoderSpec, source: str) -> list[Op]:
    experts = spec.experts
    assert experts is not None
    router_params = [Param(name="router.weight", dims=("router", "hidden"))]
    if experts.router_bias:
        router_params.append(Param(name="router.bias", dims=("router",)))
    if experts.score_bias:
        router_params.append(Param(name="router.score_bias", dims=("router",), buffer=True, elements="fp32"))
    ops = [
        Op(
            name="router",
            kind="router",
            inputs=(source,),
            outputs=(Tensor(name="scores", dims=(BATCH, SEQ_SP, "top_k"), elements="fp32"),),
            params=tuple(router_params),
            module="moe",
        ),
        Op(
            name="dispatch",
            kind="dispatch",
            inputs=(source, "scores"),
            outputs=(Tensor(name="rows", dims=(ROUTED, "hidden")),),
            module="moe",
        ),
    ]
    ops += _experts(spec, experts)
    routed_out = "routed_out" if experts.shared_ffn else "mlp_out"
    ops.append(
        Op(
            name="combine",
            kind="combine",
            inputs=("expert_out", "scores"),
            outputs=(Tensor(name=routed_out, dims=STREAM),),
            module="moe",
        )
    )
    if experts.shared_ffn:
        shared = "shared_raw" if experts.shared_gate else "shared_out"
        ops += _dense_mlp(spec, source, shared, "shared_ffn", "shared_", "shared_experts")
        if experts.shared_gate:
            ops.append(
                Op(
                    name="shared_gate",
                    kind="shared_gate",
                    inputs=(source, shared),
                    outputs=(Tensor(name="shared_out", dims=STREAM),),
                    params=(Param(name="shared_gate.weight", dims=(1, "hidden")),),
                    module="shared_experts",
                )
            )
        ops.append(_residual("shared_add", routed_out, "shared_out", "mlp_out"))
    return ops


def _experts(spec: DecoderSpec, experts: Experts) -> list[Op]:
    def grouped(name: str, source: str, result: str, out: Dim, inner: Dim, group: str) -> Op:
        params = [Param(name=f"experts.{name}.weight", dims=("experts", out, inner))]
        if experts.expert_bias:
            params.append(Param(name=f"experts.{name}.bias", dims=("experts", out)))
        return Op(
            name=f"experts.{name}",
            kind="grouped_linear",
            inputs=(source,),
            outputs=(Tensor(name=result, dims=(ROUTED, out)),),
            params=tuple(params),
            attrs=FrozenMap({"group": group}),
            module="moe",
        )

    ops: list[Op] = []
    if spec.glu:
        ops.append(grouped("gate_proj", "rows", "expert_gate", "expert_ffn", "hidden", "expert_gate_up"))
    ops.append(grouped("up_proj", "rows", "expert_up", "expert_ffn", "hidden", "expert_gate_up"))
    ops.append(
        Op(
            name="experts.act",
            kind="activation",
            inputs=("expert_gate", "expert_up") if spec.glu else ("expert_up",),
            outputs=(Tensor(name="expert_product", dims=(ROUTED, "expert_ffn")),),
            attrs=FrozenMap({"act": spec.mlp, "form": _form(spec), "glu": spec.glu, "experts": True}),
            module="moe_act",
        )
    )
    ops.append(grouped("down_proj", "expert_product", "expert_out", "hidden", "expert_ffn", ""))
    return ops


def _head_ops(spec: DecoderSpec, source: str, *, loss: str = "loss", shared: bool = False) -> tuple[Op, ...]:
    """The output projection and the loss; ``shared``: with the weight of the main head."""
    head = _linear(
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


def _head(spec: DecoderSpec) -> Block:
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
        ops.append(_norm(spec, "norm", "x", "head_in", module="final_norm"))
        normed = "head_in"
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
    return Block(
        name="head",
        ops=tuple(ops),
        input=Tensor(name="x", dims=STREAM),
        output=Tensor(name="loss", dims=(1,), elements="fp32"),
        role="head",
    )


def _bert_ops(spec: DecoderSpec, source: str) -> list[Op]:
    """What BERT has beside a vocabulary: a dense layer with its norm before it, and a classifier of the first token (arXiv 1810.04805).

    The classifier's cross entropy over two classes is left out; its logits stand for it.
    """

    def activation(name: str, act: str, before: str, after: Tensor) -> Op:
        attrs = FrozenMap({"act": act, "form": act, "glu": False, "bias": True})
        return Op(name=name, kind="activation", inputs=(before,), outputs=(after,), attrs=attrs, module="head")

    def dense(name: str, before: str, after: Tensor, out: Dim) -> Op:
        return _linear(name, before, after, (out,), ("hidden",), parallel="replicated", bias=True, module="head")

    first_token: tuple[Dim, ...] = (BATCH, "hidden")
    return [
        dense("lm_dense", source, Tensor(name="lm_up", dims=STREAM), "hidden"),
        activation("lm_act", spec.mlp, "lm_up", Tensor(name="lm_product", dims=STREAM)),
        _norm(spec, "lm_norm", "lm_product", "transformed", module="head"),
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

    It reads the stream and the embedding of the next token (counted where the embedding is), and shares the main head.
    """
    return [
        _norm(spec, "enorm", "x", "e_normed", module="mtp"),
        _norm(spec, "hnorm", "x", "h_normed", module="mtp"),
        Op(
            name="concat",
            kind="concat",
            inputs=("e_normed", "h_normed"),
            outputs=(Tensor(name="joined", dims=(BATCH, SEQ_SP, 2, "hidden")),),
            module="mtp",
        ),
        _linear(
            "eh_proj",
            "joined",
            Tensor(name="mtp_x", dims=STREAM),
            ("hidden",),
            (2, "hidden"),
            parallel="replicated",
            module="mtp",
        ),
        *_layer_ops(
            spec,
            _Kind(sparse=spec.experts is not None, window=None, roped=spec.positions == "rope"),
            source="mtp_x",
            result="y",
        ),
        _norm(spec, "mtp_norm", "y", "mtp_head_in", module="mtp"),
        *_head_ops(spec, "mtp_head_in", shared=True),
    ]
