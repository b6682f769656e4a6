"""What every stage keeps all the time: weights, masters, moments, workspaces, the batch."""

from __future__ import annotations

from ullage import dtypes
from ullage.engines import optimizer as optimizers
from ullage.engines.base import cublas_workspaces, images, sized
from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held
from ullage.engines.optimizer import Group, Stepped
from ullage.hardware import overheads
from ullage.job.job import Job, Optimizer
from ullage.kernels.step import Context
from ullage.memory.program import Item, Node, Sequence, alloc, free, round_up

Static = list[tuple[Item, int]]


def optimizer_of(job: Job, knobs: Knobs) -> Optimizer:
    """The job's optimizer with the state's type that DeepSpeed's own keys ask for."""
    own = job.optimizer
    return (
        own if own.state == knobs.state else Optimizer(name=own.name, impl=own.impl, state=knobs.state, paged=own.paged)
    )


def stepped(sizes: list[int], knobs: Knobs) -> tuple[Group, ...]:
    """Flat tensors of these sizes as the optimizer sees them."""
    tensors = tuple(Stepped(name="flat partition", shape=(size,), dtype=knobs.master) for size in sizes if size)
    return (Group(tensors=tensors),)


def moments(job: Job, knobs: Knobs, groups: tuple[Group, ...]) -> Static:
    return list(optimizers.states(optimizer_of(job, knobs), groups))


def flat_weights(job: Job, held: Held) -> Static:
    """Flat groups in the parameters' own type (the module's parameters are views), and frozen parameters whole, as they were loaded."""
    dtype = job.precision.params
    found = [(sized("parameters", f"flat parameters ({name})", flat.padded, dtype), 1) for name, flat in held.flats]
    if held.frozen:
        whole = sized("parameters", "frozen parameters", held.frozen, dtype, pieces=held.frozen_numels)
        found.append((whole, 1))
    return [*found, *((item, 1) for item in held.quantised)]


def beside_the_model(job: Job, context: Context) -> Static:
    """The batch, and cuBLAS' workspaces."""
    tokens = job.data.seq_len * job.data.micro_batch
    batch = Item(
        category="input",
        what="token ids, labels, loss mask, positions",
        bytes=round_up(tokens * (8 + 8 + 4 + 8)),
        formula=f"{tokens} tokens x (8 + 8 + 4 + 8) B",
        lives="one micro-batch",
    )
    blas = cublas_workspaces(overheads.cublas_workspace_bytes(job.cluster.device, hopper_only=True))
    return [(one, 1) for one in (images(context) or batch, *blas)]


def transient(what: str, numel: int, dtype: str, lives: str, why: str = "") -> Item:
    return sized("transient", what, numel, dtype, lives=lives, why=why)


def zeros(numel: int, dtype: str) -> Item:
    return transient("zero gradients", numel, dtype, "the opening step")


def opening_step(job: Job, knobs: Knobs, sizes: list[int], gradients: list[Item], moments: Static) -> Node:
    """The optimizer steps on zeros when its wrapper is made, and its moments stay (initialize_optimizer_states)."""
    made = [alloc(item, count) for item, count in moments]
    stepped = optimizer_step(job, knobs, sizes)
    return Sequence([*(alloc(one) for one in gradients), *made, stepped, *(free(one) for one in gradients)])


def norm_of_one_slice(elements: int, dtype: str) -> Node:
    """The norm is taken in double precision, one gradient slice after another (get_norm_dtype, runtime/utils.py)."""
    return pulse(
        transient("double-precision copy of a gradient slice", elements, "fp64", "gradient norm"), "gradient norm"
    )


def overflow_check(elements: int, knobs: Knobs) -> Node:
    """has_inf_or_nan of the largest slice, in the versions that make copies for it."""
    copies = sized(
        "transient",
        "copies of a gradient slice for the overflow check",
        elements * knobs.overflow_bytes,
        "int8",
        why=f"{elements} elements x {knobs.overflow_bytes} B",
        lives="overflow check",
    )
    return pulse(copies, "overflow check") if knobs.overflow_bytes else Sequence([])


def pulse(item: Item, moment: str | None = None) -> Node:
    """Allocated and freed at once."""
    return Sequence([alloc(item), free(item)] if item.bytes else [], moment)


def optimizer_step(job: Job, knobs: Knobs, sizes: list[int]) -> Node:
    return optimizers.step(optimizer_of(job, knobs), stepped(sizes, knobs))


def bytes_of(numel: int, dtype: str) -> int:
    return dtypes.size_bytes(numel, dtype)
