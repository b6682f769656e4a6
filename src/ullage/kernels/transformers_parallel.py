"""Tensor parallelism of transformers' models: what DTensor does around a linear layer or an embedding (distributed/tensor_parallel.py).

Column: the input is whole on every rank, and its gradient, a part on each, is all-reduced. Row and the embedding, cut by words: the
output is a part on each rank and is all-reduced. The embedding's gradient is whole on every rank. The head's logits are gathered.
Functional collectives write new tensors.

Fused projections, experts and several embedding tables are computed without these copies: transformers' plans cut them in other ways.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import WeightGrad
from ullage.model.graph import Graph, Op, Param


def entering(tape: Tape, op: Op, source: Value) -> Value:
    """What a layer reads: of a column-wise one, the same tensor, whose gradient is all-reduced into a new one."""
    if tape.context.tp == 1 or op.attrs["parallel"] != "column":
        return source
    return tape.view(source, f"{op.name}.replicated", copies=True)


def part(tape: Tape, name: str, output: Value, *, reduced: bool) -> Value:
    """What a layer itself makes: ``output``, or this rank's term of it."""
    return Value(f"{name}.partial", output.dims, output.dtype) if tape.context.tp > 1 and reduced else output


def leaving(tape: Tape, name: str, made: Value, output: Value) -> Value:
    """The all-reduced output where ``made`` is a term of it; the gradient is whole on every rank already."""
    if made is output:
        return output
    return tape.emit(
        f"{name}.all_reduce", (made,), output, what=f"{name} output, all-reduced", passes=(made,), op="all_reduce"
    )


def embedding_gradient(tape: Tape, param: Param) -> WeightGrad:
    """Of all words on every rank: DTensor runs embedding_dense_backward on whole gradients and indices, and cuts it when another op
    needs it as its weight is cut."""
    weight = tape.weight(param.name, param.dims)
    return replace(weight, numel=weight.numel * tape.context.tp)


@lru_cache(maxsize=256)
def whole_gradients(graph: Graph) -> frozenset[str]:
    """Weights, by qualified name, whose gradient is of all words when their backward is through; a tied one's is cut as it is joined."""
    joined = {first for first, _ in graph.tied}
    found = {
        f"{run.block.name}.{param.name}"
        for run in graph.runs
        for op in run.block.ops
        if op.kind == "embedding"
        for param in op.params
    }
    return frozenset(found - joined)


def gathered(tape: Tape, logits: Value) -> Value:
    """Whole logits: the all-gather stacks the ranks' parts, which are then joined along the words."""
    tp = tape.context.tp
    if tp == 1:
        return logits
    whole = Value(f"{logits.name}.whole", (*logits.rows, tape.context.size(logits.dims[-1]) * tp), logits.dtype)
    stacked = tape.scratch(f"{logits.name}.stacked", whole)
    tape.emit(whole.name, (logits,), whole, what="logits of all words", scratch=(stacked,))
    tape.values[logits.name] = whole
    return whole
