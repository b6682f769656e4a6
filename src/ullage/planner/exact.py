"""What the engines' own account says of one strategy: whether it may exist, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable

from ullage.engines.estimate import rank_peak
from ullage.engines.interval import demand
from ullage.engines.reach import refuse_what_is_not_read
from ullage.engines.registry import ranks_of
from ullage.errors import UllageError
from ullage.job.checks import Violation, violations
from ullage.job.job import Job, Layout
from ullage.memory.overhead import outside_allocator
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def first_violation(job: Job) -> Violation | None:
    """What a check refuses of a job."""
    return next((one for one in violations(job) if one.code != "warning"), None)


def first_error(job: Job) -> UllageError:
    """The same as an error, of one that a check does refuse."""
    broken = first_violation(job)
    assert broken is not None
    return broken.error()


def refusal(job: Job) -> UllageError | None:
    """What a check or its engine's account refuses of a job."""
    broken = first_violation(job)
    return broken.error() if broken is not None else out_of_reach(job)


def out_of_reach(job: Job) -> UllageError | None:
    """What stands against a job of which a part is trained in its engine's account: degrees under which no adapters are known."""
    if not (job.lora or job.freeze):
        return None
    try:
        refuse_what_is_not_read(job)
    except UllageError as error:
        return error
    return None


def leaves_experts_over(layout: Layout) -> bool:
    """Whether experts' ranks do not divide those of a pipeline stage."""
    return (layout.dp * layout.cp * layout.tp) % (layout.ep * layout.etp) != 0


def first_too_large(job: Job, graph: Graph, stages: Iterable[int], *, tight: bool = False) -> tuple[Rank, int] | None:
    """The first of these pipeline stages' ranks that cannot fit, without simulating the allocator, and its high estimate; tight: that is
    sure not to, and its low one."""
    ranks, needs = ranks_of(job, graph), demand(job, tight=tight)
    for rank in [ranks[stage] for stage in stages]:
        peak, account = rank_peak(job, graph, rank)
        outside = outside_allocator(job.cluster, account.groups, eager=account.eager)
        device_bytes = needs.device_bytes(peak, outside)
        if needs.is_over(device_bytes, job.cluster.device.capacity_bytes):
            return rank, device_bytes
    return None
