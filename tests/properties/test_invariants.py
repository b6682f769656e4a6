"""Laws that every estimate obeys, whatever the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.jobs import ENGINES, job, jobs

from ullage.api import estimate
from ullage.engines.registry import account, ranks_of
from ullage.job.job import Job
from ullage.memory.program import events, net
from ullage.model.build import graph

SLOW = settings(max_examples=60, deadline=None)
STATES = ("parameters", "gradients", "optimizer")


def peak_bytes(one: Job) -> int:
    """Allocated bytes of the worst rank."""
    model = graph(one.model)
    return max(account(one, model, rank).program.peak_bytes for rank in ranks_of(one, model))


@SLOW
@given(jobs())
def test_the_closed_form_equals_the_replay(one: Job) -> None:
    model = graph(one.model)
    for rank in ranks_of(one, model):
        program = account(one, model, rank).program
        live = peak = 0
        for event in events(program):
            live += event.item.bytes if event.alive else -event.item.bytes
            assert live >= 0
            peak = max(peak, live)
        assert (peak, live) == (program.peak_bytes, program.delta_bytes)


@SLOW
@given(jobs())
def test_a_step_leaves_nothing_behind(one: Job) -> None:
    model = graph(one.model)
    for rank in ranks_of(one, model):
        assert not net(account(one, model, rank).step)


@SLOW
@given(jobs())
def test_the_ledger_adds_up_to_the_byte(one: Job) -> None:
    found = estimate(one)
    assert sum(line.bytes for line in found.ledger) == found.peak.allocated_bytes
    assert found.peak.allocated_bytes <= found.peak.reserved_bytes <= found.peak.device_bytes
    assert found.peak.low_bytes <= found.peak.device_bytes <= found.peak.high_bytes


@SLOW
@given(jobs())
def test_what_fits_has_its_high_bound_below_the_capacity(one: Job) -> None:
    found = estimate(one)
    assert (found.verdict == "fits") == (found.peak.high_bytes < found.capacity_bytes)


@SLOW
@given(jobs(), st.sampled_from(["seq_len", "micro_batch"]))
def test_a_longer_sequence_or_a_larger_batch_never_needs_less(one: Job, key: str) -> None:
    larger = replace(one, data=replace(one.data, **{key: 2 * getattr(one.data, key)}))
    assert peak_bytes(larger) >= peak_bytes(one)


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine["name"] != "single"], ids=str)
def test_more_data_parallelism_never_means_more_states(engine: dict[str, object]) -> None:
    sizes = []
    for dp in (1, 2, 4, 8):
        one = job(engine, layout={"dp": dp}, data={"seq_len": 256})
        model = graph(one.model)
        (rank,) = ranks_of(one, model)
        static = account(one, model, rank).static
        sizes.append(sum(item.bytes * count for item, count in static if item.category in STATES))
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_pipeline_ranks_hold_the_whole_model_once(stages: int) -> None:
    one = job({"name": "megatron"}, layout={"pp": stages}, data={"seq_len": 256, "grad_accum": 8})
    model = graph(one.model)
    assert sum(rank.numel() for rank in ranks_of(one, model)) == model.parameter_count()


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_sharded_states_add_up_to_the_whole_ones_and_their_padding(dp: int) -> None:
    def optimizer_bytes(degree: int) -> int:
        one = job({"name": "megatron", "zero_stage": 1}, layout={"dp": degree}, data={"seq_len": 256})
        model = graph(one.model)
        (rank,) = ranks_of(one, model)
        return sum(item.bytes for item, _ in account(one, model, rank).static if item.category == "optimizer")

    whole, sharded = optimizer_bytes(1), dp * optimizer_bytes(dp)
    tensors = 3 * 100  # three states of fewer than a hundred tensors, each rounded up to 512 bytes on each rank
    assert 0 <= sharded - whole <= tensors * dp * 512


@SLOW
@given(jobs())
def test_groups_of_one_rank_do_not_communicate(one: Job) -> None:
    model = graph(one.model)
    for rank in ranks_of(one, model):
        assert all(size > 1 for _, size, _ in account(one, model, rank).groups)
