"""F.linear as transformers' models call it: the one place where a weight is multiplied."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import WeightGrad
from ullage.model.graph import Dim


def matmul(
    tape: Tape,
    name: str,
    source: Value,
    params: list[tuple[str, tuple[Dim, ...]]],
    output: Value,
    *,
    rows: bool = False,
    dtype: str | None = None,
) -> Value:
    """F.linear: saves its input; under autocast also the weight's copy, and each consumer casts its input for itself, unless they cast it
    once (trace/cast_once.py).

    dtype: of the weights, where they have another than the model's.

    A bias's gradient is summed when the node is done.
    The input's gradient is a matmul's result seen through a reshape, except where the input is ``rows`` already.
    """
    stored = dtype or tape.weight_dtype
    compute = tape.context.compute if tape.context.autocast else stored
    copies = {param: tape.cast_weight(param, dims, stored) for param, dims in params}
    narrow = f"{source.name}.{compute}" if tape.context.options.get("cast_once") else f"{name}.input"
    cast = tape.values.get(narrow) or tape.cast(source, compute, narrow)
    of_weights = [param if copy is None else copy.name for param, copy in copies.items() if not _is_bias(param)]
    weights: tuple[WeightGrad, ...] = ()
    if stored == compute:
        weights = tuple(tape.context.weight(*param, stored, fusable=not _is_bias(param[0])) for param in params)
    made = [copy for copy in copies.values() if copy is not None]
    matrices = [copy for param, copy in copies.items() if copy is not None and not _is_bias(param)]
    return tape.emit(
        name,
        (cast, *made),
        output,
        what=f"{name} output",
        saves=(cast, *matrices),
        weights=weights,
        summed=[param if copy is None else copy.name for param, copy in copies.items() if _is_bias(param)],
        view_grads=() if rows or len(cast.dims) <= 2 else (cast,),
        serves={cast.name: of_weights, **{one.name: (cast.name,) for one in matrices}},
        op="matmul",
    )


def _is_bias(param: str) -> bool:
    return param.endswith(".bias")
