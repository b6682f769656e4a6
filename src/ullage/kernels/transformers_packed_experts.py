"""Experts of transformers 5.x whose one weight is packed: axolotl's quantize_moe_experts (monkeypatch/moe_quant.py).

A parametrization makes the whole weight, of all experts, where the layer code names it, and torch keeps it until the experts' forward
returns (torch nn/utils/parametrize.py, cached). The matmul saves it for its input's gradient: without recomputation every layer's stays
until its backward.
"""

from __future__ import annotations

from ullage.job.adapted import QUANTISED
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer
from ullage.kernels.transformers_quantised import scales
from ullage.model.graph import Dim, Param

_KEPT = ".whole"


def whole(tape: Tape, param: Param, name: str, dims: tuple[Dim, ...]) -> Value | None:
    """The weight of all experts, unpacked, (dims); None where it is not packed.

    In four bits it has the type that it was loaded in (bitsandbytes nn/parametrize.py, Bnb4bitParametrization). In eight it is fp32, and is
    made in two products: its numbers times their rows' scales, and that times a constant (int8_vectorwise_dequant).
    """
    if param.elements not in QUANTISED:
        return None
    in_eight = param.elements == "int8"
    made = Value(f"{name}{_KEPT}", dims, "fp32" if in_eight else tape.context.compute)
    scratch: tuple[Buffer, ...] = ()
    if in_eight:
        scratch = (tape.scratch(f"{name}.scaled", made),)
    elif param.elements == "nf4-double":
        scratch = scales(tape, name, dims)[:1]
    return tape.emit(made.name, (), made, what=f"{name} weights, unpacked", scratch=scratch)


def kept(tape: Tape) -> tuple[Value, ...]:
    """What is cached until the experts' forward returns."""
    return tuple(value for name, value in tape.values.items() if name.endswith(_KEPT))
