"""What is permuted on the way to experts and back."""

from __future__ import annotations

import pytest
from tests.timing.layers import MIXTRAL, in_megatron, layer_works

from ullage.job.job import Job

TOKENS, HIDDEN, TOP_K, RANKS = 1024, 2048, 2, 4
ROW = 2 * HIDDEN
JOB = {
    "model": MIXTRAL,
    "cluster": "8xH100-SXM-80GB",
    "stack": "megatron",
    "data": {"seq_len": TOKENS, "micro_batch": 1},
}


def _job(layout: dict[str, object], **options: object) -> Job:
    return in_megatron(JOB | {"layout": layout}, **options)


def _exchanged(backend: str) -> list[list[tuple[str, int]]]:
    return _sent(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)


def _sent(name: str = "dispatch", **options: object) -> list[list[tuple[str, int]]]:
    work = layer_works(_job({"dp": 8, "ep": RANKS}, **options))[f"{name} exchange"]
    return [[(one.kind, one.payload_bytes) for one in way.exchanges] for way in (work.forward, work.backward)]


def _moved(ep: int, dispatcher: str) -> dict[str, list[tuple[int, ...]]]:
    job = _job({"dp": 8, "ep": ep}, moe_token_dispatcher_type=dispatcher)
    works = layer_works(job)
    names = [name for name in ("permute", "sort", "unsort", "combine") if name in works]
    return {
        name: [tuple(one.bytes for one in way.traffic) for way in (works[name].forward, works[name].backward)]
        for name in names
    }


ROWS = TOP_K * TOKENS * ROW
SOME = TOKENS * ROW
ARRIVED = round(ROWS * RANKS * (1 - (1 - 1 / RANKS) ** TOP_K) / TOP_K)
"""Of a token's two experts both may be on one rank, which gets it once."""


def test_an_all_to_all_sends_counts_and_probabilities_beside_its_rows() -> None:
    """token_dispatcher.py: counts of 8 experts on each of 4 ranks, int64; rows; a probability of each, in the type of the router's logits,
    whose gradients come back likewise. The way from the experts has rows alone, and rows padded to a capacity need no counts."""
    rows = ("all_to_all", ROWS)
    weights = ("all_to_all", 2 * TOP_K * TOKENS)
    counts = ("all_gather", 8 * RANKS * 8)
    assert _sent() == [[counts, rows, weights], [rows, weights]]
    assert _sent("combine") == [[rows], [rows]]
    wide = _sent(moe_router_dtype="fp32")[1]
    assert wide == [rows, ("all_to_all", 4 * TOP_K * TOKENS)]
    padded = _sent(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    assert [kind for kind, _ in padded[0]] == ["all_to_all"] * 2


def test_an_all_to_all_permutes_what_it_sends_and_sorts_what_comes() -> None:
    moved = _moved(RANKS, "alltoall")
    assert moved["sort"][0] == moved["unsort"][0] == (2 * ROWS,)
    assert moved["permute"][0][0] == moved["combine"][0][0] == pytest.approx(SOME + ROWS, rel=0.01)


def test_deepep_permutes_once_what_has_come() -> None:
    moved = _moved(RANKS, "flex")
    assert moved["sort"] == moved["unsort"] == [(ARRIVED + ROWS,), (ARRIVED + ROWS,)]
    assert moved["permute"] == moved["combine"] == [(0,), (0,)]


def test_one_expert_a_rank_is_permuted_all_the_same() -> None:
    arrived = round(ROWS * 8 * (1 - (1 - 1 / 8) ** TOP_K) / TOP_K)
    moved = _moved(8, "flex")
    assert moved["permute"][0] == moved["combine"][0] == (arrived + ROWS,)


def test_hybrid_ep_gathers_where_tokens_go_before_it_sends_them() -> None:
    """DeepEP's hybrid-ep branch, HybridEPBuffer.dispatch: a torch.bool for each token of the group and each of its experts."""
    forward, backward = _exchanged("hybridep")
    sent, *others = _exchanged("deepep")
    assert forward == [("all_gather", RANKS * TOKENS * 8), *sent]
    assert [backward] == others


EIGHT_BITS = {"precision": {"params": "bf16", "compute": "fp8", "grads": "fp32", "master": "fp32", "reduce": "fp32"}}


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ({}, True),
        ({"moe_router_padding_for_fp8": True}, False),
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}, False),
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}, True),
        ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, False),  # 1,024 rows each
    ],
)
def test_rows_are_padded_for_eight_bits(options: dict[str, object], copied: bool) -> None:
    """Megatron-Core moe/experts.py, quantization_padding and quantization_unpadding: the rows read and written before the experts' first
    linear and after their second, and so their gradients."""
    job = JOB | EIGHT_BITS | {"layout": {"dp": 8, "ep": RANKS}}
    works = layer_works(in_megatron(job, **({"fp8": "hybrid", "fp8_recipe": "tensorwise"} | options)))
    names = ("experts.padding", "experts.unpadding") if copied else ()
    assert {name for name in works if "padding" in name} == set(names)
    for name in names:
        assert [one.bytes for one in works[name].forward.traffic] == [2 * ROWS]
        assert works[name].backward == works[name].forward


def test_rows_of_sixteen_bits_are_not_padded() -> None:
    assert not [name for name in layer_works(_job({"dp": 8, "ep": RANKS})) if "padding" in name]
