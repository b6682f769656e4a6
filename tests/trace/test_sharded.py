"""One rank of a world, through torch's fake process group, against what the libraries are known to keep."""

import math
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from tests.trace import factories

from ullage.memory.ledger import by_category
from ullage.trace.run import trace

P = 2 * 256 * 256  # elements of a block of factories.fsdp2; four blocks, and a root of P / 4
WORLD = 8


def test_fsdp2_at_its_peak() -> None:
    """In a block's backward: it and the root are gathered, the next is on its way, the one before is being reduced."""
    found = trace(factories.fsdp2, world=WORLD)
    account = by_category(found.ledger(found.steady.at))
    states = 4 * P + P // 4
    assert found.steady.phase == "step 2: backward"
    assert account["parameters"] == 4 * states // WORLD
    assert account["optimizer"] == 8 * states // WORLD + 9 * 512  # and a step count for each parameter
    assert account["gathered"] == 2 * (P + P // 4)
    assert account["communication"] == 2 * P + 4 * P
    assert account["gradients"] == 4 * 2 * P // WORLD


def test_fsdp2_frees_and_refills_what_it_gathers() -> None:
    found = trace(factories.fsdp2, world=WORLD)
    gathered = [one for one in found.allocations if one.category == "gathered" and one.name == "0.0.weight"]
    assert len(gathered) == 4  # forward and backward of two steps
    assert {one.bytes for one in gathered} == {2 * P // 2}
    assert any(one.stream for one in found.allocations if one.category == "communication")


def test_ddp_keeps_buckets_and_gradients() -> None:
    found = trace(factories.ddp, world=WORLD)
    numel = 4 * 256 * 256
    account = by_category(found.ledger(found.steady.at))
    assert found.steady.phase == "step 2: optimizer"
    assert account["communication"] == account["gradients"] == account["parameters"] == 4 * numel
    assert account["transient"] == 4 * numel + 0  # foreach's square roots: 24 bytes a parameter in all


def test_tensor_parallel_counts_no_tensor_of_the_global_shape() -> None:
    """DTensor learns a result's sharding on tensors of the global shape; beside a fake mode they pass through the recorder."""
    found = trace(factories.tensor_parallel, world=WORLD)
    local = 2 * 256 * 1024 * 4 // WORLD
    account = by_category(found.ledger(found.steady.at))
    assert account["parameters"] == account["gradients"] == account["transient"] == local
    whole = 256 * 1024 * 4
    assert all(one.bytes < whole for one in found.allocations if one.phase.startswith("step"))


def test_gradients_of_dtensors_are_added_out_of_place() -> None:
    """autograd adds in place to no tensor subclass (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace), in a run neither."""
    plain, distributed = (trace(partial(factories.read_twice, wrapped), world=WORLD) for wrapped in (False, True))
    for found, sums in ((plain, 0), (distributed, 1)):
        start, stop = found.span(2, "backward")
        assert [one.op for one in found.allocations if start <= one.birth < stop].count("aten.add") == sums


@pytest.mark.parametrize("factory", [factories.fsdp2])
def test_torch_tracker_sees_the_same_peak(factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own FSDPMemTracker, a second judge."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    from ullage.trace.run import _process_group

    ours = trace(factory, world=WORLD)  # first: DTensor then knows its shardings, and the tracker sees no phantoms
    with _process_group(0, WORLD), ExitStack() as stack:
        mesh = factories._mesh()
        monkeypatch.setattr(factories, "_mesh", lambda: mesh)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model, optimizer, step = factory()
        tracker = FSDPMemTracker(model, optimizer)
        batch = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, torch.Tensor))
        tracker.track_inputs((batch,))
        with tracker:
            for number in range(2):
                step()
                if not number:
                    tracker.reset_mod_stats()
        theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    live = [one for one in ours.allocations if one.alive(ours.steady.at)]
    exact = sum(math.prod(one.shape) * getattr(torch, one.dtype).itemsize for one in live)  # it rounds on CUDA alone
    assert exact == theirs + 4 * WORLD  # the mesh's own ranks, that nobody told the tracker of


def test_nothing_is_left_of_the_process_group() -> None:
    trace(factories.ddp, world=WORLD)
    assert not torch.distributed.is_initialized()
