"""Weights of experts that are made where the layer code names them: packed ones unpacked, adapted ones with their update.

A parametrization makes the whole weight, of all experts, and torch keeps it until the experts' forward returns (torch
nn/utils/parametrize.py, cached). The matmul saves it for its input's gradient: without recomputation every layer's stays until its
backward.

Packed: axolotl's quantize_moe_experts (monkeypatch/moe_quant.py). Adapted: PEFT's ParamWrapper (tuners/lora/layer.py), whose gradient
is that of the whole weight. Since 0.21 it adds B A to a weight that is a parameter in one product; beside packed ones, where that release
fails (its parametrization is not taken away again), it is run as before: the whole update by itself, scaled, and added.
"""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.job.adapted import QUANTISED
from ullage.job.adapted_experts import ATTR
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer, WeightGrad
from ullage.kernels.transformers_quantised import scales
from ullage.model.graph import Dim, Op, Param

_KEPT = (".whole", ".update", ".factor")


def made(tape: Tape, op: Op, name: str, dims: tuple[Dim, ...]) -> Value | None:
    """The weight that a matmul of all experts takes, (dims); None where it is the parameter itself."""
    packed = op.params[0].elements in QUANTISED
    adapter = op.attrs.get(ATTR)
    if not isinstance(adapter, FrozenMap):
        return _unpacked(tape, op.params[0], name, dims, f"{name}.whole") if packed else None
    dtype = str(adapter["dtype"])
    return _added(tape, op, name, dims, dtype) if packed else _folded(tape, op, name, dims, dtype)


def is_adapted(op: Op) -> bool:
    return ATTR in op.attrs


def kept(tape: Tape) -> tuple[Value, ...]:
    """What is named until the experts' forward returns."""
    return tuple(value for name, value in tape.values.items() if name.endswith(_KEPT))


def _unpacked(tape: Tape, param: Param, name: str, dims: tuple[Dim, ...], called: str) -> Value:
    """In four bits it has the type that it was loaded in (bitsandbytes nn/parametrize.py, Bnb4bitParametrization). In eight it is fp32, and
    is made in two products: its numbers times their rows' scales, and that times a constant (int8_vectorwise_dequant)."""
    in_eight = param.elements == "int8"
    whole = Value(called, dims, "fp32" if in_eight else tape.context.compute)
    scratch: tuple[Buffer, ...] = ()
    if in_eight:
        scratch = (tape.scratch(f"{name}.scaled", whole),)
    elif param.elements == "nf4-double":
        scratch = scales(tape, name, dims)[:1]
    return tape.emit(called, (), whole, what=f"{name} weights, unpacked", scratch=scratch)


def _folded(tape: Tape, op: Op, name: str, dims: tuple[Dim, ...], dtype: str) -> Value:
    """W + scaling x B A in one product, in W's type (_LoraFactorsProxy: autocast is off)."""
    whole = Value(f"{name}.whole", dims, tape.weight_dtype)
    return _product(tape, op, whole, dtype, f"{name} weights with their update")


def _added(tape: Tape, op: Op, name: str, dims: tuple[Dim, ...], dtype: str) -> Value:
    """B A in the adapters' type, or autocast's; that, scaled, in W's type (get_delta_weight); and W with it (_LoraParameterProxy)."""
    compute = tape.context.compute if tape.context.autocast else dtype
    product = _product(tape, op, Value(f"{name}.product", dims, compute), dtype, f"update of {name} weights")
    base = op.params[0]
    kept_as = "fp32" if base.elements == "int8" else tape.context.compute
    scaled = tape.scale(product, f"{name}.update" if kept_as == compute else f"{name}.scaled_update")
    update = tape.cast(scaled, kept_as, f"{name}.update")
    if not op.params[-1].trainable:  # what is cached is the weight without it
        return _unpacked(tape, base, name, dims, f"{name}.whole")
    unpacked = _unpacked(tape, base, name, dims, f"{name}.unpacked")
    return tape.add(unpacked, update, Value(f"{name}.whole", dims, kept_as), f"{name} weights with their update")


def _product(tape: Tape, op: Op, made: Value, dtype: str, what: str) -> Value:
    """B A of all experts, [experts, out, in], in the type of ``made``."""
    factors = [_factor(tape, param, dtype, made.dtype) for param in op.params[-2:]]
    values = [value for value, _ in factors if value is not None]
    weights = tuple(weight for _, weight in factors if weight is not None)
    return tape.emit(made.name, values, made, what=what, saves=values, weights=weights, op="matmul")


def _factor(tape: Tape, param: Param, dtype: str, wanted: str) -> tuple[Value | None, WeightGrad | None]:
    """A or B as the product takes it: a copy in its type, or the parameter itself with its gradient."""
    weight = tape.context.weight(param.name, param.dims, dtype)
    if dtype == wanted:
        return None, weight
    copy = Value(f"{param.name}.factor", param.dims, wanted)
    return tape.emit(copy.name, (), copy, what=f"copy of {param.name}", weights=(weight,)), None
