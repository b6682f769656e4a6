"""The timeline of a job: one pipeline stage's step, or its run so far as the allocator sees it."""

from __future__ import annotations

from ullage.engines.base import Account, flag
from ullage.engines.estimate import Estimate, RankEstimate, estimate
from ullage.engines.registry import account, ranks_of
from ullage.errors import InvalidInput, Unsupported
from ullage.frozen import frozen
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.memory.overhead import outside_allocator
from ullage.memory.program import Node, Sequence
from ullage.report import words
from ullage.report.timeline import Limit, Timeline, Top, of_program, top
from ullage.report.timeline_picture import Picture

MOST_EVENTS = 2_000_000
"""Allocations and frees that a picture is made of at most: no viewer shows more, and a browser opens less."""

PARTS_OF_HISTORY = ("load", "first step", "states made by the first step", "second step")


@frozen
class JobTimeline:
    """A stage's timeline with what frames it. outside_bytes: device memory beside the caching allocator."""

    timeline: Timeline
    estimate: Estimate
    stage: RankEstimate
    history: bool
    outside_bytes: int
    expandable_segments: bool

    @property
    def top(self) -> Top:
        return top(self.timeline)

    @property
    def allocator_bytes(self) -> int:
        """What is left for the caching allocator."""
        return max(0, self.estimate.capacity_bytes - self.outside_bytes)

    @property
    def title(self) -> str:
        job = self.estimate.job
        what = "load and two steps" if self.history else "one step"
        where = f", stage {self.stage.stage} of {len(self.estimate.ranks)}" if len(self.estimate.ranks) > 1 else ""
        return f"{job.model.name} on {words.cluster(job)}: {what}{where}"


def job_timeline(job: Job, *, stage: int | None = None, history: bool = False) -> JobTimeline:
    """The timeline of a pipeline stage (None: the one of the peak).

    history: load, first step and second step instead of one step from the second on. Raises what ``estimate`` raises.
    """
    answer = estimate(job)
    chosen = _chosen(answer, stage)
    graph = graph_of(job)
    found = account(job, graph, ranks_of(job, graph)[chosen.stage])
    program = _history(found) if history else found.program
    if program.changes > MOST_EVENTS:
        raise Unsupported(
            "is too long a step to draw",
            key="allocations and frees",
            value=f"{program.changes:,}",
            allowed=f"at most {MOST_EVENTS:,}",
            remedy="draw it with fewer micro-batches: --grad-accum, or --set data.grad_accum=N",
        )
    outside = outside_allocator(job.cluster, found.groups, eager=found.eager)
    return JobTimeline(
        timeline=of_program(program),
        estimate=answer,
        stage=chosen,
        history=history,
        outside_bytes=sum(one.bytes for one in outside),
        expandable_segments=flag(job.engine.options, "expandable_segments", False),
    )


def picture_of(found: JobTimeline) -> Picture:
    """What is drawn of a job: its settings and predicted sizes, against the card and what the allocator can have of it."""
    return Picture(
        timeline=found.timeline,
        title=found.title,
        facts=tuple(_facts(found)),
        limits=tuple(_limits(found)),
        expandable_segments=found.expandable_segments,
        allocator_bytes=found.allocator_bytes,
    )


def _facts(found: JobTimeline) -> list[str]:
    job, stage = found.estimate.job, found.stage
    sizes = f"reserved {words.in_gib(stage.reserved_bytes)}, device {words.in_gib(stage.device_bytes)} predicted"
    return [*words.settings(job), sizes]


def _limits(found: JobTimeline) -> list[Limit]:
    device = found.estimate.job.cluster.device
    return [
        Limit(found.estimate.capacity_bytes, f"capacity of {device.name}"),
        Limit(found.allocator_bytes, "left for the allocator beside context, communicators and libraries"),
    ]


def _chosen(answer: Estimate, stage: int | None) -> RankEstimate:
    if stage is None:
        return words.worst(answer)
    if not 0 <= stage < len(answer.ranks):
        last = len(answer.ranks) - 1
        raise InvalidInput(
            "is no pipeline stage of this job", key="--rank", value=stage, allowed=f"0 to {last}" if last else "0"
        )
    return answer.ranks[stage]


def _history(found: Account) -> Node:
    """The account's history with each of its parts named."""
    history = found.history
    assert isinstance(history, Sequence)
    return Sequence(
        [Sequence([part], name) for name, part in zip(PARTS_OF_HISTORY, history.children, strict=True) if part.changes]
    )
