"""A trace of one rank is that rank's run: FSDP2, DDP and tensor parallelism on fake tensors, and really run by two processes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.distributed.ranks import recorded
from tests.trace import factories
from tests.trace.helpers import lives

from ullage.trace.events import Allocation, Trace
from ullage.trace.run import trace

pytestmark = pytest.mark.xdist_group("trace")  # one worker, so that its processes are started once

WORLD = 2
FACTORIES = {name: getattr(factories, name) for name in ("fsdp2", "ddp", "tensor_parallel")} | {
    "fsdp2, llama": factories.sharded_llama
}
OF_A_RUN_ALONE: dict[str, Callable[[Allocation], bool]] = {
    # gloo all-reduces a copy of what it is to reduce-scatter, and splits that (ProcessGroupGloo::reduce_scatter_tensor_coalesced)
    "fsdp2": lambda one: one.op == "aten.split",
    "fsdp2, llama": lambda one: one.op == "aten.split",
    # the indices of the buckets, which the ranks agree on after the first backward: a trace has no peers to agree with
    "ddp": lambda one: one.dtype == "int32" and one.bytes == 512,
    "tensor_parallel": lambda one: False,
}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Trace]]:
    return recorded(FACTORIES, WORLD)


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("name", FACTORIES)
def test_every_allocation_is_the_same(name: str, rank: int, runs: dict[str, list[Trace]]) -> None:
    run, faked = runs[name][rank], trace(FACTORIES[name], rank=rank, world=WORLD, like="cpu")
    run = replace(run, allocations=tuple(one for one in run.allocations if not OF_A_RUN_ALONE[name](one)))
    assert _followed(faked) == _followed(run)
    assert _at_marks(faked) == _at_marks(run)


def _is_gloo_s(category: str, op: str) -> bool:
    """Whether gloo's threads hold it for a moment after the wait for them: when it dies, and so what it was for, differs by a little."""
    return category == "communication" or op.startswith("_c10d_functional")


def _followed(found: Trace) -> list[tuple[object, ...]]:
    """What lives() says, but for when gloo lets go of its buffers."""
    return [
        (n_bytes, module, op) if _is_gloo_s(category, op) else (died, n_bytes, category, module, op)
        for died, n_bytes, category, module, op in lives(found)
    ]


def _at_marks(found: Trace) -> list[tuple[str, int]]:
    """Live bytes when each phase begins, without what gloo's threads may hold."""
    kept = [one for one in found.allocations if not _is_gloo_s(one.category, one.op)]
    return [(str(mark), sum(one.bytes for one in kept if one.alive(mark.at - 1))) for mark in found.marks]
