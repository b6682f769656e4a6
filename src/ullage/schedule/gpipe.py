"""GPipe: every forward, then every backward. With several chunks, torch's LoopedBFS: chunk after chunk.

Source: pytorch torch/distributed/pipelining/schedules.py, ScheduleGPipe and ScheduleLoopedBFS.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.schedule.base import Action, Shape


def gpipe(shape: Shape, rank: int) -> Iterator[Action]:
    """In flight at the peak: chunks x micro-batches, on every rank."""
    for chunk in range(shape.chunks):
        for micro_batch in range(shape.micro_batches):
            yield Action("F", chunk, micro_batch)
    for chunk in reversed(range(shape.chunks)):
        for micro_batch in range(shape.micro_batches):
            yield Action("B", chunk, micro_batch)
