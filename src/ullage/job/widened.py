"""A stream that turns to fp32 on its way: 16-bit parameters, autocast, and linears that give back the type that they are given.

Autocast runs the Python code of xIELU in fp32 (softplus of its parameters, and expm1), bitsandbytes' linear gives what it was given
(nn/modules.py, Linear4bit.forward), and so the first layer's sum is fp32, and all behind it.
"""

from __future__ import annotations

from functools import lru_cache

from ullage.frozen import replace
from ullage.job.job import Job
from ullage.model.graph import Block, Graph, Run, Tensor

XIELU_CUDA = "xielu_cuda"
"""The option that says that the xielu package is installed, whose kernel transformers' class then calls."""
_WIDE = "fp32"


def widens(graph: Graph, job: Job) -> bool:
    """Of a job with a quantised base."""
    wide = any(op.kind == "xielu" for run in graph.runs for op in run.block.ops)
    return wide and not job.engine.options.get(XIELU_CUDA) and job.precision.autocast and job.precision.params != _WIDE


@lru_cache(maxsize=64)
def widened(graph: Graph) -> Graph:
    """The graph with the stream in fp32 from the end of its first layer on."""
    runs: list[Run] = []
    for run in graph.runs:
        if run.block.role != "layer":
            runs.append(replace(run, block=_reading_wide(run.block)) if run.block.role == "head" else run)
            continue
        made = _giving_wide(run.block)
        repeat = run.repeat
        if all(before.block.role != "layer" for before in runs):
            runs.append(replace(run, block=replace(made, name=f"{made.name} into fp32"), repeat=1))
            repeat -= 1
        if repeat:
            runs.append(replace(run, block=_reading_wide(made), repeat=repeat))
    return replace(graph, runs=tuple(runs))


def _reading_wide(block: Block) -> Block:
    return replace(block, input=replace(block.input, elements=_WIDE))


def _giving_wide(block: Block) -> Block:
    def wide(tensor: Tensor) -> Tensor:
        return replace(tensor, elements=_WIDE) if tensor == block.output else tensor

    ops = tuple(replace(op, outputs=tuple(wide(tensor) for tensor in op.outputs)) for op in block.ops)
    return replace(block, ops=ops, output=wide(block.output))
