"""Seconds of a model of which a part is trained: what is not asked for is not run."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines.base import context_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.model.count import flops_per_token
from ullage.timing.ops import block_work
from ullage.timing.step import step_time

MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TOKENS = 2 * 512
LINEARS = 4 * 1024 * 1024 + 3 * 1024 * 2816


def _job(**keys: Any) -> Job:
    return read_job(
        {
            "schema": 1,
            "model": MODEL,
            "cluster": "1xH100-SXM-80GB",
            "engine": {"name": "single"},
            "precision": "bf16",
            "data": {"seq_len": 512, "micro_batch": 2},
            **keys,
        }
    )


def _matmul_flops(job: Job, layer: int) -> tuple[int, int]:
    """Of one layer, forward and backward."""
    graph = graph_of(job)
    block = [one for one in graph.blocks() if one.role == "layer"][layer]
    work = block_work(block, context_of(job, graph))
    return tuple(
        sum(one.flops for each in work for one in getattr(each, way).matmuls) for way in ("forward", "backward")
    )  # type: ignore[return-value]


def test_a_frozen_linear_has_no_gradient_of_its_weight() -> None:
    job = _job(lora={"rank": 8, "targets": ["q_proj", "v_proj"]})
    adapters = 2 * 2 * 8 * 1024  # weights of two adapters
    forward, backward = _matmul_flops(job, 1)
    assert forward == 2 * TOKENS * (LINEARS + adapters)
    assert backward == 2 * TOKENS * (LINEARS + 2 * adapters)


def test_nothing_before_the_first_adapter_has_a_gradient() -> None:
    """The first layer's input asks for none: what leads from it to the adapters' outputs is not run backwards."""
    job = _job(lora={"rank": 8, "targets": ["q_proj", "v_proj"]})
    adapters = 2 * 2 * 8 * 1024
    into_adapters = 2 * 8 * 1024  # A's own input's gradient
    frozen_inputs = 3 * 1024 * 1024  # q, k and v of the embedding's output
    _, backward = _matmul_flops(job, 0)
    assert backward == 2 * TOKENS * (LINEARS - frozen_inputs + 2 * adapters - into_adapters)


def test_an_adapter_in_fp32_multiplies_in_fp32_and_a_packed_weight_is_unpacked() -> None:
    def seconds(**lora: object) -> float:
        return step_time(_job(lora={"targets": "all-linear", **lora})).step_s

    assert seconds(dtype="fp32") > seconds(dtype="bf16")
    assert seconds(base="nf4", dtype="bf16") > seconds(dtype="bf16")


def test_a_trained_whole_takes_longer_and_counts_more() -> None:
    whole, adapted = _job(), _job(lora={"rank": 8, "dtype": "bf16"})
    assert step_time(adapted).step_s < 0.85 * step_time(whole).step_s
    weights = 4 * LINEARS + 8192 * 1024
    adapters = 4 * 2 * 2 * 8 * 1024
    attention = 4 * 6 * 2 * 1024 * 512
    assert flops_per_token(graph_of(whole), 512) == 6 * weights + attention
    assert flops_per_token(graph_of(adapted), 512) == 4 * weights + 6 * adapters + attention


def test_a_frozen_front_is_timed_too() -> None:
    assert step_time(_job(freeze=["model.layers.0.*", "*embed_tokens*"])).step_s < step_time(_job()).step_s


@pytest.mark.parametrize(
    "keys", [{"engine": {"name": "fsdp2"}, "cluster": "2xH100-SXM-80GB"}, {"lora": {"dora": True}}]
)
def test_what_is_not_timed_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="is not timed"):
        step_time(_job(**{"lora": {}, **keys}))
