"""What gpt-oss adds around its experts in Megatron."""

from __future__ import annotations

import pytest
from tests.timing.layers import GPT_OSS, in_megatron, layer_works

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
