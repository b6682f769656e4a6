"""Selective recomputation by op: transformers' layers under torchtitan's policy, as ``ullage train`` runs them (trace/selective.py).

Kept are what fused attention makes, what is reduced over ranks, and every second matmul with a weight; the count starts anew in each
layer. What is kept stays though no backward reads it (the down projection's output): torch keeps results, not what is needed.
"""

from __future__ import annotations

from ullage.errors import Unsupported
from ullage.kernels.step import Context, Segment, Step

_KEPT = frozenset({"attention", "all_reduce", "reduce_scatter"})


def policy(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    """A layer as one segment; its recomputation ends with the last tensor that is needed."""
    if any(step.op == "matmul_4bit" for step in steps):
        raise Unsupported(
            "is not modelled beside a base in four bits", key="recompute", value="selective", remedy="use full"
        )
    keep: set[str] = set()
    matmuls = 0
    for step in steps:
        matmuls += step.op == "matmul"
        if step.op in _KEPT or (step.op == "matmul" and matmuls % 2):
            keep.update(buffer.name for buffer in step.writes)
    return (Segment(start=0, stop=len(steps), keep=frozenset(keep), early_stop=True),)
