"""Tensor parallelism of transformers' models: what DTensor does around a linear layer or an embedding (distributed/tensor_parallel.py).

Column: the input is whole on every rank, and its gradient, a part on each, is all-reduced. Row and the embedding, cut by words: the
output is a part on each rank and is all-reduced. The embedding's gradient is whole on every rank. The head's logits are gathered.
Functional collectives write new tensors.

Along the sequence (trace/sequence.py) the stream between layers is a DTensor of a rank's tokens. What a column reads is gathered, once for
the projections of a module, and stays for their backward, which reduce-scatters its gradient; a row's terms are reduce-scattered and
the output's gradient gathered. The embedding's are all-reduced before each rank takes its tokens.

Fused projections, experts and several embedding tables are computed without these copies: transformers' plans cut them in other ways.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer, Step, WeightGrad
from ullage.model.graph import BATCH, SEQ, SEQ_SP, Dim, Graph, Op, Param

GATHERED = ".gathered"
"""Behind the name of a tensor of a rank's tokens: that of all tokens."""


def entering(tape: Tape, op: Op, source: Value) -> Value:
    """What a layer reads. Of a column-wise one the same tensor, whose gradient is all-reduced into a new one; along the sequence all
    tokens of it."""
    if tape.context.tp == 1 or op.attrs["parallel"] != "column":
        return source
    if tape.context.sp:
        return _of_all_tokens(tape, op, source)
    return tape.view(source, f"{op.name}.replicated", copies=True)


def _of_all_tokens(tape: Tape, op: Op, source: Value) -> Value:
    name = f"{source.name}{GATHERED}"
    if name in tape.values:
        return tape[name]
    whole = Value(name, _all_tokens(source.dims), source.dtype)
    inside, tape.module = tape.module, ""  # a checkpoint of the module that reads it is entered behind
    made = tape.emit(
        f"{op.name}.gather",
        (source,),
        whole,
        what=f"{source.name} of all tokens",
        scratch=_unjoined(tape, name, whole),
        backward_scratch=(tape.scratch(f"{name}.grad.stacked", whole),),
    )
    tape.module = inside
    return made


def _unjoined(tape: Tape, name: str, whole: Value) -> tuple[Buffer, ...]:
    """What an all-gather makes, the ranks' tokens one after the other, before each sequence's are joined; of one sequence they are (torch
    distributed/_functional_collectives.py, all_gather_tensor)."""
    return () if tape.context.size(BATCH) == 1 else (tape.scratch(f"{name}.stacked", whole),)


def _all_tokens(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple(SEQ if dim == SEQ_SP else dim for dim in dims)


def part(tape: Tape, name: str, output: Value, *, reduced: bool) -> Value:
    """What a layer itself makes: ``output``, or this rank's term of it, of all tokens."""
    reduced = reduced and tape.context.tp > 1
    return Value(f"{name}.partial", _all_tokens(output.dims), output.dtype) if reduced else output


def leaving(tape: Tape, name: str, made: Value, output: Value) -> Value:
    """The reduced output where ``made`` is a term of it. All-reduced, its gradient is whole on every rank already.

    Along the sequence what passes by is as large as the terms: their stack by ranks, or the embedding's sum of which a rank takes its
    tokens; backward the stack of the gradients that are gathered.
    """
    if made is output:
        return output
    if tape.context.sp:
        return tape.emit(
            f"{name}.reduce",
            (made,),
            output,
            what=f"{name} output of a rank's tokens",
            scratch=(tape.scratch(f"{name}.stacked", made),),
            backward_scratch=_unjoined(tape, f"{name}.grad", made),
            op="reduce_scatter",
        )
    return tape.emit(
        f"{name}.all_reduce", (made,), output, what=f"{name} output, all-reduced", passes=(made,), op="all_reduce"
    )


def told_apart(tape: Tape) -> tuple[Step, ...]:
    """The steps of a block; of those along the sequence it is said which of their reads are DTensors: the stream, and what is gathered."""
    if not tape.context.sp:
        return tuple(tape.steps)
    wrapped = {value.name for value in tape.values.values() if SEQ_SP in value.dims or value.name.endswith(GATHERED)}
    return tuple(replace(step, wrapped=tuple(name for name in step.reads if name in wrapped)) for step in tape.steps)


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


@lru_cache(maxsize=256)
def gradients_of_tokens(graph: Graph) -> frozenset[str]:
    """Weights, by qualified name, whose gradient is of a rank's tokens along the sequence: of norms of the stream. DTensor leaves it a term
    of the sum, and all-reduces it for each op that reads it."""
    return frozenset(
        f"{run.block.name}.{param.name}"
        for run in graph.runs
        for op in run.block.ops
        if op.kind == "norm" and SEQ_SP in op.outputs[0].dims
        for param in op.params
    )


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
