"""Eager torch, one autograd node at a time: what each primitive keeps for its backward and what its backward makes.

A Tape is written as the layer code is written; it turns calls into Steps. What is saved, and what a backward makes, follows
torch's derivatives.yaml; the order of backward is the reverse of the order of calls (torch/csrc/autograd/engine.cpp runs the
youngest ready node first). Held against the C++ allocator's own events on CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ullage import dtypes
from ullage.kernels.step import Buffer, Context, Crossing, Fit, Step, WeightGrad
from ullage.model.graph import COMPUTE, Block, Dim, Tensor


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the layer code: (dims) in ``dtype``."""

    name: str
    dims: tuple[Dim, ...]
    dtype: str

    @property
    def rows(self) -> tuple[Dim, ...]:
        """All dimensions but the last."""
        return self.dims[:-1]


class Tape:
    """Records the layer code of one block as Steps. ``module``: the recompute module that new steps belong to."""

    def __init__(self, context: Context, block: Block) -> None:
        self.context = context
        self.steps: list[Step] = []
        self.module = ""
        self.family = block.family
        self.frozen = frozenset(param.name for param in block.params if not param.trainable)
        self.values: dict[str, Value] = {}
        source = block.input
        self.source = source.name
        for one in (source, *block.beside):
            dtype = context.compute if one.elements == COMPUTE else one.elements or context.residual
            self.define(Value(one.name, one.dims, dtype))
        made = [one for op in block.ops for one in op.outputs]
        self.asking = frozenset(one.name for one in (*block.beside, *made) if one.grad)

    # -- values

    def define(self, value: Value) -> Value:
        self.values[value.name] = value
        return value

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    @property
    def weight_dtype(self) -> str:
        """The type in which a layer sees its parameters: as stored under autocast, else the compute type (FSDP gathers in it)."""
        return self.context.params if self.context.autocast else self.context.compute

    def like(self, tensor: Tensor, dtype: str) -> Value:
        return Value(tensor.name, tensor.dims, tensor.elements or dtype)

    def buffer(self, value: Value, what: str = "") -> Buffer:
        return self.context.buffer(value.name, value.dims, value.dtype, what)

    def scratch(self, name: str, like: Value, dtype: str | None = None) -> Buffer:
        return self.context.buffer(name, like.dims, dtype or like.dtype)

    # -- steps

    def emit(
        self,
        name: str,
        reads: Iterable[Value] = (),
        out: Value | None = None,
        *,
        what: str = "",
        beside: tuple[Buffer, ...] = (),
        saves: Iterable[Value | str] = (),
        passes: Iterable[Value] = (),
        no_grad: Iterable[Value] = (),
        reuses: Iterable[Value] = (),
        hands: Mapping[str, str] | None = None,
        scratch: tuple[Buffer, ...] = (),
        backward_scratch: tuple[Buffer, ...] = (),
        fits: tuple[Fit, ...] = (),
        weights: tuple[WeightGrad, ...] = (),
        summed: Iterable[str] = (),
        view_grads: Iterable[Value] = (),
        caches: tuple[str, ...] = (),
        serves: Mapping[str, Iterable[str]] | None = None,
        borrows: tuple[Crossing, ...] = (),
        lends: tuple[Crossing, ...] = (),
        op: str = "",
    ) -> Value:
        """One node. ``beside``: further tensors that it makes (statistics, masks)."""
        made = () if out is None else (self.buffer(out, what or name),)
        self.steps.append(
            Step(
                name=name,
                reads=tuple(value.name for value in reads),
                writes=(*made, *beside),
                saves=tuple(one if isinstance(one, str) else one.name for one in saves),
                passes=tuple(value.name for value in passes),
                no_grad=tuple(value.name for value in no_grad),
                reuses=tuple(value.name for value in reuses),
                hands=tuple((hands or {}).items()),
                scratch=scratch,
                backward_scratch=backward_scratch,
                fits=fits,
                weights=weights,
                summed=tuple(summed),
                view_grads=tuple(value.name for value in view_grads),
                caches=caches,
                serves=tuple((name, tuple(of)) for name, of in (serves or {}).items()),
                borrows=borrows,
                lends=lends,
                module=self.module,
                op=op,
            )
        )
        return self.define(out) if out is not None else Value(name, (), "")

    def view(self, source: Value, name: str, dims: tuple[Dim, ...] | None = None, *, copies: bool = False) -> Value:
        """A view of ``source`` or of a part of it. copies: its gradient is written into a new tensor of the source's size."""
        out = Value(name, source.dims if dims is None else dims, source.dtype)
        self.views(source, (out,), copies=copies)
        return out

    def views(self, source: Value, outs: tuple[Value, ...], *, copies: bool = True) -> None:
        """Views made by one node (chunk, split); their gradients are joined in one new tensor where ``copies``."""
        self.steps.append(
            Step(
                name=f"{outs[0].name}.view",
                reads=(source.name,),
                aliases=tuple((self.buffer(out, out.name), source.name) for out in outs),
                passes=() if copies else (source.name,),
                module=self.module,
            )
        )
        for out in outs:
            self.define(out)

    def hold(self, *values: Value) -> None:
        """A frame that names ``values`` ends here: they live to the end of the last step."""
        last = self.steps[-1]
        self.steps[-1] = replace(last, holds=(*last.holds, *(value.name for value in values)))

    # -- primitives

    def cast(self, value: Value, dtype: str, name: str) -> Value:
        """``value.to(dtype)``; itself, under both names, where it has that type already."""
        if value.dtype == dtype:
            self.values[name] = value
            return value
        return self.emit(name, (value,), Value(name, value.dims, dtype))

    def add(self, left: Value, right: Value, out: Value, what: str = "") -> Value:
        """The sum's gradient is each operand's, cast where an operand has another type."""
        reads = (left, right)
        return self.emit(out.name, reads, out, what=what, passes=[one for one in reads if one.dtype == out.dtype])

    def mul(self, left: Value, right: Value, out: Value, what: str = "") -> Value:
        serves = {left.name: (right.name,), right.name: (left.name,)}
        return self.emit(out.name, (left, right), out, what=what, saves=(left, right), serves=serves)

    def times(self, left: Value, right: Value, out: Value, what: str = "") -> Value:
        """The product of two shapes or types; the gradient of a factor that is not as the product is made as the product is."""
        fits = tuple(
            Fit(one.name, self.scratch(f"{out.name}.grad_of_{one.name}", out))
            for one in (left, right)
            if (one.dims, one.dtype) != (out.dims, out.dtype)
        )
        serves = {left.name: (right.name,), right.name: (left.name,)}
        return self.emit(out.name, (left, right), out, what=what, saves=(left, right), fits=fits, serves=serves)

    def scale(self, value: Value, name: str) -> Value:
        """A Python number times a tensor: nothing is saved."""
        return self.emit(name, (value,), Value(name, value.dims, value.dtype))

    def mul_constant(self, value: Value, name: str, dtype: str, constant: Value | None = None) -> Value:
        """value * c, with c a tensor that needs no gradient and is saved anyway; ``dtype``: of the product.

        constant: where it is a tensor of this block. A gradient in another type than ``value`` is made first and then cast.
        """
        wide = () if dtype == value.dtype else (self.scratch(f"{name}.grad", value, dtype),)
        own = () if constant is None else (constant,)
        out = Value(name, value.dims, dtype)
        return self.emit(name, (value, *own), out, saves=own, no_grad=own, backward_scratch=wide)

    def mul_weight(self, value: Value, weight: WeightGrad, out: Value, what: str = "") -> Value:
        """value * weight over the last dimension: the weight's gradient is a whole product before it is summed."""
        product = self.scratch(f"{out.name}.product", out)
        return self.emit(
            out.name,
            (value,),
            out,
            what=what,
            saves=(value,),
            weights=(weight,),
            backward_scratch=(product,),
            serves={value.name: (weight.param,), product.name: (weight.param,)},
        )

    def weight(self, param: str, dims: tuple[Dim, ...], *, fusable: bool = False) -> WeightGrad:
        return self.context.weight(param, dims, self.weight_dtype, fusable=fusable)

    def cast_weight(self, param: str, dims: tuple[Dim, ...], dtype: str) -> Value | None:
        """Autocast's copy of a parameter, stored as ``dtype``, in the compute type; cached until the context exits, unless it is frozen
        (aten/src/ATen/autocast_mode.cpp, cached_cast). None: there is none."""
        if not self.context.autocast or dtype == self.context.compute:
            return None
        name = f"{param}.{self.context.compute}"
        if name in self.values and param not in self.frozen:
            return self.values[name]
        if name in self.values:  # each use has a copy of its own
            name = f"{name}.{len(self.steps)}"
        out = Value(name, dims, self.context.compute)
        return self.emit(
            name,
            (),
            out,
            what=f"autocast copy of {param}",
            weights=(self.context.weight(param, dims, dtype),),
            caches=() if param in self.frozen else (name,),
        )


def promote(*types: str) -> str:
    """The type of an operation on tensors of several floating types."""
    return max(types, key=dtypes.bits)
