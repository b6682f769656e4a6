"""``ullage plan``: a job with free keys in, the best strategies out, each with its reasons."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ullage.engines.estimate import Estimate
from ullage.errors import Infeasible, InvalidInput, UllageError
from ullage.frozen import frozen, replace
from ullage.job import fields
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.job.write import cluster_to_dict, job_to_dict
from ullage.planner.exact import first_violation
from ullage.planner.goals import GOALS, ON_FEWER, goal, smaller
from ullage.planner.reasons import END, better_but_too_large, limited_by, lost_by, strategy, would_buy
from ullage.planner.remedies import Remedy, remedies
from ullage.planner.search import Search
from ullage.planner.strategies import Found, Missed
from ullage.planner.wanted import DEGREES, Base, Wanted, bases, cluster_of, wanted, with_keys
from ullage.timing.step import StepTime
from ullage.units import KIB, format_bytes

LONGEST = 1 << 24
GRAIN = KIB
"""Tokens: the longest sequence is told to this."""


@frozen
class Plan:
    """One strategy. name: the goal's for the best, ``runner-up`` for the next, ``simplest`` for the one of fewest techniques."""

    name: str
    strategy: str
    job: Job
    time: StepTime
    estimate: Estimate
    limited_by: str
    why: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """plans: best first; empty where nothing fits, and ``nothing_fits`` then says what would change that.

    evaluated, pruned, infeasible: strategies timed exactly, proven no better, and proven not to fit or not to exist.
    refused: why an engine was not searched.
    """

    goal: str
    plans: tuple[Plan, ...]
    evaluated: int
    pruned: int
    infeasible: int
    seconds: float
    nothing_fits: Nothing | None
    refused: Mapping[str, str]


@frozen
class Nothing:
    """why: the most promising strategy that does not fit, in words; remedies: changes that each help by themselves."""

    why: str
    remedies: tuple[Remedy, ...]


def plan(
    source: str | Path | Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    goal_name: str = "fastest",
    engines: Sequence[str] = (),
    top: int = 3,
    exhaustive: bool = False,
    tight: bool = False,
) -> Answer:
    """The best strategies of a job whose missing keys are free. tight: those too whose interval straddles the capacity.

    Raises InvalidInput for what is written wrongly, Infeasible where no strategy exists at all, whatever the memory.
    """
    fields.choice(*GOALS)(goal_name, "--goal")
    if top < 1:
        raise InvalidInput("is no number of plans", key="--top", value=top, allowed="1 or more")
    start = time.perf_counter()
    asked = replace(wanted(source, tuple(overrides), tuple(engines)), tight=tight)
    want = _with_batch(asked, goal_name)
    found, refused = _bases(want, goal_name)
    if not found:
        raise next(iter(refused.values()))
    if goal_name == "longest-sequence":
        want, found = _longest(want, found)
    search = Search(
        want=want,
        bases=found,
        goal=goal(goal_name),
        most=top,
        exhaustive=exhaustive,
        hopeful=None if exhaustive else lambda: _anything_fits(want, found),
    )
    best = search.run()
    if not search.counts.space:
        raise _no_strategy(want, found)
    if search.counts.refused == search.counts.space:
        # no strategy exists, whatever the memory: the first reason stands for all
        raise next(iter(search.reasons.values()))
    return Answer(
        goal=goal_name,
        plans=_plans(goal_name, best, search, top),
        evaluated=search.counts.evaluated,
        pruned=search.counts.pruned,
        infeasible=search.counts.infeasible,
        seconds=time.perf_counter() - start,
        nothing_fits=None if best else _nothing(want, search),
        refused={name: str(error) for name, error in refused.items()},
    )


def _with_batch(want: Wanted, goal_name: str) -> Wanted:
    if goal_name == "largest-batch":
        if want.global_batch is not None:
            raise InvalidInput(
                "is what the goal largest-batch asks for",
                key="data.global_batch",
                value=want.global_batch,
                remedy="leave it out",
            )
        return want
    if want.global_batch is None and want.micro_batch is None and want.grad_accum is None:
        raise InvalidInput(
            "is missing: strategies are compared at one batch",
            key="data.global_batch",
            allowed="sequences of an optimizer step, such as 512",
            remedy="set it (--global-batch), or micro_batch and grad_accum",
        )
    return want


def _bases(want: Wanted, goal_name: str) -> tuple[list[Base], dict[str, UllageError]]:
    """The job under each engine; for a goal that may leave GPUs idle, on each part of the cluster too."""
    if goal_name not in ON_FEWER:
        return bases(want)
    whole = cluster_of(want)
    every: list[Base] = []
    refused: dict[str, UllageError] = {}
    for part in smaller(whole):
        found, why = bases(with_keys(want, {"cluster": cluster_to_dict(part)}))
        every += found
        refused = why if part == whole else {name: error for name, error in refused.items() if name in why}
    return every, refused


def _no_strategy(want: Wanted, found: list[Base]) -> UllageError:
    """Degrees, GPUs and batch exclude each other, whatever else: the first check that says so, or the batch."""
    job = found[-1].job  # the engine that has most axes comes last
    fixed = {name: want.fixed(name) for name in DEGREES if want.fixed(name) is not None}
    others = prod(value for name, value in fixed.items() if name in ("tp", "cp", "pp") and isinstance(value, int))
    layout = replace(job.layout, **{"dp": max(1, job.cluster.gpus // others), **fixed})
    broken = first_violation(replace(job, layout=layout))
    if broken is not None:
        return broken.error()
    told = ", ".join(f"layout.{name} = {value}" for name, value in fixed.items())
    return Infeasible(
        f"divides over no number of replicas of {job.cluster.gpus} GPUs{f' with {told}' if told else ''}",
        key="data.global_batch",
        value=want.global_batch,
        remedy=f"use a multiple of {layout.dp}, or other degrees",
    )


def _plans(goal_name: str, best: list[Found], search: Search, top: int) -> tuple[Plan, ...]:
    if not best:
        return ()
    first = best[0]
    told = [
        _told(
            goal_name,
            first,
            search.missed,
            [*better_but_too_large(first, search.missed, tight=search.want.tight), *would_buy(first)],
        )
    ]
    told += [_told("runner-up", one, search.missed, [lost_by(first, one)]) for one in best[1:]]
    if goal_name == "fastest" and top > 1:
        simplest = Search(want=search.want, bases=search.bases, goal=goal("simplest"))
        told += [
            _told("simplest", one, simplest.missed, [lost_by(first, one)])
            for one in simplest.run()
            if all(one.job != other.job for other in best)
        ]
    return tuple(told)


def _told(name: str, one: Found, missed: Missed | None, why: list[str]) -> Plan:
    return Plan(
        name=name,
        strategy=strategy(one.job),
        job=read_job(job_to_dict(one.job)),
        time=one.time,
        estimate=one.estimate,
        limited_by=limited_by(one, missed),
        why=tuple(why),
    )


def _nothing(want: Wanted, search: Search) -> Nothing:
    missed = search.missed
    end = END[want.tight]
    why = f"every strategy's {end} estimate is above a device's memory for its states and what its forwards leave behind alone"
    if missed is not None:
        needed = format_bytes(missed.needed_bytes)
        said = (
            f"a node would need {needed} of its own memory"
            if missed.on_host
            else f"its {end} estimate is {needed} a device"
        )
        why = f"the most promising: {strategy(missed.job)}; {said}"
    return Nothing(why=why, remedies=tuple(remedies(want, _anything_fits)))


def _anything_fits(want: Wanted, found: list[Base]) -> bool:
    """Whether the smallest strategies fit: one sequence at a time, every layer recomputed, states divided over all ranks, one chunk a rank.
    What all others need is more."""
    smallest: dict[str, object] = {}
    if "recompute" not in want.written:
        smallest["recompute"] = "full"
    if want.micro_batch is None and want.grad_accum is None:
        smallest["data.micro_batch"] = 1
    want = replace(with_keys(want, smallest), smallest=True)
    found, _ = bases(want)
    return bool(Search(want=want, bases=found, goal=goal("fastest")).run())


def _longest(want: Wanted, found: list[Base]) -> tuple[Wanted, list[Base]]:
    """The request with the longest sequence that something fits with, told to GRAIN tokens."""

    def at(seq_len: int) -> tuple[Wanted, list[Base]] | None:
        other = with_keys(want, {"data.seq_len": seq_len})
        some, _ = bases(other)
        return (other, some) if some and _anything_fits(other, some) else None

    low, high, known = 0, found[0].job.data.seq_len, None
    while high <= LONGEST and (longer := at(high)) is not None:
        low, high, known = high, 2 * high, longer
    while high - low > max(GRAIN, low // 16):
        middle = (low + high) // 2 // GRAIN * GRAIN or (low + high) // 2
        if middle in (low, high):
            break
        longer = at(middle)
        if longer is None:
            high = middle
        else:
            low, known = middle, longer
    return known or (want, found)
