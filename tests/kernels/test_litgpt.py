"""litgpt's layer code: whole steps of its own modules, and what its tutorials measured."""

from __future__ import annotations

from typing import Any

import pytest

import ullage
from ullage.errors import InvalidInput, Unsupported
from ullage.job.read import read_job

WIDTH = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 688, **WIDTH}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
NEOX = {"model_type": "gpt_neox", "intermediate_size": 1024, "rotary_pct": 0.25, **WIDTH}
FALCON = {"model_type": "falcon", "multi_query": True, "parallel_attn": True, "bias": False, **WIDTH}
GEMMA = {**LLAMA, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 64}
PHI = {"model_type": "phi", "partial_rotary_factor": 0.4, "intermediate_size": 1024, **WIDTH}
QUERY_VALUE = ["q_proj", "v_proj"]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
JOB: dict[str, object] = {
    "schema": 1,
    "cluster": "1xA100-SXM-80GB",
    "engine": {"name": "single"},
    "stack": "litgpt",
    "stack_version": "2024-04-26",
    "precision": "bf16",
    "optimizer": {"name": "adamw", "impl": "foreach"},
    "grad_clip": False,
}


def _estimate(**keys: Any) -> ullage.Estimate:
    return ullage.estimate(read_job({**JOB, **keys}))


@pytest.mark.parametrize(
    ("model", "targets", "micro_batch", "recompute", "traced_bytes"),
    [
        # a step of litgpt's GPT at 5895df1 in its loop (lm_head_chunk_size=128, Fabric's fp32 output), traced on fake tensors
        (LLAMA, QUERY_VALUE, 1, "none", 28_862_464),
        (LLAMA, QUERY_VALUE, 2, "none", 50_032_128),
        (LLAMA, QUERY_VALUE, 2, "full", 24_510_464),
        (GROUPED, EVERY, 1, "none", 32_801_792),
        (GROUPED, EVERY, 2, "none", 57_958_912),
        (NEOX, ["query_key_value"], 1, "none", 22_440_448),
        (NEOX, ["query_key_value"], 2, "full", 21_232_128),
        (FALCON, ["query_key_value"], 2, "none", 32_210_944),
        (FALCON, ["query_key_value"], 2, "full", 19_286_016),
        (GEMMA, EVERY, 2, "none", 68_645_376),
        (PHI, QUERY_VALUE, 1, "none", 22_444_544),
    ],
)
def test_a_step_is_what_litgpt_s_own_modules_take(
    model: dict[str, object], targets: list[str], micro_batch: int, recompute: str, traced_bytes: int
) -> None:
    found = _estimate(
        model=model,
        recompute=recompute,
        data={"seq_len": 384, "micro_batch": micro_batch},
        loss={"kind": "chunked", "chunks": 3},
        lora={"rank": 8, "dropout": 0.1, "targets": targets},
    )
    libraries = sum(line.bytes for line in found.ledger if line.category == "workspace")
    assert found.peak.allocated_bytes - libraries == pytest.approx(traced_bytes, rel=0.006)


LLAMA_2 = {"base": "llama-2-7b", "tie_word_embeddings": False}
LLAMA_3 = {"base": "llama-3-8b", "tie_word_embeddings": False}
TABLE_OF_2023 = {"data": {"seq_len": 1304, "micro_batch": 1, "grad_accum": 128}, "stack_version": "2023-10-16"}


@pytest.mark.parametrize(
    ("keys", "lora", "gb", "within"),
    [
        # tutorials/resource-tables.md at 2685705: torch.cuda.max_memory_allocated, A100 40 GB
        ({"model": LLAMA_2, **TABLE_OF_2023}, {"rank": 8, "dropout": 0.05}, 21.30, 0.005),
        ({"model": LLAMA_2, **TABLE_OF_2023}, {"rank": 8, "dropout": 0.05, "base": "nf4"}, 14.14, 0.005),
        # config_hub/finetune/README.md at 2685705: llama-2-7b and llama-3-8b, lora.yaml and qlora.yaml
        ({"model": LLAMA_2, "data": {"seq_len": 512, "micro_batch": 2}}, {"rank": 32, "dropout": 0.05}, 19.77, 0.005),
        ({"model": LLAMA_3, "data": {"seq_len": 512, "micro_batch": 1}}, {"rank": 32, "dropout": 0.05}, 19.73, 0.005),
        (
            {"model": LLAMA_3, "data": {"seq_len": 512, "micro_batch": 2}},
            {"rank": 32, "dropout": 0.05, "base": "nf4"},
            17.41,
            0.005,
        ),
    ],
)
def test_published_peaks(keys: dict[str, Any], lora: dict[str, object], gb: float, within: float) -> None:
    tokens = keys["data"]["seq_len"]
    packed = lora.get("base") == "nf4"
    found = _estimate(
        **{**keys, "cluster": "1xA100-SXM-40GB"},
        loss={"kind": "chunked", "chunks": -(-tokens // 128)},
        lora=lora,
        optimizer="paged-adamw" if packed else {"name": "adamw", "impl": "foreach"},
    )
    assert found.peak.allocated_bytes == pytest.approx(gb * 1e9, rel=within)


@pytest.mark.parametrize(("micro_batch", "gb"), [(1, 22.18), (2, 22.47)])
def test_fsdp1_makes_gradients_of_what_is_frozen(micro_batch: int, gb: float) -> None:
    """tutorials/resource-tables.md at 2685705, Llama 2 7B on two GPUs: each Block's flat parameter holds base and adapters, and Fabric
    reduces none of its gradients before the last micro-batch."""
    found = _estimate(
        model=LLAMA_2,
        cluster="2xA100-SXM-40GB",
        data={"seq_len": 1304, "micro_batch": micro_batch, "grad_accum": 64 // micro_batch},
        engine={"name": "fsdp1", "zero_stage": 3},
        recompute="full",
        stack_version="2023-10-16",
        loss={"kind": "chunked", "chunks": 11},
        lora={"rank": 8, "dropout": 0.05, "targets": QUERY_VALUE},
    )
    assert found.trainable_parameters == 4_194_304
    assert found.peak.allocated_bytes == pytest.approx(gb * 1e9, rel=0.01)


def test_a_joined_projection_by_itself_means_queries_and_values() -> None:
    """litgpt's own default; beside every other linear all three parts are meant."""
    alone = _estimate(model=NEOX, data={"seq_len": 256}, lora={"targets": ["query_key_value"]})
    named = _estimate(model=NEOX, data={"seq_len": 256}, lora={"targets": ["q_proj", "v_proj"]})
    whole = _estimate(model=NEOX, data={"seq_len": 256}, lora={"targets": "all-linear"})
    assert alone.trainable_parameters == named.trainable_parameters == 4 * 8 * (2 * 256 + 2 * 256)
    assert whole.trainable_parameters == 4 * 8 * (3 * 256 + 3 * 256 + 2 * 256 + 2 * (256 + 1024))


def test_what_is_no_linear_of_it_is_refused() -> None:
    with pytest.raises(InvalidInput, match="is no linear of this model"):
        _estimate(model=LLAMA, data={"seq_len": 256}, lora={"targets": ["query"]})


def test_only_old_releases_leave_inputs_of_4_bit_linears_behind() -> None:
    lora = {"targets": QUERY_VALUE, "base": "nf4"}
    new, old = (
        _estimate(model=LLAMA, data={"seq_len": 384}, lora=lora, stack_version=version)
        for version in ("2025-01-01", "2024-04-26")
    )
    kept = "input of a 4-bit linear, of the micro-batch before"
    assert not any(line.what == kept for line in new.ledger)
    assert sum(line.bytes for line in old.ledger if line.what == kept) == 2 * 384 * (4 * (3 * 256 + 688) + 256)


def test_fsdp1_flattens_one_type_alone() -> None:
    """torch distributed/fsdp/_flat_param.py refuses frozen parameters beside trained ones without use_orig_params."""
    unwrapped = {"use_orig_params": True, "auto_wrap_policy": "fsdp_auto_wrap_policy of PEFT"}
    for options in ({"use_orig_params": False}, unwrapped):
        with pytest.raises(Unsupported) as raised:
            _estimate(
                model=LLAMA,
                cluster="2xA100-SXM-40GB",
                layout={"dp": 2},
                engine={"name": "fsdp1", "options": options},
                stack_version=None,
                data={"seq_len": 128},
                lora={"rank": 8, "targets": QUERY_VALUE},
            )
        assert raised.value.key == "lora"


@pytest.mark.parametrize(
    ("stack", "model"),
    [
        ("litgpt", "gpt2"),
        ("litgpt", "opt-1.3b"),
        ("litgpt", "bloom-560m"),
        ("litgpt", "llama-4-scout-17b-16e"),
        ("torchtune", "llama-4-scout-17b-16e"),
        ("torchtune", "stablelm-3b"),
        ("unsloth", "olmo-2-7b"),
    ],
)
def test_a_stack_that_has_no_such_model_says_so(stack: str, model: str) -> None:
    job = {"model": model, "cluster": "1xA100-SXM-80GB", "data": {"seq_len": 512}, "engine": {"name": "single"}}
    adapted = {"lora": {"rank": 8, "targets": "all-linear"}} if stack == "unsloth" else {}
    with pytest.raises(Unsupported, match=rf"stack = {stack}: has no model of type .*use stack transformers"):
        ullage.estimate(read_job({**job, **adapted, "stack": stack, "precision": "bf16"}))


def test_parameters_of_other_names_are_not_frozen_by_transformers_s() -> None:
    job = {
        "model": "tinyllama-1.1b",
        "cluster": "1xA100-SXM-80GB",
        "data": {"seq_len": 512},
        "engine": {"name": "single"},
    }
    lora = {"rank": 8, "targets": ["q_proj", "v_proj"]}
    with pytest.raises(Unsupported, match=r"freeze = \*norm\*: is not modelled in stack litgpt"):
        ullage.estimate(read_job({**job, "stack": "litgpt", "lora": lora, "freeze": ["*norm*"]}))
