"""The waist: what is trained, as blocks of ops with named dimensions. Every model becomes a Graph; every answer starts from one.

A *dimension* is a name ("hidden", "heads", "seq") or, where a traced module has no names, a plain size. A layout binds to
names: tensor parallelism divides "heads", "kv_heads", "ffn" and "vocab"; context parallelism divides "seq"; sequence
parallelism divides "seq_sp", the sequence of tensors between the tensor-parallel regions; expert parallelism divides "experts".
Nothing downstream has a formula per strategy: it multiplies bound dimensions.

A *graph* says nothing about data types, kernels or what is saved for backward: kernels/ does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field

from ullage.frozen import FrozenMap, frozen, hash_once

Dim = str | int
"""A named dimension, or the bare size of an unnamed one."""

BATCH = "batch"  # sequences of one micro-batch
SEQ = "seq"  # tokens of one sequence inside a tensor-parallel region
SEQ_SP = "seq_sp"  # the same between the regions, where sequence parallelism divides it
COMPUTE = "compute"
"""For ``Tensor.elements`` of what blocks hand on: the type that matmuls run in, where the stream's may be another."""
STREAM: tuple[Dim, ...] = (BATCH, SEQ_SP, "hidden")  # the tensor that one decoder block hands to the next
IMAGES: tuple[Dim, ...] = (BATCH, "channels", "image_height", "image_width")  # what a model reads in place of tokens
TARGET = "target"  # tokens of one sequence that a decoder behind an encoder makes; an encoder's are SEQ
ROUTED = "routed"  # rows that this rank's experts compute: tokens x top-k at balanced routing
SENT = "sent"  # rows that this rank sends to experts, wherever they are: its own tokens x top-k, however routed


@frozen
class Tensor:
    """An activation. ``elements`` names its type where it is not the compute type ("int64" ids, "fp32" scores).

    grad: whether its gradient comes back as one tensor of its size; the ops of a traced module say by themselves what does.
    """

    name: str
    dims: tuple[Dim, ...]
    elements: str | None = None
    grad: bool = True


@frozen
class Param:
    """A parameter or, with ``buffer=True``, a buffer. ``name`` is relative to its block. trainable: whether it has a gradient."""

    name: str
    dims: tuple[Dim, ...]
    buffer: bool = False
    elements: str | None = None
    trainable: bool = True


@frozen
class Op:
    """One operation. ``inputs`` names tensors made before it in the block, the block's own input, or one beside it.

    kind: embedding | norm | linear | rope | attention | activation | residual | dropout | router | dispatch |
    grouped_linear | combine | mla_assemble | loss | conv2d | ... : the key of a kernel.
    attrs: what the kind needs to know (parallel="column", group="qkv", act="silu", ...).
    module: the name by which recompute and LoRA settings know it ("core_attn", "mlp", "q_proj").
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    params: tuple[Param, ...] = ()
    attrs: FrozenMap = field(default_factory=FrozenMap)
    module: str = ""
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.name, self.kind, self.inputs, self.outputs, self.params, self.attrs, self.module)

    @property
    def of_experts(self) -> bool:
        """Whether it is done by the experts that a rank has, or sends rows to them and back."""
        return self.kind in ("dispatch", "grouped_linear", "combine") or bool(self.attrs.get("experts"))


@frozen
class Block:
    """Ops in execution order, from ``input`` to ``output``. Blocks of one kind differ in nothing but their index.

    role: embedding | layer | between (what runs between two layers) | head | loss (where no module computes it). Pipelines cut between
    blocks of role layer.
    beside: tensors of blocks before that the ops read beside the input, under the names that their makers gave them (an encoder's
    output). lends: names of those that this block makes.
    family: config.json's model_type, where layer code differs by model for the same ops.
    """

    name: str
    ops: tuple[Op, ...]
    input: Tensor
    output: Tensor
    role: str = "layer"
    family: str = ""
    beside: tuple[Tensor, ...] = ()
    lends: tuple[str, ...] = ()
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.name, self.ops, self.role)

    @property
    def params(self) -> tuple[Param, ...]:
        return tuple(param for op in self.ops for param in op.params)


@frozen
class Run:
    """``repeat`` equal blocks in a row."""

    block: Block
    repeat: int = 1


@frozen
class Graph:
    """A model: runs of blocks in execution order.

    sizes: every named dimension that the model fixes ("batch" and "seq" belong to the job).
    tied: pairs of qualified parameter names (block.param) that are one and the same storage; the second is not counted.
    """

    name: str
    runs: tuple[Run, ...]
    sizes: FrozenMap
    tied: tuple[tuple[str, str], ...] = ()
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.name, self.runs, self.sizes, self.tied)

    def blocks(self) -> Iterator[Block]:
        """Every block in execution order, repeats written out."""
        for run in self.runs:
            for _ in range(run.repeat):
                yield run.block

    @property
    def layers(self) -> int:
        """Blocks that a pipeline can cut between."""
        return sum(run.repeat for run in self.runs if run.block.role == "layer")

    def again(self) -> frozenset[str]:
        """Qualified names of parameters that their own block has under another name before."""
        return frozenset(second for first, second in self.tied if first.partition(".")[0] == second.partition(".")[0])

    def used_again(self) -> dict[tuple[str, str], tuple[str, str]]:
        """(block, weight) -> the last (block, weight) that is the same storage, in execution order."""
        pairs = [(_place(first), _place(second)) for first, second in self.tied]
        last = dict(pairs)
        between = {second: last[first] for first, second in pairs if second[0] != last[first][0]}
        return last | between

    def size(self, dim: Dim) -> int:
        """The size of a dimension that the model fixes."""
        if isinstance(dim, int):
            return dim
        value = self.sizes[dim]
        assert isinstance(value, int), dim
        return value

    def numel(self, param: Param) -> int:
        """Elements of a parameter before any layout divides it."""
        return math.prod(self.size(dim) for dim in param.dims)

    def parameter_count(self, *, trainable: bool = False) -> int:
        """Parameters, tied ones once, buffers left out. trainable: of these alone."""
        tied = {second for _, second in self.tied}
        return sum(
            run.repeat * self.numel(param)
            for run in self.runs
            for param in run.block.params
            if not param.buffer and f"{run.block.name}.{param.name}" not in tied and (param.trainable or not trainable)
        )


def _place(name: str) -> tuple[str, str]:
    block, _, param = name.partition(".")
    return block, param
