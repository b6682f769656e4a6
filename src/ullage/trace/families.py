"""Small models of the families that transformers and ullage both know, to hold the closed form against the trace.

Each is a config.json's keys beside COMMON's; the sizes are odd on purpose (grouped heads, an MLP that is no multiple of the width), so
that terms which happen to be equal in a real model differ here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

COMMON: Mapping[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 176,
    "vocab_size": 520,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 520}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 176, "num_layers": 3, "num_heads": 4, "vocab_size": 520, "dropout_rate": 0.0}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SHARED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
_MIXED = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_NO_KV = {key: value for key, value in COMMON.items() if key not in ("num_key_value_heads", "head_dim")}

FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama": COMMON,
    "mistral": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON,
    "phi3": COMMON,
    "gemma": COMMON,
    "gemma2": COMMON,
    "gemma3_text": {**COMMON, **_MIXED},
    "olmo": COMMON,
    "olmo2": COMMON,
    "hunyuan_v1_dense": COMMON,
    "granite": COMMON,
    "smollm3": COMMON,
    "apertus": COMMON,
    "arcee": COMMON,
    "ernie4_5": COMMON,
    "exaone4": {**COMMON, **_MIXED},
    "helium": COMMON,
    "ministral": {**COMMON, **_MIXED},
    "ministral3": COMMON,
    "cwm": {**COMMON, **_MIXED},
    "exaone": COMMON,
    "internlm3": COMMON,
    "olmo3": {**COMMON, **_MIXED},
    "seed_oss": {**COMMON, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "nemotron": COMMON,
    "cohere2": {**COMMON, **_MIXED},
    "starcoder2": {**COMMON, "residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {**_GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {**_NO_KV, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "opt": {**_NO_KV, "ffn_dim": 176, "word_embed_proj_dim": 64, "dropout": 0.0},
    "phi": _NO_KV,
    "stablelm": COMMON,
    "cohere": COMMON,
    "glm": COMMON,
    "glm4": COMMON,
    "mixtral": {**COMMON, "num_local_experts": 4},
    "qwen3_moe": {**COMMON, **_MOE, "norm_topk_prob": True},
    "qwen2_moe": {**COMMON, **_MOE, "shared_expert_intermediate_size": 80},
    "olmoe": {**COMMON, **_MOE},
    "granitemoe": {**COMMON, "num_local_experts": 4},
    "dots1": {**COMMON, **_SHARED},
    "glm4_moe": {**COMMON, **_SHARED},
    "deepseek_v3": {**_NO_KV, **_SHARED, **_LATENT},
    "glm4_moe_lite": {**_NO_KV, **_SHARED, **_LATENT},
    "t5": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "deepseek_v2": {**_NO_KV, **_SHARED, **_LATENT},
    "qwen3_next": {**COMMON, **_MOE, **_DELTA, "shared_expert_intermediate_size": 80},
    "qwen3_5_text": {**COMMON, **_DELTA},
    "qwen3_5_moe_text": {**COMMON, **_MOE, **_DELTA, "shared_expert_intermediate_size": 80},
}
EAGER_ONLY = frozenset({"gemma2", "t5"})
"""Families whose classes refuse sdpa (a cap on the attention's logits), or whose terms of positions no fused kernel of the CPU takes."""
TARGETS: Mapping[str, int] = {"t5": 24}
"""Encoders with a decoder, and how many tokens of a sequence that makes."""


class TextPart(NamedTuple):
    """keys: of its own config.json. whole: the model_type that it is a part of; vision: keys of the part beside it, which no text runs."""

    keys: Mapping[str, object]
    whole: str
    vision: Mapping[str, object]


_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
_QWEN = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}

TEXT_PARTS: Mapping[str, TextPart] = {
    "qwen2_vl_text": TextPart({**COMMON, **_MROPE}, "qwen2_vl", {**_QWEN, "embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl_text": TextPart({**COMMON, **_MROPE}, "qwen2_5_vl", _QWEN),
    "qwen3_vl_text": TextPart({**COMMON, **_MROPE}, "qwen3_vl", _QWEN),
    "qwen3_vl_moe_text": TextPart({**COMMON, **_MOE, **_MROPE}, "qwen3_vl_moe", _QWEN),
}
"""Families for whose own config.json transformers has no language model: they run inside of another."""

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DROPOUT = {"hidden_dropout_prob": 0.1}
_BERT = {**_NO_KV, **_NO_DROPOUT, "model_type": "bert"}
_DISTILBERT = {
    "model_type": "distilbert",
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 176,
    "vocab_size": 520,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
}

ENCODERS: Mapping[str, Mapping[str, object]] = {
    "bert": _BERT,
    "bert, pre-training": {**_BERT, "architectures": ["BertForPreTraining"]},
    "bert, sequences": {**_BERT, **_DROPOUT, "architectures": ["BertForSequenceClassification"], "num_labels": 3},
    "bert, numbers": {**_BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 1},
    "bert, tokens": {**_BERT, "architectures": ["BertForTokenClassification"], "num_labels": 9},
    "roberta": {**_BERT, "model_type": "roberta", "pad_token_id": 1},
    "roberta, sequences": {
        **_BERT,
        **_DROPOUT,
        "model_type": "roberta",
        "architectures": ["RobertaForSequenceClassification"],
        "num_labels": 3,
    },
    "xlm-roberta": {
        **_BERT,
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForTokenClassification"],
        "num_labels": 9,
    },
    "distilbert": {**_DISTILBERT, "dropout": 0.0},
    "distilbert, sequences": {
        **_DISTILBERT,
        "architectures": ["DistilBertForSequenceClassification"],
        "num_labels": 3,
    },
    "vit": {
        **_NO_KV,
        **_NO_DROPOUT,
        "model_type": "vit",
        "image_size": [24, 40],
        "patch_size": [8, 4],
        "num_labels": 5,
    },
}
"""Models that read a whole sequence at once, by what their head tells."""
