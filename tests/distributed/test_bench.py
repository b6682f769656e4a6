"""What two processes measure of the links between them."""

from __future__ import annotations

import pytest
from tests.bench.small import SMALL, measured
from tests.distributed.world import run

pytestmark = pytest.mark.xdist_group("measured")
TIMEOUT_S = 120.0


def test_two_ranks_measure_collectives_together() -> None:
    first, other = run(measured, (), ranks=2, timeout_s=TIMEOUT_S)
    assert other is None
    assert first.processes == 2
    assert 0 <= first.overlap <= 1
    assert [one.kind for one in first.collectives] == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    for one in first.collectives:
        assert one.ranks == 2
        assert one.payload_bytes == SMALL.payload_bytes
        assert 0 < one.seconds[0] <= one.seconds[1]
