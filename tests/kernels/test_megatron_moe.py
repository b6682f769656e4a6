"""How tokens reach their experts and come back: which steps, and how many rows each makes."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines.base import context_of
from ullage.engines.megatron.buffers import buffers
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels.stacks import lower
from ullage.kernels.step import Context, Step

SEQ, HIDDEN, EXPERTS, TOP_K = 1000, 4096, 8, 2
ROW_BYTES = 2 * HIDDEN  # bf16


def job(**layout: Any):
    options = layout.pop("options", {})
    return read_job(
        {
            "model": {"base": "mixtral-8x7b", "num_hidden_layers": 1},
            "cluster": "2x8xH100-SXM-80GB",
            "data": {"seq_len": SEQ},
            "layout": layout,
            "engine": {"name": "megatron", "options": options},
        }
    )


def moe(**layout: Any) -> tuple[Context, list[Step]]:
    found = job(**layout)
    graph = graph_of(found)
    context = context_of(found, graph)
    layer = next(run.block for run in graph.runs if run.block.role == "layer")
    return context, [step for step in lower(layer, context) if step.module == "moe"]


WAY = [
    "dispatch",
    "permute",
    "all_to_all",
    "gather",
    "sort",
    "unsort",
    "unpermute",
    "reduce_scatter",
    "all_to_all_back",
    "combine",
]


def rows(steps: list[Step]) -> dict[str, float]:
    """Rows that each step on the way makes."""
    return {step.name: step.writes[0].bytes / ROW_BYTES for step in steps if step.name in WAY}


SENT = SEQ * TOP_K


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, {"permute": SENT, "combine": SEQ}),
        (
            {"ep": 4},
            {"permute": SENT, "all_to_all": SENT, "sort": SENT, "unsort": SENT, "all_to_all_back": SENT, "combine": SEQ},
        ),
        # One expert on a rank: nothing to sort.
        ({"ep": 8}, {"permute": SENT, "all_to_all": SENT, "all_to_all_back": SENT, "combine": SEQ}),
        # Two ranks hold halves of an expert: each computes the rows of both, and sends and receives its own.
        (
            {"ep": 8, "etp": 2, "tp": 2},
            {
                "permute": SENT,
                "all_to_all": SENT,
                "gather": 2 * SENT,
                "reduce_scatter": SENT,
                "all_to_all_back": SENT,
                "combine": SEQ,
            },
        ),
    ],
)  # fmt: skip
def test_the_way_to_experts_and_back(layout: dict[str, int], expected: dict[str, int]) -> None:
    assert rows(moe(**layout)[1]) == expected


def test_all_gather_sees_the_tokens_of_everybody() -> None:
    """They lie in the global gather buffer, so that the way there makes the experts' rows alone."""
    options = {"moe_token_dispatcher_type": "allgather"}
    context, steps = moe(ep=4, options=options)
    assert rows(steps) == {"dispatch": SENT, "unpermute": 4 * SEQ, "reduce_scatter": SEQ}
    (gradient,) = steps[1].backward_scratch
    assert gradient.bytes == 4 * SEQ * ROW_BYTES
    held = {item.what: item.bytes for item in buffers(job(ep=4, options=options), context)}
    assert held["global gather buffer (mpu)"] == pytest.approx(4 * SEQ * ROW_BYTES, rel=1e-4)
    alone, _ = moe(options=options)
    assert "global gather buffer (mpu)" not in {item.what for item in buffers(job(options=options), alone)}


def test_rows_are_filled_up_to_the_capacity() -> None:
    """Each of 8 experts takes ceil(2000 / 8 x 1.3) rows of a rank, whatever it was sent; cut off alone, balanced rows stay below that."""
    padded = {"moe_expert_capacity_factor": 1.3, "moe_pad_expert_input_to_capacity": True}
    assert rows(moe(ep=4, options=padded)[1])["sort"] == EXPERTS * 325
    assert rows(moe(ep=4, options={"moe_expert_capacity_factor": 1.3})[1])["sort"] == SENT
