"""Optimizers: the states that each keeps for the tensors that it steps, and what its step allocates for a while.

An engine says which tensors are stepped (whole parameters, shards, flat partitions) as Groups; everything here follows from
those and from ``job.optimizer``. Sources: torch.optim (adam.py, sgd.py, _multi_tensor and _single_tensor), bitsandbytes
optim/optimizer.py, torchao optim/subclass_8bit.py. States appear inside the first step and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import lru_cache
from itertools import product
from math import prod

from ullage import dtypes
from ullage.errors import Unsupported
from ullage.frozen import frozen
from ullage.job.bind import is_tensor_parallel
from ullage.job.job import Optimizer
from ullage.kernels.step import Context
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, free, round_up
from ullage.memory.rank import LocalParam, Rank
from ullage.model.graph import Run

BLOCK = 256
"""Elements that share a scale in 8-bit states (bitsandbytes blocksize, torchao block_size)."""
SMALLEST_8BIT = 4096
"""Below this many elements 8-bit optimizers keep fp32 states (bitsandbytes min_8bit_size, torchao's new_buffer)."""
SMALLEST_PAGED = 100_000
"""Paged optimizers take managed memory from this many elements on (bitsandbytes get_state_buffer)."""

MOMENTS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
"""What each keeps for a tensor; SGD's momentum and Adafactor's rows and columns depend on more."""


@frozen
class Stepped:
    """A tensor that the optimizer steps, in the type in which it steps it. shape: as the optimizer sees it.

    gradient_parts: tensors of its size in its gradient, of which each op that reads it cuts this one's out (DTensor). summed_when_read:
    its gradient is a term of the sum over ranks, which each op that reads it makes (DTensor). state: the type of its states, where that is
    not the optimizer's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    gradient_parts: int = 1
    summed_when_read: bool = False
    state: str | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@frozen
class Group:
    """Tensors stepped one after another, and how often that pattern repeats (the layers of a model)."""

    tensors: tuple[Stepped, ...]
    repeat: int = 1


Shape = Callable[[tuple[int, ...]], tuple[int, ...]]
"""What an engine makes of a parameter's local shape (its shard's)."""


def stepped(
    rank: Rank,
    context: Context,
    dtype: str,
    shape: Shape = lambda whole: whole,
    whole_gradients: Container[str] = (),
    terms: Container[str] = (),
) -> tuple[Group, ...]:
    """Every trainable parameter of a rank as its own tensor, in model order; ``shape`` cuts a shard out of each.

    whole_gradients: names of those whose gradients tensor parallelism leaves whole; terms: of those whose gradients are terms of a sum.
    Under it those on its mesh come first: the parameters of each mesh are a group of their own (transformers' Trainer, create_optimizer).
    """
    held = {param.name: param for param in rank.params}
    runs = [run for chunk in rank.chunks for run in chunk.runs]
    groups: list[Group] = []
    for on_mesh, run in product((True, False), runs):
        tensors = tuple(
            Stepped(
                name=param.name,
                shape=shape(local_shape(param, run, context)),
                dtype=param.param.elements or dtype,
                gradient_parts=context.tp if param.name in whole_gradients else 1,
                summed_when_read=param.name in terms,
                state=param.param.elements,
            )
            for param in (held.get(f"{run.block.name}.{one.name}") for one in run.block.params)
            if param is not None
            and param.param.trainable
            and on_mesh == (context.tp > 1 and (is_tensor_parallel(param.param) or param.name in terms))
        )
        if tensors:
            groups.append(Group(tensors=tensors, repeat=run.repeat))
    return tuple(groups)


def local_shape(local: LocalParam, run: Run, context: Context) -> tuple[int, ...]:
    """(output features, input features) of a linear; (experts, out, in); else the parameter's own dimensions."""
    dims = local.param.dims
    sizes = [context.size(dim) for dim in dims]
    for op in run.block.ops:
        inner = op.attrs.get("in")
        if (
            local.param in op.params
            and isinstance(inner, tuple)
            and dims[-len(inner) :] == inner
            and len(dims) > len(inner)
        ):
            return prod(sizes[: -len(inner)]), prod(sizes[-len(inner) :])
    return tuple(sizes)


# -- states


@lru_cache(maxsize=1024)
def states(optimizer: Optimizer, groups: tuple[Group, ...], *, momentum: bool = True) -> tuple[tuple[Item, int], ...]:
    """Everything that the optimizer keeps between steps: one Item a kind of state, made of a tensor for each stepped tensor.

    momentum: of SGD, whether there is any.
    """
    pieces: dict[tuple[str, str], list[int]] = {}
    for tensor, repeat in _each(groups):
        for what, numel, dtype in _states_of(optimizer, tensor, momentum):
            pieces.setdefault((what, dtype), []).extend([numel] * repeat)
    return tuple((_state(what, dtype, tuple(numels)), 1) for (what, dtype), numels in pieces.items())


def _each(groups: tuple[Group, ...]) -> Iterator[tuple[Stepped, int]]:
    for group in groups:
        for tensor in group.tensors:
            yield tensor, group.repeat


def _states_of(optimizer: Optimizer, tensor: Stepped, momentum: bool) -> list[tuple[str, int, str]]:
    """(what, elements, type) of each state of one tensor."""
    if optimizer.paged and tensor.numel >= SMALLEST_PAGED:
        return []  # cudaMallocManaged: outside torch's allocator, on the device only while touched
    found: list[tuple[str, int, str]] = []
    state = _state_of(optimizer, tensor)
    for moment in _moments(optimizer, tensor, momentum):
        if optimizer.name == "adafactor":
            found += _factored(tensor, state)
        elif optimizer.state == "8bit" and tensor.numel >= SMALLEST_8BIT:
            found += [(moment, tensor.numel, "uint8"), (f"{moment} scales", -(-tensor.numel // BLOCK), "fp32")]
        else:
            parts = (
                tensor.gradient_parts if optimizer.name == "sgd" else 1
            )  # made as the gradient is (torch/optim/sgd.py)
            found.append((moment, tensor.numel * parts, "fp32" if state == "8bit" else state))
    if optimizer.name in ("adam", "adamw") and optimizer.impl == "fused" and optimizer.state != "8bit":
        found.append(("step", 1, "fp32"))  # on the device only for fused (torch/optim/adam.py _init_group)
    return found


def _state_of(optimizer: Optimizer, tensor: Stepped) -> str:
    return tensor.state if tensor.state is not None and optimizer.state != "8bit" else optimizer.state


def _moments(optimizer: Optimizer, tensor: Stepped, momentum: bool) -> tuple[str, ...]:
    if optimizer.name == "sgd":
        return ("momentum_buffer",) if momentum else ()
    if optimizer.name == "adafactor":
        return ("factors",)
    if optimizer.name == "muon" and len(tensor.shape) < 2:
        return MOMENTS["adamw"]  # torch's Muon takes matrices alone; the rest goes to AdamW
    moments = MOMENTS.get(optimizer.name)
    if moments is None:
        raise Unsupported("is not modelled", key="optimizer", value=optimizer.name, allowed=", ".join(MOMENTS))
    return moments


def _factored(tensor: Stepped, dtype: str) -> list[tuple[str, int, str]]:
    """Adafactor: a row and a column of second moments of a matrix (arXiv 1804.04235, section 3); all of a vector's."""
    *outer, last = tensor.shape
    if not outer:
        return [("second moment", last, dtype)]
    rows = prod(outer)
    return [("second moment rows", rows, dtype), ("second moment columns", tensor.numel // outer[-1], dtype)]


def _state(what: str, dtype: str, numels: tuple[int, ...]) -> Item:
    each = {numel: round_up(dtypes.size_bytes(numel, dtype)) for numel in set(numels)}
    tensors = tuple(each[numel] for numel in numels)
    return Item(
        category="optimizer",
        what=what,
        bytes=sum(tensors),
        pieces=tensors,
        formula=f"{sum(numels)} elements x {dtypes.bits(dtype) / 8:g} B ({dtype}) in {len(tensors)} tensors",
        lives="first optimizer step to the end of the run",
    )


# -- the step


@lru_cache(maxsize=1024)
def step(optimizer: Optimizer, groups: tuple[Group, ...]) -> Node:
    """The temporaries of one optimizer step, gradients and states being live around it.

    foreach: the square root of every second moment at once (_multi_tensor_adam). for-loop: one tensor at a time, whose
    denominator lives until the next one's replaces it (_single_tensor_adam). fused and 8-bit kernels: none. Before them, whatever
    the optimizer: what is cut out of gradients that are whole, or summed of terms.
    """
    if not _has_roots(optimizer):
        return Sequence(_cuts(groups, 1), "optimizer step")
    if optimizer.impl == "foreach":
        return Sequence([*_cuts(groups, _READS), *_foreach(optimizer, groups)], "optimizer step")
    return Sequence(_for_loop(optimizer, groups), "optimizer step")


def _has_roots(optimizer: Optimizer) -> bool:
    return optimizer.name in ("adam", "adamw") and optimizer.state != "8bit" and optimizer.impl != "fused"


_READS = 2
"""How often the op that reads the gradient most does so: addcmul, for its square; DTensor cuts it for each (tensor/_dispatch.py)."""


def _cuts(groups: tuple[Group, ...], reads: int) -> list[Node]:
    made = [
        (_cut(tensor.numel, tensor.dtype), reads * repeat)
        for tensor, repeat in _each(groups)
        if tensor.gradient_parts > 1 or tensor.summed_when_read
    ]
    return [*(alloc(item, count) for item, count in made), *(free(item, count) for item, count in made)]


def temporaries(optimizer: Optimizer) -> tuple[str, ...]:
    """Element types of what stepping one tensor alone allocates, each as large as the tensor (an optimizer inside the backward)."""
    if not _has_roots(optimizer):
        return ()
    return (optimizer.state,) if optimizer.impl == "foreach" else (optimizer.state,) * 2


def _foreach(optimizer: Optimizer, groups: tuple[Group, ...]) -> list[Node]:
    counts: dict[tuple[int, str], int] = {}
    for tensor, repeat in _each(groups):
        key = (tensor.numel, _state_of(optimizer, tensor))
        counts[key] = counts.get(key, 0) + repeat
    made = [(_root(numel, dtype), count) for (numel, dtype), count in counts.items()]
    return [*(alloc(item, count) for item, count in made), *(free(item, count) for item, count in made)]


def _for_loop(optimizer: Optimizer, groups: tuple[Group, ...]) -> list[Node]:
    nodes: list[Node] = []
    before: Item | None = None
    for group in groups:
        once, before = _one_by_one(optimizer, group, before)
        nodes.append(once)
        if group.repeat > 1:
            again, before = _one_by_one(optimizer, group, before)
            nodes.append(Repeat(group.repeat - 1, again))
    if before is not None:
        nodes.append(free(before))
    return nodes


def _one_by_one(optimizer: Optimizer, group: Group, before: Item | None) -> tuple[Node, Item | None]:
    nodes: list[Node] = []
    for tensor in group.tensors:
        nodes += _cuts((Group(tensors=(tensor,)),), _READS)
        dtype = _state_of(optimizer, tensor)
        root, denominator = _root(tensor.numel, dtype), _denominator(tensor.numel, dtype)
        nodes += [alloc(root), alloc(denominator), free(root)]
        if before is not None:
            nodes.append(free(before))
        before = denominator
    return Sequence(nodes), before


@lru_cache(maxsize=4096)
def _cut(numel: int, dtype: str) -> Item:
    return _temporary("gradient as DTensor redistributes it", numel, dtype)


@lru_cache(maxsize=4096)
def _root(numel: int, dtype: str) -> Item:
    return _temporary("square root of the second moment", numel, dtype)


@lru_cache(maxsize=4096)
def _denominator(numel: int, dtype: str) -> Item:
    return _temporary("denominator of the update", numel, dtype)


def _temporary(what: str, numel: int, dtype: str) -> Item:
    return Item(
        category="transient",
        what=what,
        bytes=round_up(dtypes.size_bytes(numel, dtype)),
        formula=f"{numel} elements x {dtypes.bits(dtype) / 8:g} B ({dtype})",
        lives="optimizer step",
    )


# -- clipping


@lru_cache(maxsize=1024)
def clip(tensors: int) -> Node:
    """torch.nn.utils.clip_grad_norm_: one scalar a gradient, their stack and its norm; gradients are scaled in place."""
    scalar = Item(
        category="transient", what="norm of one gradient", bytes=round_up(4), formula="4 B (fp32)", lives="clipping"
    )
    stacked = Item(
        category="transient",
        what="norms of all gradients",
        bytes=round_up(4 * tensors),
        formula=f"{tensors} gradients x 4 B (fp32)",
        lives="clipping",
    )
    live = [(scalar, tensors + 2), (stacked, 1)]
    return Sequence([*(alloc(*one) for one in live), *(free(*one) for one in live)], "gradient clipping")


def count(groups: tuple[Group, ...]) -> int:
    """How many tensors the optimizer steps."""
    return sum(len(group.tensors) * group.repeat for group in groups)
