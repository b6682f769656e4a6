"""The MLP as ops: dense, or a mixture of routed and shared experts."""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, STREAM, Dim, Op, Param, Tensor
from ullage.model.ops import linear, residual
from ullage.model.spec import DecoderSpec, Experts

XIELU = "xielu"
"""An activation with parameters of its own, hence a kind of op."""


def mlp(spec: DecoderSpec, source: str, sparse: bool) -> list[Op]:
    if sparse:
        return _sparse_mlp(spec, source)
    return _dense_mlp(spec, source, "mlp_out", "ffn", "", "mlp")


def _dense_mlp(spec: DecoderSpec, source: str, result: str, ffn: str, prefix: str, module: str) -> list[Op]:
    inner = [f"{prefix}gate", f"{prefix}up"] if spec.glu else [f"{prefix}up"]
    ops = [
        linear(
            f"{name}_proj",
            source,
            Tensor(name=name, dims=(BATCH, SEQ, ffn)),
            (ffn,),
            ("hidden",),
            parallel="column",
            bias=spec.mlp_bias,
            group=f"{prefix}gate_up",
            fused=spec.fused_gate_up,
            module=module,
        )
        for name in inner
    ]
    ops.append(
        Op(
            name=f"{prefix}act",
            kind="xielu" if spec.mlp == XIELU else "activation",
            inputs=tuple(inner),
            outputs=(Tensor(name=f"{prefix}product", dims=(BATCH, SEQ, ffn)),),
            params=_xielu_params(f"{prefix}act") if spec.mlp == XIELU else (),
            attrs=FrozenMap({"act": spec.mlp, "form": form(spec), "glu": spec.glu, "bias": spec.mlp_bias}),
            module=module,
        )
    )
    ops.append(
        linear(
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


def _xielu_params(name: str) -> tuple[Param, ...]:
    """xIELU (arXiv 2411.13010) learns its curvature above zero and below; two numbers beside it stay as they are."""
    learned = tuple(Param(name=f"{name}.alpha_{side}", dims=(1,)) for side in ("p", "n"))
    return (*learned, *(Param(name=f"{name}.{fixed}", dims=(), buffer=True) for fixed in ("beta", "eps")))


def form(spec: DecoderSpec) -> str:
    return spec.mlp_form or spec.mlp


def _sparse_mlp(spec: DecoderSpec, source: str) -> list[Op]:
    experts = spec.experts
    assert experts is not None
    routed_out = "routed_out" if experts.shared_ffn else "mlp_out"
    combined = "latent_out" if experts.latent else routed_out
    ops = [
        *_routed(spec, experts, source),
        *_experts(spec, experts),
        Op(
            name="combine",
            kind="combine",
            inputs=("expert_out", "scores"),
            outputs=(Tensor(name=combined, dims=(BATCH, SEQ_SP, _width(experts))),),
            module="moe",
        ),
    ]
    if experts.latent:
        ops.append(_latent(spec, "latent_up", combined, routed_out, "hidden", "latent"))
    if experts.shared_ffn:
        ops += _shared(spec, experts, source)
        ops.append(residual("shared_add", routed_out, "shared_out", "mlp_out"))
    return ops


def _width(experts: Experts) -> str:
    """What a routed row is wide."""
    return "latent" if experts.latent else "hidden"


def _latent(spec: DecoderSpec, name: str, source: str, result: str, out: str, inner: str) -> Op:
    """One of the projections around experts that have a width of their own; whole on every rank."""
    dims = (BATCH, SEQ_SP, out)
    return linear(
        name,
        source,
        Tensor(name=result, dims=dims),
        (out,),
        (inner,),
        parallel="replicated",
        bias=spec.mlp_bias,
        module="moe",
    )


def _routed(spec: DecoderSpec, experts: Experts, source: str) -> list[Op]:
    """The router, and its rows brought to their experts."""
    params = [Param(name="router.weight", dims=("router", "hidden"))]
    if experts.router_bias:
        params.append(Param(name="router.bias", dims=("router",)))
    if experts.score_bias:
        params.append(Param(name="router.score_bias", dims=("router",), buffer=True, elements="fp32"))
    sent = "latent_in" if experts.latent else source
    down = [_latent(spec, "latent_down", source, sent, "latent", "hidden")] if experts.latent else []
    return [
        Op(
            name="router",
            kind="router",
            inputs=(source,),
            outputs=(Tensor(name="scores", dims=(BATCH, SEQ_SP, "top_k"), elements="fp32"),),
            params=tuple(params),
            attrs=FrozenMap({"normed": experts.normed}),
            module="moe",
        ),
        *down,
        Op(
            name="dispatch",
            kind="dispatch",
            inputs=(sent, "scores"),
            outputs=(Tensor(name="rows", dims=(ROUTED, _width(experts))),),
            module="moe",
        ),
    ]


def _shared(spec: DecoderSpec, experts: Experts, source: str) -> list[Op]:
    """The expert that every token passes, behind a gate where there is one."""
    if not experts.shared_gate:
        return _dense_mlp(spec, source, "shared_out", "shared_ffn", "shared_", "shared_experts")
    return [
        *_dense_mlp(spec, source, "shared_raw", "shared_ffn", "shared_", "shared_experts"),
        Op(
            name="shared_gate",
            kind="shared_gate",
            inputs=(source, "shared_raw"),
            outputs=(Tensor(name="shared_out", dims=STREAM),),
            params=(Param(name="shared_gate.weight", dims=(1, "hidden")),),
            attrs=FrozenMap({"parallel": "replicated", "out": (1,), "in": ("hidden",)}),
            module="shared_experts",
        ),
    ]


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
    width = _width(experts)
    if spec.glu:
        ops.append(grouped("gate_proj", "rows", "expert_gate", "expert_ffn", width, "expert_gate_up"))
    ops.append(grouped("up_proj", "rows", "expert_up", "expert_ffn", width, "expert_gate_up"))
    ops.append(
        Op(
            name="experts.act",
            kind="activation",
            inputs=("expert_gate", "expert_up") if spec.glu else ("expert_up",),
            outputs=(Tensor(name="expert_product", dims=(ROUTED, "expert_ffn")),),
            attrs=FrozenMap({"act": spec.mlp, "form": form(spec), "glu": spec.glu, "experts": True}),
            module="moe_act",
        )
    )
    ops.append(grouped("down_proj", "expert_product", "expert_out", width, "expert_ffn", ""))
    return ops
