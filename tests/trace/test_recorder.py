"""The recorder on small runs whose account can be written down."""

import gc

import pytest
import torch
from tests.trace import factories
from torch import nn

from ullage.memory.ledger import by_category
from ullage.trace.hooks import watching
from ullage.trace.recorder import COLLECT_EVERY, Recorder
from ullage.trace.run import record, trace

WEIGHT = 256 * 256 * 4


def test_the_ledger_adds_up_at_every_mark() -> None:
    found = trace(factories.mlp)
    for mark in found.marks:
        assert sum(line.bytes for line in found.ledger(mark.at)) == found.live_bytes(mark.at)
    peak = found.steady
    assert sum(line.bytes for line in found.ledger(peak.at)) == peak.bytes


def test_phases_come_in_order_and_nothing_is_left_behind() -> None:
    found = trace(factories.mlp)
    assert [str(mark) for mark in found.marks if mark.step == 2] == [
        "step 2: forward", "step 2: backward", "step 2: between", "step 2: optimizer", "step 2: between",
    ]  # fmt: skip
    first, second = found.span(2)
    assert found.live_bytes(second - 1) == found.live_bytes(first - 1)


def test_what_a_linear_keeps() -> None:
    found = trace(factories.accumulating)
    account = by_category(found.ledger(found.span(2, "optimizer")[0] - 1))
    assert account == {"parameters": WEIGHT, "gradients": WEIGHT, "input": 4 * 256 * 4}
    saved = [one for one in found.allocations if one.category == "gradients"]
    assert {one.name for one in saved} == {"weight"}
    assert len(saved) == 2  # one a step: later micro-batches add to it


def test_states_appear_in_the_first_step() -> None:
    found = trace(factories.mlp)
    states = [one for one in found.allocations if one.category == "optimizer"]
    assert {one.phase for one in states} == {"step 1: optimizer"}
    assert {one.name for one in states} >= {"0.weight.exp_avg", "2.bias.exp_avg_sq"}


def test_modules_of_forward_and_backward() -> None:
    found = trace(factories.mlp)
    first, last = found.span(2, "backward")
    backward = {one.module: one.op for one in found.allocations if first < one.birth <= last and one.module}
    assert backward["1"] == "aten.gelu_backward"
    assert found.saved()["0"] == 4 * 128 * 4


def test_a_resize_ends_one_life_and_begins_another() -> None:
    recorder = Recorder()
    with recorder, watching(recorder):
        tensor = torch.empty(1000)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4000)
        tensor.untyped_storage().resize_(4000)
        del tensor
    found = recorder.trace("resized")
    assert [(one.bytes, one.shape, one.birth, one.death) for one in found.allocations] == [
        (4096, (1000,), 1, 2),
        (4096, (1000,), 3, 4),
    ]


def test_sizes_are_rounded_and_views_are_no_allocations() -> None:
    recorder = Recorder()
    with recorder, watching(recorder):
        tensor = torch.zeros(3)
        view = tensor[1:].view(2, 1)
        tensor.add_(1)
    assert [one.bytes for one in recorder.trace("views").allocations] == [512]
    assert view.numel() == 2


def test_each_birth_and_each_death_has_a_time_of_its_own() -> None:
    recorder = Recorder()
    with recorder:
        for _ in range(COLLECT_EVERY):
            cycle: list[object] = [torch.empty(1000)]
            cycle.append(cycle)  # goes in a collection, which a later birth begins
    found = recorder.trace("")
    times = [time for one in found.allocations for time in (one.birth, one.death) if time is not None]
    assert any(one.death is not None for one in found.allocations)
    assert len(set(times)) == len(times)


def test_a_gap_in_torch_is_said() -> None:
    assert "recurrent kernels" in trace(factories.recurrent).notes[0]
    assert not trace(factories.mlp).notes


def test_everything_is_put_back() -> None:
    before = (nn.Module.__call__, torch.autograd.backward, torch.UntypedStorage.resize_, nn.functional.dropout)
    trace(factories.mlp)
    with pytest.raises(Exception, match="no such thing"):
        trace(factories.raises)
    assert before == (nn.Module.__call__, torch.autograd.backward, torch.UntypedStorage.resize_, nn.functional.dropout)


def test_a_recorder_runs_real_tensors_too() -> None:
    recorder = Recorder()
    with recorder, watching(recorder):
        found = record(recorder, factories.mlp)
    assert found.steady.bytes == trace(factories.mlp, like="cpu").steady.bytes


def test_cuda_choices_are_taken_by_default() -> None:
    like_cuda, like_cpu = trace(factories.mlp), trace(factories.mlp, like="cpu")
    assert any(one.op.startswith("aten._foreach") for one in like_cuda.allocations)
    assert not any(one.op.startswith("aten._foreach") for one in like_cpu.allocations)


class _OwnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1.0 * gradient


def _backward_ops(forward) -> list[str]:
    """The ops that allocate in the backward of a weight's function."""

    def factory():
        weight = nn.Linear(8, 8, bias=False)

        def step():
            forward(weight.weight * 1.5).sum().backward()
            weight.zero_grad()

        return weight, None, step

    found = trace(factory, like="cpu")
    start, stop = found.span(2, "backward")
    return [one.op for one in found.allocations if start <= one.birth < stop]


def test_gradients_are_added_in_place_where_nobody_else_holds_the_first() -> None:
    def shared(value):
        older, younger = value.sin(), value.cos()
        return (value + older) * 3.0 + younger

    assert "aten.add" not in _backward_ops(lambda value: value.sin() + value.cos() + value.exp())
    assert _backward_ops(shared).count("aten.add") == 1  # beside the inner sum's gradient, for which older still waits


def test_an_index_writes_its_gradient_into_zeros() -> None:
    assert "aten.index_put" not in _backward_ops(lambda value: value[torch.tensor([1, 0, 2])])


def test_a_sum_in_a_backward_of_ones_own_is_a_tensor() -> None:
    assert "aten.add" in _backward_ops(_OwnSum.apply)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_heap_that_a_caller_has_frozen_stays_so(frozen: bool) -> None:
    gc.unfreeze()
    if frozen:
        gc.freeze()
    try:
        trace(factories.mlp)
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()  # as tests/conftest.py has it
