"""What gpt-oss adds around its experts in Megatron."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.ops import block_work
from ullage.timing.work import OpWork

TOKENS, HIDDEN, FFN, TOP_K = 1024, 2880, 2880, 4
JOB = {
    "model": {
        "model_type": "gpt_oss",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 128,
        "num_experts_per_tok": TOP_K,
        "sliding_window": 128,
    },
    "cluster": "8xB200-SXM-180GB",
    "stack": "megatron",
    "layout": {"dp": 8, "ep": 8},
    "data": {"seq_len": TOKENS, "micro_batch": 1},
}
ROWS = TOP_K * TOKENS


def _works(**options: object) -> dict[str, OpWork]:
    job = read_job(JOB | {"engine": {"name": "megatron", "zero_stage": 1, "options": options}})
    graph = graph_of(job)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    return {work.name: work for work in block_work(layer, context_of(job, graph))}


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        # b * p written; added to a row that is read, written; joined: read and written. Back: the split's parts joined, two products, sums.
        ({}, 2 + (2 + 2 + 2) + 4, 4 + 2 * (4 + 2)),
        # The same in fp32, and cast back; forward and backward.
        ({"moe_router_dtype": "fp32"}, 4 + (2 + 4 + 4) + 8 + (4 + 2), (4 + 2) + (4 + 2) + 4 + 2 * (8 + 4)),
    ],
)
def test_a_bias_of_experts_is_added_row_by_row(options: dict[str, object], forward: int, backward: int) -> None:
    work = _works(**options)["experts.down_proj.bias"]
    (there,), (back,) = work.forward.traffic, work.backward.traffic
    assert (there.bytes, back.bytes) == (forward * ROWS * HIDDEN, backward * ROWS * HIDDEN)


def test_gate_and_up_are_clamped_before_the_fused_kernel() -> None:
    """Read and written by clamps, read and written by their joining; back through clamps (gradient and input read), and joined."""
    work = _works()["experts.act.clamp"]
    assert [one.bytes for one in work.forward.traffic] == [8 * ROWS * 2 * FFN]
    assert [one.bytes for one in work.backward.traffic] == [10 * ROWS * 2 * FFN]
