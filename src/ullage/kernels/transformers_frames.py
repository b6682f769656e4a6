"""What the frames of transformers' layer code name: a tensor lives as long as a local variable or an argument names it.

Without recomputation most of these are saved anyway; under it, and for what autograd does not save, the frames decide the forward's peak.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.kernels import transformers_moe
from ullage.kernels.eager import Tape
from ullage.kernels.transformers_parallel import GATHERED
from ullage.model.graph import Block, Op


def hold(tape: Tape, block: Block, op: Op) -> None:
    """Ends the frames that return with ``op``: a layer's input lives to its end, the arguments of a branch to the branch's end."""
    named = _LOCALS.get(tape.family, {})
    if op.outputs[0].name == block.output.name and block.role == "layer":
        _hold(tape, (block.input.name, "attention.weights", *named.get("end", ())))
    _hold(tape, named.get(op.name, _ARGUMENTS.get(op.name, ())))
    if op.name in _NORMS_OF_SUMS:
        branch = _NORMS_OF_SUMS[op.name]
        _hold(tape, (f"{branch}_dropped" if f"{branch}_dropped" in tape.values else branch,))
    if "gate" in tape.values:
        _hold(tape, _FACTORS.get(tape.family, {}).get(op.name, ()))


def _hold(tape: Tape, names: tuple[str, ...]) -> None:
    tape.hold(*(tape[name] for name in names if name in tape.values))


_Names = Mapping[str, tuple[str, ...]]

_ATTENTION = ("attention_in", f"attention_in{GATHERED}", "q_final", "k_final", "v")
_LATENT = ("attention_in", "q_up", "kv_down", "kv_latent", "q_pe.rotated", "k_pe.rotated", "q_final", "k_final", "v")
_PARTS = (*_ATTENTION, "q_final.pass", "k_final.pass", "q_final.turned", "k_final.turned")
"""The turned and the unturned part of each head, where the attention's own frame cuts and joins them."""

_PARALLEL = {"end": ("attention_in", "attention_out", "mlp_out")}
_GATED = {"o_proj": (*_ATTENTION, "output_gate")}
_SCALED = {"attention_add": ("attention_out",), "end": ("mlp_out",)}

_BERT = {
    "attention": ("q_final", "k_final", "v"),
    "o_proj": (),
    "attention_norm": ("context",),
    "down_proj": (),
    "mlp_norm": ("product",),
    "end": ("middle",),
}
"""Each half's projections and its output are modules of their own, called one after the other by a frame that names what they hand on."""

_ARGUMENTS: _Names = {
    "o_proj": _ATTENTION,
    "down_proj": ("mlp_in", f"mlp_in{GATHERED}", "gate_up"),
    "out_proj": ("attention_in", "qkvz", "ba", "z", "b", "a", "convolved", "beta", "g"),
    "combine": ("mlp_in", *transformers_moe.NAMED),
    "shared_add": ("mlp_in", *transformers_moe.NAMED),
}
"""op -> what the frames that return with it name; gate_up: where one projection makes both, the gate is a view of it."""

_NORMS_OF_SUMS = {"attention_norm": "attention_out", "mlp_norm": "mlp_out"}
"""Norm of a branch added to the stream -> the branch, as its dropout has left it (models/bert/modeling_bert.py, BertOutput)."""
_STACK = ("positions", "target_positions", "cross_positions", "causal_mask")

_FACTORS: Mapping[str, _Names] = {"t5": {"down_proj": ("act.gelu_new", "up")}}
"""Models that give both factors of a gated MLP a name, which ungated ones have not."""

_LOCALS: Mapping[str, _Names] = {
    "bert": _BERT,
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "deepseek_v2": {"o_proj": _LATENT},
    "deepseek_v3": {"o_proj": _LATENT},
    "glm4_moe_lite": {"o_proj": _LATENT},
    "kimi_k2": {"o_proj": _LATENT},
    "distilbert": {"down_proj": (), "end": ("middle",)},
    "qwen3_5_moe_text": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_next": _GATED,
    "gpt2": {
        "o_proj": (),
        "attention_add": ("attention_in",),
        "down_proj": (),
        "end": ("attention_out", "attention_out_dropped", "mlp_in"),
    },
    "gpt_neox": {"end": ("attention_out", "attention_out_dropped", "mlp_out", "mlp_out_dropped")},
    "granite": _SCALED,
    "granitemoe": _SCALED,
    "opt": {"down_proj": ()},
    "phi": {"o_proj": _PARTS, "end": ("attention_in", "attention_out", "attention_out_dropped", "mlp_out")},
    "roberta": _BERT,
    "t5": {
        "o_proj": _ATTENTION,
        "attention_add": ("attention_in", "attention_out"),
        "end": _STACK[:3],
        "cross_o_proj": ("cross_q_final", "cross_k_final", "cross_v"),
        "cross_add": ("cross_in", "cross_attention_out", "self_attention.weights"),
        "down_proj": ("mlp_in", "down_proj.as_weight"),
        "mlp_add": ("mlp_out",),
        "norm": _STACK,
        "norm_dropout": _STACK,
    },
    "stablelm": {"o_proj": _PARTS, "end": ("attention_in", "attention_out", "mlp_out")},
    "xlm-roberta": _BERT,
}
"""Models whose layers keep other names; "end": of the whole layer."""
