"""``model_type: gpt``, the format of docs/job.md, and Megatron's BERT."""

from __future__ import annotations

import pytest

from ullage.errors import Contradiction, InvalidInput, UllageError, UnknownKey
from ullage.model.build import graph
from ullage.model.catalogue import model_config
from ullage.model.hf_config import decoder_spec, defaults

GPT3_175B = {
    "model_type": "gpt",
    "hidden_size": 12288,
    "num_hidden_layers": 96,
    "num_attention_heads": 96,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
}
DEEPSEEK_V3 = {
    "model_type": "gpt",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 192,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_word_embeddings": False,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "shared_expert_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def count(**keys: object) -> int:
    return graph(model_config(keys)).parameter_count()


def test_gpt3_by_its_closed_form() -> None:
    """12 l h^2 (1 + 13 / (12 h)) + (V + s) h + 2 h (Narayanan et al., arXiv 2104.04473, eq. 2, and the final norm)."""
    h, layers, vocab, seq = 12288, 96, 51200, 2048
    assert count(**GPT3_175B) == 12 * layers * h * h + 13 * layers * h + (vocab + seq) * h + 2 * h


def test_the_other_choices() -> None:
    h, layers = 12288, 96
    whole = count(**GPT3_175B)
    biases = layers * (3 * h + h + 4 * h + h)
    assert count(**GPT3_175B, bias=False) == whole - biases
    assert count(**GPT3_175B, bias=False, qkv_bias=True) == whole - biases + layers * 3 * h
    assert count(**GPT3_175B, norm="rmsnorm") == whole - (2 * layers + 1) * h
    assert count(**GPT3_175B, position="alibi") == whole - 2048 * h
    assert count(**GPT3_175B, tie_word_embeddings=False) == whole + 51200 * h
    assert count(**GPT3_175B, num_key_value_heads=8, bias=False) == whole - biases - layers * 2 * h * (96 - 8) * 128
    assert count(**GPT3_175B, mlp="squared-relu") == whole
    ffn = 32768  # Megatron's own size of a gated MLP: 8/3 of the hidden size in multiples of 64
    assert count(**GPT3_175B, mlp="swiglu", bias=False) == whole - biases + layers * h * (3 * ffn - 8 * h)


def test_deepseek_v3_written_as_gpt() -> None:
    assert count(**DEEPSEEK_V3) == graph(model_config("deepseek-v3")).parameter_count()


def test_prediction_modules_are_counted_where_they_are_trained() -> None:
    """One sparse layer, its two entry norms, its last norm and a 2h x h projection; embedding and head are shared."""
    module = count(**DEEPSEEK_V3, num_nextn_predict_layers=1) - count(**DEEPSEEK_V3)
    sparse_layer = count(**DEEPSEEK_V3 | {"num_hidden_layers": 62}) - count(**DEEPSEEK_V3)
    assert module == sparse_layer + 3 * 7168 + 2 * 7168 * 7168
    assert graph(model_config("deepseek-v3"), mtp=True).parameter_count() == count(
        **DEEPSEEK_V3, num_nextn_predict_layers=1
    )


@pytest.mark.parametrize("freq", [1, 2, 3])
def test_dense_layers_between_sparse_ones(freq: int) -> None:
    spec = decoder_spec(model_config(DEEPSEEK_V3 | {"moe_layer_freq": freq}))
    assert spec.experts is not None
    assert spec.experts.dense_layers == tuple(i for i in range(61) if i < 3 or i % freq)


def test_defaults_are_listed() -> None:
    listed = defaults(model_config(GPT3_175B))
    assert "model.bias = true" in listed
    assert "model.position = learned" in listed
    assert not any("hidden_size" in line for line in listed)
    assert defaults(model_config("llama-3.1-8b")) == ()


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        ({"hidden_sizes": 1}, UnknownKey, ["model.hidden_sizes", "hidden_size?"]),
        ({"rope_theta": 1e4}, UnknownKey, ["model.rope_theta", "is no key"]),
        ({"position": "rotary"}, InvalidInput, ["rotary", "learned | rope | alibi | none"]),
        ({"mlp": "swigl"}, InvalidInput, ["did you mean swiglu?"]),
        ({"bias": 1}, InvalidInput, ["model.bias = 1", "true or false"]),
        ({"hidden_dropout": 1.5}, InvalidInput, ["model.hidden_dropout = 1.5", "from 0 to 1"]),
        ({"num_attention_heads": 95}, InvalidInput, ["a divisor of the hidden size 12288", "head_dim"]),
        ({"num_key_value_heads": 7}, InvalidInput, ["model.num_key_value_heads = 7", "96"]),
        ({"num_experts_per_tok": 2}, Contradiction, ["num_experts"]),
        ({"v_head_dim": 2}, Contradiction, ["kv_lora_rank"]),
        ({"num_experts": 2, "num_experts_per_tok": 3}, InvalidInput, ["more than there are experts", "at most 2"]),
        ({"max_position_embeddings": None}, InvalidInput, ["model.max_position_embeddings", "missing"]),
        ({"hidden_size": None}, InvalidInput, ["model.hidden_size", "missing"]),
        ({"hidden_size": -1}, InvalidInput, ["model.hidden_size = -1", "from 1 to 10,000,000"]),
        ({"hidden_size": 0}, InvalidInput, ["model.hidden_size = 0"]),
        ({"hidden_size": "12288"}, InvalidInput, ["12288", "whole number"]),
        ({"hidden_size": True}, InvalidInput, ["true", "whole number"]),
        ({"hidden_size": 4.5}, InvalidInput, ["4.5"]),
        ({"hidden_size": float("nan")}, InvalidInput, ["nan"]),
        ({"hidden_size": 10**8}, InvalidInput, ["100000000"]),
        ({"hidden_size": 10**5000}, InvalidInput, ["0x", "…"]),
        ({"num_hidden_layers": 10**6}, InvalidInput, ["model.num_hidden_layers", "10,000"]),
    ],
)
def test_wrong_keys(change: dict[str, object], error: type[UllageError], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        model_config(GPT3_175B | change)
    for part in parts:
        assert part in str(caught.value)


def test_a_whole_float_is_a_count() -> None:
    assert count(**GPT3_175B | {"vocab_size": 51.2e3}) == count(**GPT3_175B)


def test_megatron_bert() -> None:
    """Megatron-LM's functional test bert_mcore_tp1_pp2: its last stage holds 184,616,834 parameters.

    12 layers, the final norm, the language head with its dense layer, norm and bias, pooler and binary head, and a copy of the embedding:
    18 bytes each are the 3.0949 GiB that its log shows.
    """
    keys = {
        "model_type": "megatron-bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 30592,
    }
    model = graph(model_config(keys))
    embedding, layer, head = (run.block for run in model.runs)
    last_stage = 12 * sum(map(model.numel, layer.params)) + sum(map(model.numel, head.params))
    assert last_stage == 184_616_834
    assert {param.name for param in embedding.params} >= {"token_type_embeddings.weight", "embed_positions.weight"}
    (attention,) = (op for op in layer.ops if op.kind == "attention")
    assert attention.attrs["causal"] is False
