"""Stages 1 and 2 (DeepSpeedZeroOptimizer): weights whole, masters and moments in flat partitions; stage 2 keeps its own gradients alone.

Source: runtime/zero/stage_1_and_2.py. Gradients go through a bucket of ``reduce_bucket_size`` elements, which is allocated whole at the
first gradient; a bucket with slices of more than one owner is concatenated once more for its all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike

from ullage.engines.base import sized
from ullage.engines.deepspeed import states
from ullage.engines.deepspeed.buckets import Bucket, Flush, hooked_backward
from ullage.engines.deepspeed.grads import whole_gradients
from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.owner import Owner, owner
from ullage.engines.deepspeed.partition import Held
from ullage.engines.deepspeed.passes import Backward, Passes, plain_forward, uses_pipeline_engine
from ullage.engines.deepspeed.states import Static
from ullage.frozen import replace
from ullage.job.job import Job
from ullage.memory.chunk import Element, Replayer
from ullage.memory.program import EMPTY, Item, Node, Sequence, alloc, free
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def static(job: Job, held: Held, knobs: Knobs) -> Static:
    found = states.flat_weights(job, held)
    if job.offload.optimizer != "none":
        largest = max(held.numels, default=0)
        why = "the largest parameter's, temp_grad_buffer_for_gpu_offload"
        buffer = sized("communication", "gradient on its way from the host", largest, job.precision.params, why=why)
        return [*found, (buffer, 1)]
    for name, flat in held.flats:
        master = sized("optimizer", f"master partition ({name})", flat.padded, knobs.master, shards=flat.shards)
        found.append((master, 1))
    return found


def stepped_sizes(held: Held, knobs: Knobs) -> list[int]:
    """Elements of the flat tensors that the optimizer steps."""
    return [flat.partition for _, flat in held.flats]


def moments(job: Job, held: Held, knobs: Knobs) -> Static:
    """Adam's moments and their like: made by the first step."""
    if job.offload.optimizer != "none":
        return []
    return states.moments(job, knobs, states.stepped(stepped_sizes(held, knobs), knobs))


def zero_gradients(job: Job, held: Held, knobs: Knobs) -> list[Item]:
    """What the opening step steps on."""
    return [states.zeros(held.partition, knobs.master)]


def step(job: Job, graph: Graph, rank: Rank, held: Held, knobs: Knobs, replayer: Replayer) -> Node:
    """The step of the data-parallel rank that needs most; of equals the one whose passes do."""
    found = steps(job, graph, rank, held, knobs, replayer)
    return max(found, key=lambda node: (node.peak_bytes, node.children[0].peak_bytes))


def steps(job: Job, graph: Graph, rank: Rank, held: Held, knobs: Knobs, replayer: Replayer) -> list[Sequence]:
    """Of the data-parallel ranks that may need most: the first, the last, and the one with the most own gradients."""
    shards = [flat.shards for _, flat in held.flats]
    most = held.dense.shards if held.dense.numels else max(shards, default=1)
    indices = {0, most - 1, max(range(most), key=lambda index: _owned(held, index))}
    owners = [owner(job, graph, rank, held, knobs, replayer, index) for index in sorted(indices)]
    if not _reduces_as_they_come(job, knobs):
        return [_stage_1(one) for one in owners]
    whole = job.engine.zero_stage == 1 and job.data.grad_accum > 1
    return [_overlapping_stage_1(one) if whole else _stage_2(one) for one in owners]


def _reduces_as_they_come(job: Job, knobs: Knobs) -> bool:
    """Stage 2; stage 1 too with overlap_comm, which the pipeline engine and versions before 0.7 switch off (engine.py)."""
    overlaps = knobs.overlap_comm and knobs.stage1_buckets and not uses_pipeline_engine(job)
    return job.engine.zero_stage == 2 or overlaps


def _owned(held: Held, index: int) -> int:
    return sum(flat.own(index % flat.shards).whole for _, flat in held.flats)


# -- stage 2: gradients are reduced as they come


def _stage_2(one: Owner) -> Sequence:
    def backward(elements: ListLike[Element], first: bool) -> Node:
        return _reducing_backward(one, elements, first)

    passes = Passes(
        job=one.job, rank=one.rank, replayer=one.replayer, forward=plain_forward(one.replayer), backward=backward
    ).all_micro_batches()
    return Sequence([passes, *_step(one, Sequence([free(one.own)]) if not one.offloads else Sequence([]))])


def _reducing_backward(one: Owner, elements: ListLike[Element], first: bool, whole: _Whole | None = None) -> Node:
    hooks = _Hooks(one, first, whole or {})
    passes = hooked_backward(one.job, one.rank, one.replayer, elements, hooks.gradient, added=bool(whole))
    nodes = [node for _, node in passes]
    return Sequence([*nodes, hooks.end()])


_Whole = Mapping[int, Item]


class _Hooks:
    """The gradients' hooks in one backward. ``first``: it is the first that reduces. ``whole``: gradients that earlier ones have left, by
    their parameters' places, with the bucket."""

    def __init__(self, one: Owner, first: bool, whole: _Whole) -> None:
        self.one = one
        self.first = first
        self.whole = whole
        self.bucket = Bucket(one.held, one.owns, one.knobs)
        self.started, self.moved = bool(whole), False
        self.alone: Item | None = None
        self.built: dict[tuple[Flush, bool], Node] = {}

    def gradient(self, place: int, numel: int) -> Node:
        nodes: list[Node] = [] if self.started else [alloc(self.one.bucket)]
        self.started = True
        flush = self.bucket.meets(place, numel)
        if flush is not None:
            nodes.append(self._flush(flush))
        if self.whole:
            nodes.append(free(self.whole[place]))
        if numel > self.one.knobs.reduce_bucket:
            params = self.one.job.precision.params
            self.alone = states.transient(
                "gradient larger than the bucket", numel, params, "its hook to its reduction", why="reduced alone"
            )
            nodes.append(alloc(self.alone))
        return Sequence(nodes) if nodes else EMPTY

    def end(self) -> Node:
        flush = self.bucket.empties()
        nodes = [self._flush(flush)] if flush is not None else []
        # Later micro-batches' own gradients are added to the first one's here, unless the buffer takes them as they come.
        accumulated = [] if self.first or self.one.sums_in_fp32 or self.one.offloads else [free(self.one.own)]
        return Sequence([*nodes, *accumulated, free(self.one.bucket)], "gradient reduction")

    def _flush(self, flush: Flush) -> Node:
        takes = flush.owns and (self.one.offloads or not self.moved)
        self.moved = self.moved or flush.owns
        alone, self.alone = self.alone, None
        if alone is not None:  # an item of its own, as it is there from one hook to the next
            return Sequence([*self._reduced(flush, takes), free(alone)], "gradient reduction")
        if (flush, takes) not in self.built:
            self.built[flush, takes] = Sequence(self._reduced(flush, takes), "gradient reduction")
        return self.built[flush, takes]

    def _reduced(self, flush: Flush, takes: bool) -> list[Node]:
        """A bucket's reduction; what is this rank's own is then copied into a buffer of its own, or goes to the host."""
        one = self.one
        lives = "gradient reduction"
        own: list[Node] = (
            [alloc(one.own)] if takes and not one.offloads and (self.first or not one.sums_in_fp32) else []
        )
        live = []
        if flush.spans or one.sums_in_fp32:
            why = "slices of more than one owner, or of a sum in fp32"
            live.append(states.transient("concatenated bucket", flush.filled, one.bucket_dtype, lives, why=why))
        if one.knobs.reduce != one.bucket_dtype:
            live.append(states.transient("bucket in the type of the all-reduce", flush.filled, one.knobs.reduce, lives))
        if one.sums_in_fp32:
            own, before = [], own  # the buffer is looked up before the reduction
            live.append(states.transient("fp32 copy of one slice", min(flush.filled, one.largest_slice), "fp32", lives))
            return [*before, *_pulses(live)]
        if takes and one.offloads:
            own = [states.norm_of_one_slice(min(flush.filled, one.largest_slice), "fp64")]
        return [*_pulses(live), *own]


def _pulses(items: list[Item]) -> list[Node]:
    return [*(alloc(item) for item in items), *(free(item) for item in reversed(items))]


# -- stage 1: gradients stay whole until the last micro-batch


def _stage_1(one: Owner) -> Sequence:
    grads = whole_gradients(one.job, one.graph, one.rank, one.replayer)
    bucket = _bucket_at_the_first_gradient(one) if one.knobs.stage1_buckets else Sequence([])

    def backward(elements: ListLike[Element], first: bool) -> Node:
        if not first or not bucket.changes:
            return grads.backward(elements, first)
        return Sequence([grads.backward(elements[-1:], first), bucket, grads.backward(elements[:-1], first)])

    passes = Passes(
        job=one.job, rank=one.rank, replayer=one.replayer, forward=plain_forward(one.replayer), backward=backward
    ).all_micro_batches()
    if not one.knobs.stage1_buckets:
        return Sequence([grads.before, passes, *_flattened_reduction(one, grads.items)])
    at_the_end = Sequence([] if bucket.changes else [alloc(one.bucket)])
    reduction = Sequence([at_the_end, *_boundary(one, grads.items), free(one.bucket)], "gradient reduction")
    after = Sequence([] if one.offloads else [free(one.own)])
    return Sequence([grads.before, passes, reduction, *_step(one, after)])


def _overlapping_stage_1(one: Owner) -> Sequence:
    """With overlap_comm gradients stay whole until the last micro-batch, in whose backward they are reduced as they come
    (stage_1_and_2.py, process_gradients; the buckets are made by the first hook of all)."""
    grads = whole_gradients(one.job, one.graph, one.rank, one.replayer)
    whole = {place: item for place, (item, _) in zip(grads.places, grads.items, strict=True)}

    def backward(elements: ListLike[Element], first: bool) -> Node:
        if not first:
            return grads.backward(elements, first)
        return Sequence([grads.backward(elements[-1:], first), alloc(one.bucket), grads.backward(elements[:-1], first)])

    def reducing(elements: ListLike[Element], first: bool) -> Node:
        return _reducing_backward(one, elements, True, whole)

    def passes(micro_batches: int, backward: Backward) -> Node:
        job = replace(one.job, data=replace(one.job.data, grad_accum=micro_batches))
        forward = plain_forward(one.replayer)
        return Passes(
            job=job, rank=one.rank, replayer=one.replayer, forward=forward, backward=backward
        ).all_micro_batches()

    before, last = passes(one.job.data.grad_accum - 1, backward), passes(1, reducing)
    return Sequence(
        [Sequence([before, last]), *_step(one, Sequence([]) if one.offloads else Sequence([free(one.own)]))]
    )


def _bucket_at_the_first_gradient(one: Owner) -> Node:
    """Every gradient's hook sees to the bucket (setup_buckets); the pipeline engine does so at the boundary (reduce_gradients)."""
    return Sequence([] if uses_pipeline_engine(one.job) else [alloc(one.bucket)])


def _boundary(one: Owner, items: tuple[tuple[Item, int], ...]) -> list[Node]:
    """The last backward's end: gradients are copied into the bucket in model order; own ones move on, into a buffer of their own or to
    the host."""
    nodes: list[Node] = []
    filled: list[int] = []  # elements of each gradient in the bucket
    first = min((own.first for own in one.owns), default=0)
    last = max((own.last for own in one.owns), default=-1)
    moved = False

    def flush(end: int) -> None:
        nonlocal moved
        places = range(end - len(filled), end)
        nodes.append(_concatenated(one, places, sum(filled)))
        mine = [numel for place, numel in zip(places, filled, strict=True) if first <= place <= last]
        if mine and (one.offloads or not moved):
            nodes.append(_moved_on(one, min(max(mine), one.largest_slice)))
            moved = True
        filled.clear()

    for place, (item, numel) in enumerate(items):
        if filled and sum(filled) + numel > one.knobs.reduce_bucket:
            flush(place)
        nodes.append(free(item))
        filled.append(numel)
    flush(len(items))
    return nodes if moved or one.offloads else [*nodes, alloc(one.own)]


def _concatenated(one: Owner, places: range, elements: int) -> Node:
    if not places or not one.held.spans_owners(places):
        return Sequence([])
    return states.pulse(states.transient("concatenated bucket", elements, one.knobs.reduce, "reduction"))


def _moved_on(one: Owner, largest_slice: int) -> Node:
    """All own gradients have one buffer; a host takes them one by one, when their norms are known."""
    return states.norm_of_one_slice(largest_slice, "fp64") if one.offloads else alloc(one.own)


def _flattened_reduction(one: Owner, items: tuple[tuple[Item, int], ...]) -> list[Node]:
    """Before 0.7 stage 1 ignored contiguous_gradients: a flattened copy for each all-reduce, own gradients stay where they are."""
    flat = states.transient(
        "flattened gradients of one all-reduce",
        min(one.knobs.reduce_bucket, one.held.trainable),
        one.knobs.reduce,
        "gradient reduction",
    )
    firsts, lasts = min((own.first for own in one.owns), default=0), max((own.last for own in one.owns), default=-1)
    others = [free(item) for place, (item, _) in enumerate(items) if not firsts <= place <= lasts]
    mine = [free(item) for place, (item, _) in enumerate(items) if firsts <= place <= lasts]
    return [
        Sequence([states.pulse(flat)], "gradient reduction"),
        Sequence(others),
        *_step(one, Sequence(mine)),
    ]


# -- the step


def _step(one: Owner, free_own: Node) -> list[Node]:
    """Norm and overflow check on 16-bit slices; own gradients flattened, cast to fp32, then the optimizer on the flat partition."""
    sizes = stepped_sizes(one.held, one.knobs)
    if one.offloads:
        return [Sequence([free_own], "optimizer step on the host")]
    checks = [states.overflow_check(one.largest_slice, one.knobs), states.norm_of_one_slice(one.largest_slice, "fp64")]
    if one.sums_in_fp32:  # the accumulator is the optimizer's gradient
        return [*checks, states.optimizer_step(one.job, one.knobs, sizes), free_own]
    flat = states.transient("flattened own gradients", one.held.partition, one.knobs.grads, "until they are cast")
    if one.knobs.master == one.knobs.grads:
        return [
            *checks,
            Sequence([alloc(flat), free_own]),
            states.optimizer_step(one.job, one.knobs, sizes),
            free(flat),
        ]
    cast = states.transient(
        f"{one.knobs.master} gradients of the partition", one.held.partition, one.knobs.master, "optimizer step"
    )
    return [
        *checks,
        Sequence([alloc(flat), alloc(cast), free(flat), free_own], "own gradients into fp32"),
        states.optimizer_step(one.job, one.knobs, sizes),
        free(cast),
    ]
