"""FSDP2's parameter groups: which parameters are gathered together, and how large each of their buffers is.

Every parameter is sharded for itself on its first dimension and padded to a multiple of the mesh (torch
distributed/fsdp/_fully_shard/_fsdp_param.py ``_init_sharded_param``); a group only shares the collectives' buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ullage import dtypes
from ullage.frozen import frozen
from ullage.memory.program import Item, round_up

COMPUTE_STREAM = 0
ALL_GATHER_STREAM = 1
REDUCE_STREAM = 2
ROOT = "root"


@frozen
class Shape:
    """One parameter on one rank: ``rows`` x ``columns`` after tensor and expert parallelism, sharded over ``shards`` ranks by row.

    gathered_as: its type in the all-gather where that is not the unit's (float8 all-gather). gradient_parts: tensor-parallel ranks
    whose parts its gradient holds beside its own (DTensor's embedding). trainable: whether it has one. original: the type of its
    shard where that is not the unit's (a frozen base beside adapters). stepped: elements of the shard that the optimizer is given,
    where those are not all (adapters in a flat parameter).
    """

    name: str
    rows: int
    columns: int
    shards: int
    gathered_as: str | None = None
    gradient_parts: int = 1
    trainable: bool = True
    original: str | None = None
    stepped: int | None = None

    @property
    def padded(self) -> int:
        """Elements of one shard as it is allocated: every rank has room for the largest."""
        return -(-self.rows // self.shards) * self.columns

    @property
    def whole(self) -> int:
        """Elements of the gathered parameter, padding included."""
        return self.padded * self.shards


@frozen
class Types:
    """original: of the shards; compute: of gathered parameters and their gradients; reduce: of the reduce-scatter."""

    original: str
    compute: str
    reduce: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """Parameters that are gathered and reduced together. ``reshards``: dropped after the forward and gathered again.

    flat: one flat parameter stands for all (FSDP1): the all-gather writes it in place, and autograd joins the parts' gradients.
    apart: units of modules inside this one, in the order of the forward (adapters, where FSDP1 wraps each by itself).
    on_host: shards and their gradients are there (CPUOffloadPolicy); the device has copies, for one all-gather and one reduction.
    """

    name: str
    shapes: tuple[Shape, ...]
    types: Types
    reshards: bool = True
    flat: bool = False
    apart: tuple[Unit, ...] = ()
    kept_shards: int = 0  # reshard_after_forward: n keeps a shard over n ranks, in the compute type
    on_host: bool = False

    @property
    def whole_numel(self) -> int:
        return _whole(self.shapes)

    @property
    def reduced(self) -> tuple[Shape, ...]:
        """Those whose gradients are reduced (FSDP1's flat parameter is trained as a whole)."""
        return tuple(shape for shape in self.shapes if shape.trainable)

    @property
    def sharded(self) -> bool:
        return any(shape.shards > 1 for shape in self.shapes)

    def _gather_bytes(self, shapes: tuple[Shape, ...], *, shard: bool) -> int:
        return sum(
            dtypes.size_bytes(shape.padded if shard else shape.whole, shape.gathered_as or self.types.compute)
            for shape in shapes
        )

    def _item(self, category: str, what: str, numel: int, dtype: str, why: str, lives: str, stream: int = 0) -> Item:
        return Item(
            category=category,
            what=what,
            bytes=round_up(dtypes.size_bytes(numel, dtype)),
            formula=f"{numel} elements x {dtypes.bits(dtype) / 8:g} B ({dtype}); {why}",
            lives=lives,
            stream=stream,
        )

    @property
    def gradient_leaves(self) -> bool:
        """Whether a reduced gradient is gone once it is on the host. FSDP1 has it until the backward ends, for another backward to add to
        (_runtime_utils.py, _accumulate_sharded_grad; _flat_param.py, prepare_gradient_for_optim)."""
        return self.on_host and not self.flat

    @cached_property
    def cast(self) -> Item | None:
        """What is made of the shard for an all-gather: its copy in the compute type, where that is another or the shard is on the host."""
        if self.on_host:
            return self._fetched()
        differ = tuple(one for one in self.shapes if (one.original or self.types.original) != self.types.compute)
        if not differ:
            return None
        return Item(
            category="transient",
            what=f"shard of {self.name} cast for its all-gather",
            bytes=round_up(self._gather_bytes(differ, shard=True)),
            formula=f"padded shard of {_padded(differ)} elements ({self.types.compute})",
            lives="one all-gather",
            stream=ALL_GATHER_STREAM,
        )

    def _fetched(self) -> Item:
        """Each parameter's shard comes as it is and is cast by itself (_fsdp_param.py, all_gather_inputs; _flat_param.py,
        _use_low_precision_shard); all wait for the all-gather."""
        sizes = [round_up(self._gather_bytes((shape,), shard=True)) for shape in self.shapes]
        as_they_are = [
            round_up(dtypes.size_bytes(shape.padded, original))
            for shape in self.shapes
            if (original := shape.original or self.types.original) != self.types.compute
        ]
        return Item(
            category="transient",
            what=f"shard of {self.name} fetched for its all-gather",
            bytes=sum(sizes) + max(as_they_are, default=0),
            formula=f"padded shards of {_padded(self.shapes)} elements ({self.types.compute})"
            + (", and the largest as it is on the host" if as_they_are else ""),
            lives="one all-gather",
            stream=ALL_GATHER_STREAM,
        )

    @cached_property
    def staging(self) -> Item | None:
        """What the all-gather writes, before the parameters are copied out of it."""
        if not self.sharded or self.flat:
            return None
        return Item(
            category="gathered",
            what=f"all-gather output of {self.name}",
            bytes=round_up(self._gather_bytes(self.shapes, shard=False)),
            formula=f"padded parameters of the group, {self.whole_numel} elements ({self.types.compute})",
            lives="forward: until the next group's copy-out; backward: from its prefetch until its own copy-out",
            stream=ALL_GATHER_STREAM,
        )

    @cached_property
    def gathered(self) -> tuple[Item, ...]:
        """The unsharded parameters, each its own storage."""
        return tuple(
            self._item(
                "gathered",
                f"unsharded {shape.name}",
                shape.whole,
                shape.gathered_as or self.types.compute,
                f"{shape.rows} rows padded to {shape.shards} ranks x {shape.columns}",
                "its group's forward, and again its backward",
            )
            for shape in self.shapes
        )

    @cached_property
    def kept(self) -> Item | None:
        """reshard_after_forward=n: the shard over n ranks that stays between forward and backward."""
        if not self.kept_shards:
            return None
        numel = sum(-(-shape.whole // self.kept_shards) for shape in self.shapes)
        why = f"parameters / {self.kept_shards} (reshard_after_forward)"
        return self._item(
            "gathered",
            f"shard of {self.name} kept after forward",
            numel,
            self.types.compute,
            why,
            "forward to backward",
        )

    @cached_property
    def reduce_input(self) -> Item | None:
        """The gradients of the group in the reduction's type, ordered by rank."""
        if self.flat or (not self.sharded and self.types.reduce == self.types.compute):
            return None
        return self._item(
            "communication",
            f"reduce-scatter input of {self.name}",
            _whole(self.reduced),
            self.types.reduce,
            "padded gradients of the group",
            "end of its backward to the end of the next group's",
        )

    @cached_property
    def joined_gradient(self) -> Item:
        """FSDP1: the flat parameter's gradient, which autograd concatenates from those of its views."""
        why = "concatenated from the gradients of its parts"
        lives = "end of its backward to its reduction"
        return self._item(
            "gradients", f"flat gradient of {self.name}", _whole(self.reduced), self.types.compute, why, lives
        )

    @cached_property
    def cast_gradient(self) -> Item | None:
        """FSDP1: the flat gradient in the reduction's type."""
        if self.types.reduce == self.types.compute:
            return None
        what = f"flat gradient of {self.name} cast for its reduction"
        return self._item(
            "communication", what, _whole(self.reduced), self.types.reduce, "cast", "one reduction", REDUCE_STREAM
        )

    @cached_property
    def reduce_output(self) -> Item | None:
        """The reduced shard in the reduction's type, where it is not the gradient itself."""
        if self.types.reduce == self.types.original:
            return None
        return self._item(
            "communication",
            f"reduce-scatter output of {self.name}",
            _padded(self.reduced),
            self.types.reduce,
            "padded shard",
            "until it is cast to the parameters' type",
            REDUCE_STREAM,
        )

    @cached_property
    def gradient(self) -> Item:
        """The sharded gradients: views of one flat buffer for the group."""
        return self._item(
            "gradients",
            f"sharded gradients of {self.name}",
            _padded(self.reduced),
            self.types.original,
            "padded shard, one buffer for the group",
            "until it is on the host" if self.gradient_leaves else "its group's backward until zero_grad",
            REDUCE_STREAM,
        )

    @cached_property
    def added(self) -> Item:
        """The gradients of a later micro-batch, before they are added to those that are there."""
        return self._item(
            "gradients",
            f"sharded gradients of {self.name}, one micro-batch",
            _padded(self.reduced),
            self.types.original,
            "padded shard",
            "until added",
            REDUCE_STREAM,
        )

    def cut_gradient(self, name: str, *, accumulated: bool) -> Item | None:
        """What is cut out of a gradient that holds more parts than its parameter, for the reduction (_get_grad_inner_tensor)."""
        if all(shape.name != name or shape.gradient_parts == 1 for shape in self.shapes):
            return None
        return self.own_gradient(name, self.types.reduce if accumulated else self.types.compute)

    def own_gradient(self, name: str, dtype: str) -> Item:
        """A gradient of its parameter's size, before it is sharded."""
        (shape,) = (shape for shape in self.shapes if shape.name == name)
        return self._item(
            "gradients",
            f"unsharded gradient of {name}",
            shape.rows * shape.columns,
            dtype,
            "this rank's part of a whole gradient",
            "end of its group's backward to its reduction",
        )

    @cached_property
    def accumulated(self) -> tuple[Item, ...]:
        """Unsharded gradients in the reduction's type, where micro-batches are not reduced one by one."""
        return tuple(
            self._item(
                "gradients",
                f"unsharded gradient of {shape.name}",
                shape.rows * shape.columns * shape.gradient_parts,
                self.types.compute if self.flat else self.types.reduce,
                "accumulated without reduction",
                "first backward to the reduction",
            )
            for shape in self.reduced
        )


def _padded(shapes: tuple[Shape, ...]) -> int:
    """Elements of one shard of each."""
    return sum(shape.padded for shape in shapes)


def _whole(shapes: tuple[Shape, ...]) -> int:
    """Elements of all that is gathered."""
    return sum(shape.whole for shape in shapes)
