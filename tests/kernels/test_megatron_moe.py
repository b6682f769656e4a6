"""How tokens reach their experts and come back: which steps, and how many rows each makes."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines.base import context_of
from ullage.engines.megatron.buffers import buffers, workspaces
from ullage.engines.registry import ranks_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels.stacks import lower
from ullage.kernels.step import Context, Step

SEQ, HIDDEN, EXPERTS, TOP_K = 1000, 4096, 8, 2
ROW_BYTES = 2 * HIDDEN  # bf16


def job(**layout: Any):
    options, version = layout.pop("options", {}), layout.pop("stack_version", "0.18.0")
    return read_job(
        {
            "stack_version": version,
            "model": {"base": "mixtral-8x7b", "num_hidden_layers": 2},
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


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("version", "options", "kept"),
    [
        ("0.18.0", {}, False),
        ("0.18.0", {"deterministic_mode": True}, True),
        ("0.18.0", {"deterministic_mode": True, "moe_permute_fusion": True}, False),
        ("0.14.0", {"deterministic_mode": True}, False),
        ("0.12.0", {}, True),
    ],
)
def test_what_the_sum_over_experts_keeps(version: str, options: dict[str, Any], kept: bool, dispatcher: str) -> None:
    """moe_utils.py, unpermute: since 0.15.0 index_add_ where it must be deterministic, scatter_add_ otherwise; token_dispatcher.py of
    0.12.0: hidden_states * permuted_probs, for whose gradient both are kept."""
    _, steps = moe(ep=4, stack_version=version, options={"moe_token_dispatcher_type": dispatcher, **options})
    name = "unpermute" if dispatcher == "allgather" else "combine"
    (step,) = [one for one in steps if one.name == name]
    rows_of_tokens, _ = step.reads
    assert step.saves == ((rows_of_tokens,) if kept else ())


def test_torch_keeps_the_source_of_index_add_and_not_of_scatter_add() -> None:
    torch = pytest.importorskip("torch")
    rows, where = torch.ones(3, 2, requires_grad=True), torch.tensor([0, 0, 1])
    added = torch.zeros(2, 2).index_add_(0, where, rows)
    scattered = torch.zeros(2, 2).scatter_add_(0, where.unsqueeze(1).expand(-1, 2), rows)
    assert added.grad_fn._saved_source.equal(rows)
    assert not hasattr(scattered.grad_fn, "_saved_src")


def test_experts_were_activated_without_their_weights_before() -> None:
    """moe/experts.py of 0.12.0, TEGroupedMLP.forward: bias_swiglu_impl, which no probabilities reach."""

    def activations(version: str) -> list[str]:
        found = job(ep=4, stack_version=version, options={"bias_swiglu_fusion": False})
        graph = graph_of(found)
        layer = next(run.block for run in graph.runs if run.block.role == "layer")
        return [step.name for step in lower(layer, context_of(found, graph)) if "act" in step.name.split(".")]

    assert activations("0.13.0") == ["experts.act.act", "experts.act"]
    assert activations("0.12.0") == ["experts.act.gate", "experts.act"]


@pytest.mark.parametrize(
    ("version", "implementation", "pp", "torchs", "engines"),
    [
        ("0.13.0rc0", "transformer_engine", 1, 2, 1),
        ("0.18.0", "transformer_engine", 1, 2, 1),
        ("0.18.0", "transformer_engine", 2, 0, 1),  # of the first stage: no head
        ("0.13.0rc0", "transformer_engine", 2, 2, 1),
        ("0.18.0", "local", 1, 2, 1),
        ("0.13.0rc0", "local", 1, 2, 0),
    ],
)
def test_the_router_multiplies_in_transformer_engine(
    version: str, implementation: str, pp: int, torchs: int, engines: int
) -> None:
    """moe_utils.py, RouterGatingLinearFunction (0f058666a8, June 2025): te_general_gemm wherever it is installed. Megatron-LM's test
    gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel, of local layers, has 28 MiB more on an H100 than on an A100: TE's workspaces."""
    found = job(stack_version=version, pp=pp, options={"transformer_impl": implementation})
    graph = graph_of(found)
    names = [item.what for item in workspaces(found, ranks_of(found, graph)[0])]
    assert sum("cuBLAS" in name for name in names) == torchs
    assert sum("Transformer Engine" in name for name in names) == engines
