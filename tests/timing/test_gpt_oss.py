"""What gpt-oss adds around its experts in Megatron."""

from __future__ import annotations

import pytest
from tests.timing.layers import GPT_OSS, MIXTRAL, in_megatron, layer_works

from ullage.job.read import read_job
from ullage.timing.work import OpWork

TOKENS, HIDDEN, FFN, TOP_K = 1024, 2880, 2880, 4
ROWS = TOP_K * TOKENS


def _works(**options: object) -> dict[str, OpWork]:
    return layer_works(in_megatron(GPT_OSS, **options))


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


def test_rotary_embedding_is_not_fused_where_it_is_scaled() -> None:
    """YaRN's factor keeps Megatron from Transformer Engine's kernel (models/common/embeddings/rope_utils.py): 24 and 28 bytes an element,
    as torch's ops read and write them, against 4 of the kernel."""
    works = _works()
    for name, heads in (("rope.q", 64), ("rope.k", 8)):
        (there,), (back,) = works[name].forward.traffic, works[name].backward.traffic
        assert (there.bytes, back.bytes) == (24 * TOKENS * heads * 64, 28 * TOKENS * heads * 64)
    plain = layer_works(read_job(GPT_OSS | {"model": MIXTRAL, "engine": {"name": "megatron", "zero_stage": 1}}))
    assert [one.bytes for one in plain["rope.q"].forward.traffic] == [4 * TOKENS * 16 * 128]
