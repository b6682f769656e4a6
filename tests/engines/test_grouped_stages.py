"""Blocks under one checkpoint at the start of a pipeline stage, whose input is its engine's."""

from __future__ import annotations

import pytest
from tests.properties.jobs import job

from ullage.api import estimate


@pytest.mark.parametrize("pp", [1, 2])
def test_a_group_leaves_its_input_to_whoever_gave_it(pp: int) -> None:
    """The allocator's simulation frees nothing that it never had (it did on the second stage), and reserves no less than is allocated."""
    found = estimate(
        job({"name": "fsdp2", "zero_stage": 2}, data={"seq_len": 128}, recompute={"sqrt": True}, layout={"pp": pp})
    )
    assert found.peak.reserved_bytes >= found.peak.allocated_bytes
