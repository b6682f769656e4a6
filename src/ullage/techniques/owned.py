"""Tables of the states that a rank keeps: by hand, a parameter's bytes divided, and as the account holds them."""

from __future__ import annotations

import math

from ullage.job.job import Job
from ullage.techniques.rank import OneRank
from ullage.techniques.states import states
from ullage.techniques.told import Column, Part, Value

STATES = ("parameters", "gradients", "optimizer")


def owned(job: Job, stage: int, title: str = "What each rank owns") -> Part:
    """Bytes of each state of a parameter, before and after the division."""
    found = states(job, stage)
    columns = (
        Column(name="of", head="of"),
        Column(name="state", head="state"),
        Column(name="bytes_per_parameter", head="bytes a parameter", unit="number", summed=len(found) == 1),
        Column(name="ranks", head="over ranks", unit="count"),
        Column(name="whole_bytes", head="undivided", unit="bytes", summed=True),
        Column(name="owned_bytes", head="each rank", unit="bytes", summed=True),
    )
    rows: list[tuple[Value, ...]] = []
    for kind in found:
        of = "all parameters" if kind.kind == "all" else kind.kind
        for state in kind.states:
            whole, mine = kind.parameters * state.bits // 8, math.ceil(kind.parameters * state.per_parameter)
            rows.append((of, state.what, state.bits / 8, state.shards, whole, mine))
    about = "Of the parameters that tensor, pipeline and expert parallelism leave to this rank, before buffers and rounding."
    if not found:
        about = f"Not told by hand: the states of {job.optimizer.name} are not so many bytes a parameter. The account has them."
    return Part(title=title, about=about, columns=columns, rows=tuple(rows))


def held(one: OneRank, *beside: str) -> Part:
    """The lines of the states in the account at the rank's peak, and of the categories ``beside`` them."""
    columns = (
        Column(name="category", head="category"),
        Column(name="what", head="what"),
        Column(name="count", head="tensors", unit="count"),
        Column(name="bytes", head="each rank", unit="bytes", summed=True),
    )
    lines = [line for line in one.ledger if line.category in (*STATES, *beside)]
    return Part(
        title="In the account",
        about="What of these the estimate holds at this rank's peak, buffers and rounding included.",
        columns=columns,
        rows=tuple((line.category, line.what, line.count, line.bytes) for line in lines),
    )
