"""torchtitan's selective activation checkpointing per op: distributed/activation_checkpoint.py.

Attention's outputs, reductions' results and every second matmul are saved (the count starts anew in each block: q, v, gate and down of a
llama block), all else is computed again. Eager, what is saved stays though no backward reads it (the down projection's output);
compiled, it does not.
"""

from __future__ import annotations

from ullage.kernels.step import Context, Segment, Step
from ullage.kernels.torchtitan_version import (
    ALL_TO_ALL_SAVED_SINCE,
    EARLY_STOP_UNTIL,
    before,
    saves_abs,
    saves_attention,
)


def policy(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    keep: set[str] = set()
    matmuls = 0
    saves_all_to_all = not before(context, ALL_TO_ALL_SAVED_SINCE)
    wanted = _wanted(steps)
    for step in steps:
        made = [buffer.name for buffer in step.writes]
        scatters = context.sp and step.name.endswith(".reduce")
        if step.op == "matmul":
            matmuls += 1
            kept = made[:1] if matmuls % 2 else []
        elif (
            (step.op == "attention" and saves_attention(context))
            or (step.op == "all_to_all" and saves_all_to_all)
            or scatters
            or (step.op == "abs" and saves_abs(context))
        ):
            kept = made
        else:
            continue
        keep |= {name for name in kept if not context.compile or name in wanted}
    return (Segment(start=0, stop=len(steps), keep=frozenset(keep), early_stop=before(context, EARLY_STOP_UNTIL)),)


def _wanted(steps: tuple[Step, ...]) -> set[str]:
    """What a backward reads, or what is needed to compute that again."""
    wanted: set[str] = set()
    for step in reversed(steps):
        if step.saves or any(name in wanted for name in step.made):
            wanted |= {*step.saves, *step.reads}
    return wanted
