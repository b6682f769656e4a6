"""Megatron-LM's architecture arguments as a ``model_type: gpt`` mapping, and any model's architecture as those arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ullage.formats import megatron_hybrid
from ullage.formats.reading import Keys, lenient_flag, size
from ullage.job import fields
from ullage.job.job import Job
from ullage.model.hf_config import decoder_spec
from ullage.model.spec import DecoderSpec, Experts

_SIZES: Mapping[str, str] = {
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--kv-channels": "head_dim",
    "--ffn-hidden-size": "intermediate_size",
    "--max-position-embeddings": "max_position_embeddings",
    "--num-experts": "num_experts",
    "--moe-router-topk": "num_experts_per_tok",
    "--moe-ffn-hidden-size": "moe_intermediate_size",
    "--moe-shared-expert-intermediate-size": "shared_expert_intermediate_size",
    "--mtp-num-layers": "num_nextn_predict_layers",
}
_LATENT: Mapping[str, tuple[str, int]] = {
    "--q-lora-rank": ("q_lora_rank", 0),
    "--kv-lora-rank": ("kv_lora_rank", 32),
    "--qk-head-dim": ("qk_nope_head_dim", 128),
    "--qk-pos-emb-head-dim": ("qk_rope_head_dim", 64),
    "--v-head-dim": ("v_head_dim", 128),
}
"""With the defaults of megatron/core/transformer/transformer_config.py, MLATransformerConfig."""

_DROPOUT = 0.1  # megatron/core/transformer/transformer_config.py, both
_TOP_K = 2
_GIVE_VOCABULARY = "give it: --set model.vocab_size=128256"
_VOCAB_MULTIPLE = 128
_TOKENIZER_SIZES = {"GPT2BPETokenizer": 50257}
"""What a tokenizer's own files fix; of the others, only the files know."""
_POSITIONS = {
    "learned_absolute": "learned",
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "none": "none",
    "rotary": "rope",
    "alibi": "alibi",
}
"""The last two are words of forks (bigscience-workshop/Megatron-DeepSpeed, alibaba/Pai-Megatron-Patch)."""
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
"""As the forks of DeepSpeed and of Huawei write them too."""
_PATTERN = re.compile(r"\(\[0\]\*(\d+)\+\[1\]\*(\d+)\)")


def read_model(keys: Keys) -> None:
    """The architecture, where the text says one; a model named by flags replaces it."""
    if megatron_hybrid.is_hybrid(keys):
        megatron_hybrid.read(keys)
        _vocabulary(keys)
        return
    if not any(keys.has((flag,)) for flag in ("--num-layers", "--hidden-size")):
        for flag in (*_SIZES, *_LATENT):
            keys.leave((flag,), "an architecture without --num-layers and --hidden-size")
        return
    keys.put("model.model_type", "gpt")
    for flag, name in _SIZES.items():
        if flag == "--num-experts" and keys.tree.leaves.get((flag,)) == 1:
            keys.leave((flag,), "one expert, with one for each token, is a dense layer")
        elif keys.move((flag,), f"model.{name}", fields.integer(0)) is not None and flag == "--num-experts":
            keys.job.setdefault("model", {})
    _heads(keys)
    _parts(keys)
    _experts(keys)
    _latent(keys)
    _vocabulary(keys)


def _heads(keys: Keys) -> None:
    groups = keys.take(("--num-query-groups",), size)
    if keys.take(("--group-query-attention",), lenient_flag):
        keys.put("model.num_key_value_heads", groups or 1, ("--num-query-groups",))


def _parts(keys: Keys) -> None:
    def on(flag: str) -> bool:
        return keys.take((flag,), lenient_flag) is True

    mlp = "swiglu" if on("--swiglu") else "squared-relu" if on("--squared-relu") else "gelu"
    keys.put("model.mlp", mlp, ("--swiglu",))
    keys.put("model.bias", not on("--disable-bias-linear"), ("--disable-bias-linear",))
    if on("--add-qkv-bias"):
        keys.put("model.qkv_bias", True, ("--add-qkv-bias",))
    keys.put(
        "model.tie_word_embeddings",
        not on("--untie-embeddings-and-output-weights"),
        ("--untie-embeddings-and-output-weights",),
    )
    norm = keys.take(("--normalization",), fields.choice("LayerNorm", "RMSNorm", aliases=_NORMS)) or "LayerNorm"
    keys.put("model.norm", norm.lower(), ("--normalization",))
    written = keys.take(("--position-embedding-type",), fields.choice(*_POSITIONS))
    rotary = on("--use-rotary-position-embeddings")
    bare = on("--no-position-embedding")
    position = _POSITIONS[written] if written else "rope" if rotary else "none" if bare else "learned"
    keys.put("model.position", position, ("--position-embedding-type",))
    if position == "learned":
        keys.elsewhere["model.max_position_embeddings"] = "learned positions need --max-position-embeddings"
    for flag, name in (("--hidden-dropout", "hidden_dropout"), ("--attention-dropout", "attention_dropout")):
        value = keys.take((flag,), fields.number(0, 1))
        keys.put(f"model.{name}", _DROPOUT if value is None else value, (flag,))


def _experts(keys: Keys) -> None:
    if not keys.tree.leaves.get(("--num-experts",)) or keys.tree.leaves[("--num-experts",)] == 1:
        return
    if ("--moe-router-topk",) not in keys.tree.leaves:
        keys.put("model.num_experts_per_tok", _TOP_K)
    path = ("--moe-layer-freq",)
    value = keys.raw(path)
    match = _PATTERN.fullmatch(str(value).replace(" ", ""))
    if match is not None:
        keys.put("model.first_k_dense_replace", int(match[1]), path)
    elif value is not None:
        keys.put("model.moe_layer_freq", value, path)


def _latent(keys: Keys) -> None:
    if keys.take(("--multi-latent-attention",), lenient_flag) is not True:
        for flag in _LATENT:
            keys.leave((flag,), "no --multi-latent-attention")
        return
    for flag, (name, default) in _LATENT.items():
        value = keys.take((flag,), size)
        if value or default:
            keys.put(f"model.{name}", value or default, (flag,))


def _vocabulary(keys: Keys) -> None:
    """Padded as Megatron pads it; NullTokenizer adds one token for the end of a document."""
    tokenizer = str(keys.tree.leaves.get(("--tokenizer-type",), "GPT2BPETokenizer"))
    if tokenizer.startswith("Null"):
        keys.raw(("--tokenizer-type",))
    path = ("--padded-vocab-size",)  # of forks (alibaba/Pai-Megatron-Patch, MindSpeed-LLM): what the embedding has
    if (padded := keys.take(path, size)) is not None:
        keys.put("model.vocab_size", padded, path)
        return
    path = ("--vocab-size",)
    written = keys.take(path, size)
    vocab = _TOKENIZER_SIZES.get(tokenizer)
    if written is not None:
        vocab = written + 1 if tokenizer.startswith("Null") else written
    elif ("--tokenizer-type",) not in keys.tree.leaves and ("--vocab-file",) not in keys.tree.leaves:
        vocab = None
    multiple = keys.take(("--make-vocab-size-divisible-by",), size) or _VOCAB_MULTIPLE
    tp = keys.tree.leaves.get(("--tensor-model-parallel-size",), 1)
    if vocab is not None:
        step = multiple * (tp if isinstance(tp, int) else 1)
        keys.put("model.vocab_size", -(-vocab // step) * step, path)
    else:
        keys.find("warning", "--vocab-size", "is not here: the tokenizer's files say it", _GIVE_VOCABULARY)
        keys.elsewhere["model.vocab_size"] = f"the tokenizer's files say it; {_GIVE_VOCABULARY}"


def model_leaves(job: Job) -> dict[str, object]:
    """The job's model in Megatron's arguments; what they cannot say of its family is left out."""
    spec = decoder_spec(job.model)
    found: dict[str, object] = {
        "--num-layers": spec.layers,
        "--hidden-size": spec.hidden,
        "--num-attention-heads": spec.heads,
        "--ffn-hidden-size": spec.ffn,
        "--max-position-embeddings": spec.max_positions or job.data.seq_len,
        "--hidden-dropout": spec.hidden_dropout,
        "--attention-dropout": spec.attention_dropout,
        "--normalization": "RMSNorm" if spec.norm == "rmsnorm" else "LayerNorm",
        "--position-embedding-type": {"learned": "learned_absolute", "rope": "rope"}.get(spec.positions, "none"),
    }
    if spec.latent is None:
        if spec.head_dim * spec.heads != spec.hidden:
            found["--kv-channels"] = spec.head_dim
        if spec.kv_heads != spec.heads:
            found |= {"--group-query-attention": True, "--num-query-groups": spec.kv_heads}
    switches = {
        "--swiglu": spec.glu and spec.mlp == "silu",
        "--squared-relu": spec.mlp == "squared-relu",
        "--disable-bias-linear": not spec.mlp_bias,
        "--add-qkv-bias": spec.qkv_bias and not spec.mlp_bias,
        "--untie-embeddings-and-output-weights": not spec.tied,
        "--qk-layernorm": spec.qk_norm is not None,
    }
    found |= {flag: True for flag, on in switches.items() if on}
    if "tokenizer_type" not in job.engine.options:  # else its files say the size
        found |= _vocabulary_leaves(spec, job.layout.tp)
    if spec.experts is not None:
        found |= _expert_leaves(spec, spec.experts)
    if spec.latent is not None:
        found |= _latent_leaves(spec)
    if spec.mtp_layers:
        found["--mtp-num-layers"] = spec.mtp_layers
    return megatron_hybrid.leaves(spec, found, job.engine.options) if spec.mixers else found


def _vocabulary_leaves(spec: DecoderSpec, tp: int) -> dict[str, object]:
    """A size that Megatron pads to the model's own, whatever the tokenizer."""
    found: dict[str, object] = {"--tokenizer-type": "NullTokenizer", "--vocab-size": spec.vocab - 1}
    if spec.vocab % (_VOCAB_MULTIPLE * tp):
        found["--make-vocab-size-divisible-by"] = 1
    return found


def _expert_leaves(spec: DecoderSpec, experts: Experts) -> dict[str, object]:
    found: dict[str, object] = {
        "--num-experts": experts.count,
        "--moe-router-topk": experts.top_k,
        "--moe-ffn-hidden-size": experts.ffn,
    }
    if experts.shared_ffn:
        found["--moe-shared-expert-intermediate-size"] = experts.shared_ffn
    dense = len(experts.dense_layers)
    if dense and experts.dense_layers == tuple(range(dense)):
        found["--moe-layer-freq"] = f"([0]*{dense}+[1]*{spec.layers - dense})"
    elif dense:
        sparse = [index for index in range(spec.layers) if index not in experts.dense_layers]
        found["--moe-layer-freq"] = sparse[1] - sparse[0] if len(sparse) > 1 else spec.layers
    return found


def _latent_leaves(spec: DecoderSpec) -> dict[str, object]:
    latent = spec.latent
    assert latent is not None
    values = (latent.q_rank, latent.kv_rank, latent.qk_nope_dim, latent.qk_rope_dim, latent.v_dim)
    written = {flag: value for flag, value in zip(_LATENT, values, strict=True) if value is not None}
    return {"--multi-latent-attention": True, **written}
