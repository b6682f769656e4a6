"""A graph saves launches, not work: what it replays is what it was captured from, after a copy to the addresses that it knows."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.again import work_again
from ullage.timing.ops import block_work
from ullage.timing.work import OpWork

TOKENS, HIDDEN = 1024, 2048
JOB = {
    "model": "llama-3.2-1b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "megatron",
    "engine": {"name": "megatron", "zero_stage": 1, "options": {}},
    "recompute": {"modules": ["layernorm"]},
    "data": {"seq_len": TOKENS, "micro_batch": 1},
}
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"}


def _works(options: dict[str, object]) -> tuple[tuple[OpWork, ...], tuple[OpWork, ...]]:
    """What a layer does, and what its backward runs again."""
    engine = {"name": "megatron", "zero_stage": 1, "options": options}
    job = read_job(JOB | {"engine": engine})
    graph = graph_of(job)
    context = context_of(job, graph)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    return block_work(layer, context), work_again(layer, context, "selective", job.recompute, early_stop=False)


def test_a_graph_replays_the_kernels_that_it_was_captured_from() -> None:
    (launched, again), (replayed, again_replayed) = _works({}), _works(GRAPHS)
    *same, copied = replayed
    assert tuple(same) == launched
    assert again_replayed == again
    assert [one.bytes for one in copied.forward.traffic] == [2 * 2 * TOKENS * HIDDEN]  # read and written, bf16
    assert copied.backward == copied.forward


@pytest.mark.parametrize("scope", ["moe_router", ["mamba"]])
def test_what_is_not_captured_is_not_copied(scope: object) -> None:
    assert _works(GRAPHS | {"cuda_graph_scope": scope}) == _works({})
