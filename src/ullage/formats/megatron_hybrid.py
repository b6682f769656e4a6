"""Megatron-LM's arguments of a hybrid (``--hybrid-layer-pattern``) as Hugging Face's nemotron_h keys, and back.

Of Megatron's letters those of Mamba-2, attention, MLP and experts are known; ``|`` cuts it into stages, ``/`` begins a multi-token
prediction module (megatron/core/models/hybrid/hybrid_layer_allocation.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.errors import Unsupported
from ullage.formats.reading import Keys, lenient_flag, size
from ullage.formats.tree import Path
from ullage.job import fields
from ullage.model.spec import DecoderSpec

PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_LETTERS: Mapping[str, str] = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
_SIZES: Mapping[str, str] = {
    "--hidden-size": "hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--kv-channels": "head_dim",
    "--ffn-hidden-size": "intermediate_size",
    "--max-position-embeddings": "max_position_embeddings",
    "--mamba-num-heads": "mamba_num_heads",
    "--mamba-head-dim": "mamba_head_dim",
    "--mamba-state-dim": "ssm_state_size",
    "--mamba-num-groups": "n_groups",
    "--num-experts": "n_routed_experts",
    "--moe-router-topk": "num_experts_per_tok",
    "--moe-ffn-hidden-size": "moe_intermediate_size",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "--moe-latent-size": "moe_latent_size",
}
_DEFAULTS: Mapping[str, int] = {"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}  # transformer_config.py
_EXPANSION = 2  # mamba_mixer.py: channels where no heads are given
_TOLD: Mapping[str, str] = {"--normalization": "normalization", "--position-embedding-type": "position_embedding_type"}
_UNTOLD: Mapping[str, str] = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
}  # arguments.py
DROPOUT = 0.1  # transformer_config.py, both


def is_hybrid(keys: Keys) -> bool:
    return any(keys.has((flag,)) for flag in PATTERNS)


def read(keys: Keys) -> None:
    """The architecture of a hybrid; what its norms and positions are stays an argument."""
    keys.put("model.model_type", "nemotron_h")
    _pattern(keys)
    found = {name: keys.move((flag,), f"model.{name}", fields.integer(0)) for flag, name in _SIZES.items()}
    for name, default in _DEFAULTS.items():
        found[name] = found[name] or default
        keys.put(f"model.{name}", found[name])
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    if found["mamba_num_heads"] is None and hidden is not None:
        keys.put("model.mamba_num_heads", _EXPANSION * hidden // (found["mamba_head_dim"] or 1))
    if found["intermediate_size"] is None and hidden is not None:
        keys.put("model.intermediate_size", 4 * hidden)  # arguments.py
    if found["head_dim"] is None and hidden is not None and heads:
        keys.put("model.head_dim", hidden // heads)
    groups = keys.take(("--num-query-groups",), size)
    grouped = keys.take(("--group-query-attention",), lenient_flag)
    keys.put("model.num_key_value_heads", (groups or 1) if grouped else heads, ("--num-query-groups",))
    _switches(keys)


def _pattern(keys: Keys) -> None:
    path: Path = next((flag,) for flag in PATTERNS if keys.has((flag,)))
    main, *predicting = str(keys.raw(path)).split("/")
    letters = main.replace("|", "")
    keys.put("model.hybrid_override_pattern", letters, path)
    keys.put("model.num_hidden_layers", len(letters), path)
    _stages(keys, [len(stage) for stage in main.split("|")], path)
    legacy = keys.raw(("--mtp-hybrid-override-pattern",))
    depths = keys.take(("--mtp-num-layers",), fields.integer(0)) or len(predicting)
    if depths:
        keys.put("model.num_nextn_predict_layers", depths, path)
        keys.put("model.mtp_hybrid_override_pattern", str(legacy or predicting[0]), path)
    for flag in ("--num-layers", "--is-hybrid-model", "--spec"):
        keys.raw((flag,))  # the pattern says it


def _stages(keys: Keys, split: list[int], path: Path) -> None:
    """Layers of each virtual stage, where the pattern is cut."""
    pp = keys.tree.leaves.get(("--pipeline-model-parallel-size",), 1)
    if len(split) == 1 or not isinstance(pp, int) or pp < 2 or len(split) % pp:
        return
    keys.put("layout.pp_split", split, path)
    if len(split) > pp:
        keys.put("layout.vpp", len(split) // pp, path)
        keys.put("layout.schedule", "interleaved-1f1b", path)


def _switches(keys: Keys) -> None:
    def on(flag: str) -> bool:
        return keys.take((flag,), lenient_flag) is True

    gated = on("--swiglu")
    if gated:
        keys.find("warning", "--swiglu", "is no activation of a hybrid's MLPs here", "drop it, or --squared-relu")
    keys.put("model.mlp_hidden_act", "relu2" if on("--squared-relu") else "silu" if gated else "gelu")
    bias = not on("--disable-bias-linear")
    for name in ("attention_bias", "mlp_bias"):
        keys.put(f"model.{name}", bias, ("--disable-bias-linear",))
    tied = not on("--untie-embeddings-and-output-weights")
    keys.put("model.tie_word_embeddings", tied, ("--untie-embeddings-and-output-weights",))
    for flag, name in (("--hidden-dropout", "hidden_dropout"), ("--attention-dropout", "attention_dropout")):
        value = keys.take((flag,), fields.number(0, 1))
        keys.put(f"model.{name}", DROPOUT if value is None else value, (flag,))
    for flag, name in _TOLD.items():
        keys.put_option(name, keys.take((flag,), fields.text) or _UNTOLD[name], (flag,))


def leaves(spec: DecoderSpec, found: dict[str, object], options: Mapping[str, object]) -> dict[str, object]:
    """``found``, the arguments of any decoder, as those of a hybrid. options: the job's, which say its norms and positions if any does."""
    mamba = spec.mamba
    assert mamba is not None
    if mamba.proj_bias or not mamba.conv_bias:
        raise Unsupported("has no argument in Megatron", key="model.use_bias", value=mamba.proj_bias)
    pattern = "".join(_LETTERS[mixer] for mixer in spec.mixers)
    predicting = "".join(_LETTERS[mixer] for mixer in spec.mtp_mixers)
    own: dict[str, object] = {
        "--hybrid-layer-pattern": "/".join([pattern, *[predicting] * spec.mtp_layers]),
        "--spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        "--mamba-num-heads": mamba.heads,
        "--mamba-head-dim": mamba.head_dim,
        "--mamba-state-dim": mamba.state,
        "--mamba-num-groups": mamba.groups,
    }
    if spec.experts is not None and spec.experts.latent:
        own["--moe-latent-size"] = spec.experts.latent
    told = {flag: options[name] for flag, name in _TOLD.items() if name in options}
    dropped = ("--num-layers", "--mtp-num-layers", *(() if "moe" in spec.mixers else _OF_EXPERTS))
    return {**{flag: value for flag, value in found.items() if flag not in dropped}, **own, **told}


_OF_EXPERTS = tuple(flag for flag in _SIZES if flag.startswith("--moe") or flag == "--num-experts")
