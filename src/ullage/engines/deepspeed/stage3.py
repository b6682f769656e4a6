"""Stage 3 (DeepSpeedZeroOptimizer_Stage3): weights in shards, gathered module by module; one permanent buffer of gradient shards.

Sources: runtime/zero/stage3.py, partition_parameters.py, parameter_offload.py. gathers.py says which parameters are whole, and when.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as ListLike
from functools import lru_cache

from ullage.engines.base import sized
from ullage.engines.deepspeed import states
from ullage.engines.deepspeed.buckets import Bucket, Flush, hooked_backward
from ullage.engines.deepspeed.gathers import Gathers, persistent_numel
from ullage.engines.deepspeed.options import NEWEST, Knobs
from ullage.engines.deepspeed.partition import Held, data_parallel
from ullage.engines.deepspeed.passes import Passes
from ullage.engines.deepspeed.states import Static
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory.chunk import Element, Replayer
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, free
from ullage.memory.rank import Rank
from ullage.memory.storage import Items
from ullage.model.graph import Graph


def shard_numel(held: Held) -> int:
    """Elements of this rank's shards: each parameter is padded to a multiple of its ranks."""
    return sum(-(-numel // flat.shards) for _, flat in held.flats for numel in flat.numels)


def static(job: Job, held: Held, knobs: Knobs) -> Static:
    share = shard_numel(held)
    shards = data_parallel(job)
    found: Static = []
    if job.offload.params == "none":
        found.append((sized("parameters", "parameter shards", share, job.precision.params, why="one buffer"), 1))
        if held.frozen:
            pieces = tuple(-(-numel // shards) for numel in held.frozen_numels)
            frozen = sized("parameters", "frozen parameter shards", sum(pieces), job.precision.params, pieces=pieces)
            found.append((frozen, 1))
    found += [(item, 1) for item in _between_steps(job, held, knobs)]
    if knobs.contiguous_gradients:
        bucket = sized("communication", "reduction bucket", knobs.reduce_bucket, knobs.reduce, why="reduce_bucket_size")
        found.append((bucket, 1))
    if job.offload.optimizer != "none":
        return found
    found += [
        (sized("optimizer", "master shards", share, knobs.master, why="a copy of its own, in fp32 too"), 1),
        (sized("gradients", "gradient shards", share, knobs.grads, why="permanent, the accumulator too"), 1),
    ]
    return found


@lru_cache(maxsize=512)
def _between_steps(job: Job, held: Held, knobs: Knobs) -> tuple[Item, ...]:
    """Whole from one optimizer step's end to the next one's beginning: small parameters."""
    small = persistent_numel(held, knobs)
    if not small:
        return ()
    why = f"each at most {knobs.persistence_threshold} elements"
    dtype, lives = job.precision.params, "between optimizer steps"
    return (sized("gathered", "persistent parameters", small, dtype, why=why, lives=lives),)


def moments(job: Job, held: Held, knobs: Knobs) -> Static:
    """Adam's moments and their like: made by the first step."""
    if job.offload.optimizer != "none":
        return []
    return states.moments(job, knobs, states.stepped(stepped_sizes(held, knobs), knobs))


def zero_gradients(job: Job, held: Held, knobs: Knobs) -> list[Item]:
    """What the opening step steps on, one sub-group after another."""
    return [states.zeros(max(stepped_sizes(held, knobs), default=0), knobs.master)]


def stepped_sizes(held: Held, knobs: Knobs) -> list[int]:
    """Elements of the sub-groups that are stepped one after another: shards of parameters, until there are as many as the size or more
    (_create_fp16_sub_groups)."""
    found, size = [], 0
    for _, flat in held.flats:
        for numel in flat.numels:
            size += -(-numel // flat.shards)
            if size >= knobs.sub_group:
                found.append(size)
                size = 0
    return [*found, size] if size else found


def step(job: Job, graph: Graph, rank: Rank, held: Held, knobs: Knobs, replayer: Replayer) -> Node:
    one = _Stage3(job=job, rank=rank, held=held, knobs=knobs, replayer=replayer)
    passes = Passes(
        job=job,
        rank=rank,
        replayer=replayer,
        forward=one.first_forward,
        backward=one.backward,
        forward_again=one.forward,
    ).all_micro_batches()
    (chunk,) = rank.chunks
    second = Gathers(job, rank, knobs, replayer.elements(chunk)).second_shards()
    dropped = Sequence([free(item) for item in second if item.bytes])
    between = _between_steps(job, held, knobs)
    let_go = Sequence([free(item) for item in between])
    gathered_again = Sequence([alloc(item) for item in between], "gather of the persistent parameters")
    return Sequence([passes, let_go, *_step(job, held, knobs), gathered_again, dropped])


@frozen
class _Stage3:
    job: Job
    rank: Rank
    held: Held
    knobs: Knobs
    replayer: Replayer

    def first_forward(self, elements: ListLike[Element]) -> Node:
        return Gathers(self.job, self.rank, self.knobs, elements, first=True).forward(self.replayer)

    def forward(self, elements: ListLike[Element]) -> Node:
        return Gathers(self.job, self.rank, self.knobs, elements).forward(self.replayer)

    def backward(self, elements: ListLike[Element], first: bool) -> Node:
        first = first and self.knobs.hpz > 1  # they do not differ otherwise
        items = tuple(self.replayer.items(element) for element in elements)
        return _backward(self.job, self.rank, self.held, self.knobs, self.replayer, tuple(elements), first, items)


@lru_cache(maxsize=64)
def _backward(
    job: Job,
    rank: Rank,
    held: Held,
    knobs: Knobs,
    replayer: Replayer,
    elements: tuple[Element, ...],
    first: bool,
    _items: tuple[Items, ...],
) -> Node:
    """The accumulator is there all the time. _items: of the elements, so that what is kept frees what their forwards have made."""
    gathers = Gathers(job, rank, knobs, elements, first=first)
    bucket = Bucket(held, (), knobs)

    def reduced(flush: Flush | None) -> list[Node]:
        return [] if flush is None else [_reduction(job, held, knobs, flush.filled)]

    def hook(place: int, numel: int) -> Node:
        return Sequence([*reduced(bucket.meets(place, numel)), gathers.turn(place)])

    hooked = hooked_backward(job, rank, replayer, elements, hook)
    inner = gathers.backward(node for _, node in hooked)
    return Sequence([inner, *reduced(bucket.empties())])


@lru_cache(maxsize=1024)
def _reduction(job: Job, held: Held, knobs: Knobs, elements: int) -> Node:
    """reduce_scatter_coalesced concatenates everything in the bucket.

    A single gradient that divides evenly (one larger than the bucket) is reduced in place: it is there itself instead."""
    lives = "gradient reduction"
    nodes = [states.pulse(states.transient("concatenated bucket", elements, knobs.reduce, lives))]
    if job.offload.optimizer != "none":
        largest = min(held.dense.largest // held.dense.shards, _HOST_NORM_ELEMENTS)
        nodes.append(states.norm_of_one_slice(largest, "fp64"))
    return Sequence(nodes, lives)


_HOST_NORM_ELEMENTS = 250_000_000
"""With offload norms are taken of at most so many elements at once (stage3.py)."""


def _step(job: Job, held: Held, knobs: Knobs) -> list[Node]:
    if job.offload.optimizer == "nvme" and knobs.version >= NEWEST:
        # _finalize_offload_gradient_accumulation casts all of them on the device before the first is written
        cast = states.transient(
            f"{knobs.master} gradients to be written", shard_numel(held), knobs.master, "until they are in files"
        )
        return [states.pulse(cast, "gradients written to files"), Sequence([], "optimizer step on the host")]
    if job.offload.optimizer != "none":
        return [Sequence([], "optimizer step on the host")]
    share = shard_numel(held)
    largest = max((-(-numel // flat.shards) for _, flat in held.flats for numel in flat.numels), default=0)
    checks: list[Node] = [states.norm_of_one_slice(largest, "fp64")]
    if job.precision.params == "fp16":
        masks = sized("transient", "isinf and isnan of the gradient shards", 3 * share, "bool", lives="overflow check")
        checks.insert(0, states.pulse(masks, "overflow check"))
    alike = ((size, len(list(same))) for size, same in itertools.groupby(stepped_sizes(held, knobs)))
    return [*checks, *(Repeat(count, _sub_group_step(job, knobs, size)) for size, count in alike)]


def _sub_group_step(job: Job, knobs: Knobs, size: int) -> Node:
    inner = states.optimizer_step(job, knobs, [size])
    if knobs.master == knobs.grads:
        flat = states.transient("flattened gradients of one sub-group", size, knobs.grads, "optimizer step")
        return Sequence([alloc(flat), inner, free(flat)], "optimizer step")
    flat = states.transient("flattened gradients of one sub-group", size, knobs.grads, "until they are cast")
    cast = states.transient(f"{knobs.master} gradients of one sub-group", size, knobs.master, "optimizer step")
    return Sequence([alloc(flat), alloc(cast), free(flat), inner, free(cast)], "optimizer step")
