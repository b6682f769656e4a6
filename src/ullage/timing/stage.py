"""Seconds of one pipeline rank: its chunks' forwards and backwards, with what an engine gathers and reduces around blocks, and what it does
once a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from operator import attrgetter

from ullage.calibration.memory import MemoryKind
from ullage.calibration.overlap import beside_s, contention
from ullage.engines import offloaded
from ullage.engines.base import flag
from ullage.engines.fsdp2.flat import as_autograd_sees
from ullage.engines.fsdp2.shapes import shard_count
from ullage.engines.megatron.accounting import recompute_group
from ullage.engines.pipeline import micro_batches_of_chunk
from ullage.engines.recompute import stops_early
from ullage.frozen import frozen, replace
from ullage.job.bind import local_numel
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory.chunk import Element, Replayer, stream_bytes
from ullage.memory.rank import Rank
from ullage.model.graph import STREAM, Block, Graph, Tensor
from ullage.schedule import Action
from ullage.timing import issued, offload, states
from ullage.timing.again import work_again
from ullage.timing.attention import attention_kernel
from ullage.timing.blocks import COMPUTE, BlockTime, Parts, Place, added, block_time
from ullage.timing.gradients import (
    accumulated_bytes,
    accumulates,
    asynchronous,
    copied_in_bytes,
    copied_out_bytes,
    once_bytes,
)
from ullage.timing.machine import exchange_cost, moved_s
from ullage.timing.mixture import waits
from ullage.timing.optimizer import optimizer_s, stepped
from ullage.timing.overlap import Wrapped, backward_s, forward_s
from ullage.timing.partly import Trained
from ullage.timing.vintage import of_2021
from ullage.timing.work import Exchange, OpWork


def place_of(job: Job, context: Context) -> Place:
    """Where the blocks of a job run."""
    return Place(
        cluster=job.cluster,
        layout=job.layout,
        attention=attention_kernel(job),
        asynchronous=asynchronous(job),
        accumulates=accumulates(job),
        early_stop=stops_early(job, context),
        hides_experts=flag(job.engine.options, "overlap_moe_expert_parallel_comm", False) and job.data.grad_accum > 1,
    )


def sent_on(job: Job, context: Context) -> Exchange | None:
    """What a rank of a pipeline stage hands to its neighbour, forward or backward; None without a pipeline."""
    if job.layout.pp == 1:
        return None
    stream = stream_bytes(Tensor(name="stream", dims=STREAM), context)
    parts = job.layout.tp if gathered_on(job, context) else 1
    return Exchange(kind="send", axis="pp", payload_bytes=-(-stream // parts))


def gathered_on(job: Job, context: Context) -> Exchange | None:
    """Where every rank of a tensor-parallel group has the same stream, each sends a part, which the next stage gathers (Megatron-LM
    p2p_communication.py, scatter_gather_tensors_in_pipeline; DeepSpeed runtime/pipe/engine.py, PartitionedTensor)."""
    if job.layout.pp == 1 or job.layout.tp == 1 or context.sp or context.stack != "megatron":
        return None
    stream = stream_bytes(Tensor(name="stream", dims=STREAM), context)
    return Exchange(kind="all_gather", axis="tp", payload_bytes=stream)


def sends(job: Job, context: Context) -> tuple[Exchange, ...]:
    """What gets a stage's output to the next; nothing without a pipeline."""
    found = sent_on(job, context), gathered_on(job, context)
    return tuple([one for one in found if one is not None])


def send_s(job: Job, context: Context) -> float:
    """Seconds from one pipeline stage to the next."""
    return sum(exchange_cost(job, one).seconds for one in sends(job, context))


def waits_for_sends(job: Job) -> bool:
    """Whether a rank does nothing while it sends and receives between its chunks' passes: Megatron's interleaved schedule until it
    overlapped them (2023-05; ``overlap_p2p_comm``) synchronized the device after each exchange (p2p_communication.py)."""
    if job.engine.name != "megatron" or job.layout.vpp == 1:
        return False
    named = (job.engine.options.get(name) for name in ("overlap_p2p_comm", "overlap_p2p_communication"))
    return of_2021(job.engine.options) or any(value is False for value in named)


_NOTHING = Wrapped(compute_s=0.0)
_compute_s = attrgetter("compute_s")


@frozen
class PassTime:
    """Of one chunk of one rank, one micro-batch. The first forward may gather what later ones find, the last backward reduce for all.

    weights_s: of a backward, the half that makes the weights' gradients, where a schedule halves it.
    """

    first_forward_s: float
    forward_s: float
    backward_s: float
    last_backward_s: float
    weights_s: float = 0.0

    def at_least(self, forward_s: float, backward_s: float, after_loss_s: float) -> PassTime:
        """after_loss_s: from a forward's end to its backward's first kernel."""
        return replace(
            self,
            first_forward_s=max(self.first_forward_s, forward_s),
            forward_s=max(self.forward_s, forward_s),
            backward_s=max(self.backward_s + after_loss_s, backward_s),
            last_backward_s=max(self.last_backward_s + after_loss_s, backward_s),
        )

    def step_s(self, micro_batches: int) -> float:
        return self.first_forward_s + self.last_backward_s + (micro_batches - 1) * (self.forward_s + self.backward_s)


class Stage:
    """One pipeline rank: its chunks' times, and what it does once a step."""

    def __init__(self, job: Job, graph: Graph, context: Context, rank: Rank) -> None:
        self.job, self.graph, self.context = job, graph, context
        self.rank, self.trained = as_autograd_sees(job, rank), Trained(rank=rank)
        self.place = place_of(job, context)
        self.micro_batches = micro_batches_of_chunk(job)
        replayer = Replayer(context=context, recompute=job.recompute, group=recompute_group(job))
        self.numels: dict[Block, int] = {}
        self.left: dict[Block, float] = {}
        self.elements = [replayer.elements(chunk) for chunk in self.rank.chunks]
        self.contention = contention(job.cluster.device)
        self.runs = [self._runs(at) for at in range(len(rank.chunks))]
        self.computed = [self._chunk(at) for at in range(len(rank.chunks))]
        self.times = [time.at_least(*self._issued_s(at)) for at, time in enumerate(self.computed)]
        self.bare = self.computed
        if offload.offloads(job):
            self.bare = [self._chunk(at, hosted=False) for at in range(len(rank.chunks))]
        self.inside = added(self._parts(at) for at in range(len(rank.chunks)))
        self.outside = self._once()

    def on(self, rank: Rank) -> Stage:
        """The same on another rank, whose chunks are equal."""
        found = copy(self)
        found.rank, found.trained = as_autograd_sees(self.job, rank), Trained(rank=rank)
        return found

    @property
    def parts(self) -> Parts:
        """Seconds of a step by part, but for the bubble."""
        return added((self.inside, self.outside))

    def seconds(self, action: Action, micro_batches: int) -> float:
        """micro_batches: of the step that the action is in, through one chunk."""
        time, number = self.times[action.chunk], action.micro_batch % micro_batches
        if action.kind == "F":
            return time.forward_s if number else time.first_forward_s
        if action.kind == "I":
            return time.backward_s - time.weights_s
        whole = time.backward_s if number < micro_batches - 1 else time.last_backward_s
        return whole if action.kind == "B" else whole - time.backward_s + time.weights_s

    def again(self, element: Element) -> tuple[OpWork, ...]:
        """What the backward runs again of an element's block."""
        return work_again(
            element.block, self.context, element.mode, self.job.recompute, early_stop=self.place.early_stop
        )

    # -- one micro-batch

    def _runs(self, at: int) -> list[tuple[Block, BlockTime, int]]:
        """Blocks in order, equal neighbours together: block, its time, how many. Layers share one block, so that telling them apart
        compares no blocks."""
        found: list[tuple[Block, BlockTime, int]] = []
        before: tuple[int, str] | None = None
        for element in self.elements[at]:
            key = id(element.block), element.mode
            if key == before:
                block, time, count = found[-1]
                found[-1] = block, time, count + element.size
            else:
                time = block_time(element.block, self.context, self.place, element.mode, self.job.recompute)
                found.append((element.block, time, element.size))
                self.left[element.block] = offload.left_s(self.job, self.context, element)
            before = key
        return found

    def _forward_s(self, at: int, *, gathers: bool, hosted: bool) -> float:
        """hosted: with all that is copied from and to the host."""
        if not states.is_sharded(self.job):
            return sum(
                self._run_s(block, time.forward.total_s, hosted=hosted) * count for block, time, count in self.runs[at]
            )
        wrapped = []
        for block, time, count in self.runs[at]:
            one = Wrapped(
                compute_s=self._run_s(block, time.forward.total_s, hosted=hosted)
                + (self._copied_out_s(block) if gathers else 0.0),
                gather_s=self._gather_s(block, hosted=hosted, both=False) if gathers else 0.0,
                hindered_s=self._hindered_s(time.forward),
            )
            wrapped += [one] * count
        return forward_s(wrapped)

    def _backward_s(self, at: int, *, reduces: bool, hosted: bool) -> float:
        if not states.is_sharded(self.job):
            return sum(
                self._run_s(block, time.backward_s, hosted=hosted) * count for block, time, count in self.runs[at]
            )
        again = states.gathered_again(self.job, self.graph, self.rank, at)
        beside = offload.is_beside(self.job)
        wrapped = []
        for block, time, count in reversed(self.runs[at]):
            copied = self._gradients_s(block) if reduces and hosted else 0.0
            one = Wrapped(
                compute_s=self._run_s(block, time.backward_s, hosted=hosted)
                + (self._copied_out_s(block) if block.name in again else 0.0)
                + (0.0 if beside else copied),
                gather_s=self._gather_s(block, hosted=hosted, both=True) if block.name in again else 0.0,
                reduce_s=(self._reduce_s(block) if reduces else 0.0) + (copied if beside else 0.0),
                hindered_s=self._hindered_s(time.backward + time.recompute),
            )
            wrapped += [one] * count
        return backward_s(wrapped)

    def _hindered_s(self, done: Parts) -> float:
        """What a busy wire would add to a block's pass."""
        return self.contention.hindered_s(done.of(COMPUTE), done.others_s, done.total_s)

    def _run_s(self, block: Block, compute_s: float, *, hosted: bool) -> float:
        """One block's pass, what its neighbour leaves on the host copied beside it, or its own before and after."""
        if not hosted:
            return compute_s
        left_s = self.left[block]
        return compute_s + left_s if offloaded.waits(self.job) else max(compute_s, left_s)

    def _chunk(self, at: int, *, hosted: bool = True) -> PassTime:
        resident = states.resident(self.job)
        each = states.reductions(self.job) == self.job.data.grad_accum
        summed = self._summed_s(at)
        first = self._forward_s(at, gathers=True, hosted=hosted)
        last = self._backward_s(at, reduces=not resident, hosted=hosted) + summed
        if hosted and not states.is_sharded(self.job):
            last += self._taken_s(last)
        return PassTime(
            first_forward_s=first,
            forward_s=self._forward_s(at, gathers=False, hosted=hosted) if resident else first,
            backward_s=last if each or resident else self._backward_s(at, reduces=False, hosted=hosted) + summed,
            last_backward_s=last,
            weights_s=sum(time.weights_s * count for _, time, count in self.runs[at]),
        )

    def _taken_s(self, backward_s: float) -> float:
        """What a backward waits for its reduced gradients' way to the host, where parameters are whole."""
        copied = offload.gradients_s(self.job, stepped(self.job, self.trained))
        return max(0.0, copied - backward_s) if offload.is_beside(self.job) else copied

    def _issued_s(self, at: int) -> tuple[float, float, float]:
        """The host's seconds for a forward and a backward, and for the first of a backward that waits for its loss."""
        found = self.runs[at]
        pieces = (
            (waits(block, self.context), time.forward.total_s, time.issued[0], count) for block, time, count in found
        )
        forward_s, backward_s = issued.forward_s(pieces), sum(time.issued[1] * count for _, time, count in found)
        ends = found[-1][0].role in ("head", "loss")
        return forward_s, backward_s, issued.after_loss_s(self.context, self.job.cluster.device) if ends else 0.0

    def _parts(self, at: int) -> Parts:
        """Of all micro-batches."""
        found, micro_batches = self.runs[at], self.micro_batches
        busy = added((time.forward + time.backward).times(count) for _, time, count in found).times(micro_batches)
        again = micro_batches * sum(time.recompute.total_s * count for _, time, count in found)
        summed = micro_batches * self._summed_s(at)
        bare = self.bare[at].step_s(micro_batches)
        computed = self.computed[at].step_s(micro_batches)
        waits = bare - busy.total_s - again - summed
        host = self.times[at].step_s(micro_batches) - computed
        items = (
            ("recompute", again),
            ("gradients", summed),
            ("shard", waits),
            ("offload", computed - bare),
            ("host", host),
        )
        return busy + Parts(items=items)

    def _summed_s(self, at: int) -> float:
        """Gradients of one micro-batch added to those before it, where nothing reduces them meanwhile."""
        if states.is_sharded(self.job) and states.reductions(self.job) == self.job.data.grad_accum:
            return 0.0
        numel = sum(self._trained_numel(block) * count for block, _, count in self.runs[at])
        moved = numel * accumulated_bytes(self.job, self.context.compute)
        return moved_s(self.job.cluster.device, moved, dtype=self.job.precision.grads)

    def _trained_numel(self, block: Block) -> int:
        if block not in self.numels:
            params = (param for param in block.params if not param.buffer and param.trainable)
            self.numels[block] = sum(local_numel(self.graph, param, self.job.layout) for param in params)
        return self.numels[block]

    def _moved_s(self, moved_bytes: float, kind: MemoryKind = "pointwise") -> float:
        return moved_s(self.job.cluster.device, moved_bytes, kind)

    # -- sharded parameters

    def _gather_s(self, block: Block, *, hosted: bool, both: bool) -> float:
        fetched = offload.fetched_s(self.job, *self._shard_numels(block), both=both) if hosted else 0.0
        return fetched + self._sent_s(states.gathers(self.job, self.graph, block))

    def _gradients_s(self, block: Block) -> float:
        trained, _ = self._shard_numels(block)
        return offload.gradients_s(self.job, trained)

    def _shard_numels(self, block: Block) -> tuple[float, float]:
        return states.shard_numels(self.job, self.graph, block)

    def _reduce_s(self, block: Block) -> float:
        sent = states.reduced(self.job, self.graph, block)
        if not sent:
            return 0.0
        copied = self._trained_numel(block) * copied_in_bytes(self.job, self.context.compute)
        return self._sent_s(sent) + self._moved_s(copied, "copy")

    def _copied_out_s(self, block: Block) -> float:
        if not states.gathers(self.job, self.graph, block):
            return 0.0
        gathered_bytes = states.gathered_bytes(self.job, self.graph, block)
        return self._moved_s(copied_out_bytes(self.job, gathered_bytes), "copy")

    def _sent_s(self, found: Iterable[Exchange]) -> float:
        return sum(exchange_cost(self.job, one).seconds for one in found)

    # -- once a step

    def _once(self) -> Parts:
        items = [
            ("optimizer", optimizer_s(self.job, self.trained)),
            ("dp", sum(count * wait_s for _, count, wait_s in self.replicas())),
            ("offload", offload.returned_s(self.job, stepped(self.job, self.trained))),
        ]
        if not states.is_sharded(self.job):
            numel = sum(self.trained.numel(expert=expert) for expert in (False, True))
            items.append(("gradients", self._moved_s(numel * once_bytes(self.job))))
        items += self._python()
        if states.resident(self.job):
            blocks = (one.block for elements in self.elements for one in elements for _ in range(one.size))
            items.append(("shard", sum(map(self._reduce_s, blocks))))
        return Parts(items=tuple(item for item in items if item[1]))

    def _python(self) -> Iterator[tuple[str, float]]:
        """An engine's own Python, where the processor that it takes would compute: of every block that it wraps or splits."""
        measured, job = self.job.cluster.device.measured, self.job
        if measured is None or not self.contention.everything:
            return
        layers = sum(one.size for elements in self.elements for one in elements) * job.data.grad_accum
        if job.engine.name == "fsdp2" and shard_count(job, expert=False) > 1:
            yield "shard", layers * measured.sharded_layer_s
        if job.layout.tp > 1:
            yield "tp", layers * measured.split_layer_s

    def replicas(self) -> Iterator[tuple[Exchange, int, float]]:
        """(exchange, times a step, seconds that each adds): gradients reduced and, of sharded states, parameters gathered.

        Where the engine overlaps them, the last backward and the first forward hide what they can, and are slower while they do.
        """
        options = self.job.engine.options
        overlaps = self.job.engine.name in ("ddp", "zero1") or flag(options, "overlap_grad_reduce", False)
        gathers = flag(options, "overlap_param_gather", False)
        last = min(self._covers(1), key=_compute_s) if overlaps else _NOTHING
        first = min(self._covers(0), key=_compute_s) if gathers else _NOTHING
        for one in states.replica_reductions(self.job, self.trained):
            yield one, states.reductions(self.job), self._past_s(self._sent_s([one]), last)
        for one in states.replica_gathers(self.job, self.trained):
            yield one, 1, self._past_s(self._sent_s([one]), first)

    def _covers(self, way: int) -> Iterator[Wrapped]:
        """Of each chunk, its first forward (0) or its last backward (1)."""
        for at, time in enumerate(self.computed):
            compute_s = (time.first_forward_s, time.last_backward_s)[way]
            passes = (((one.forward, one.backward + one.recompute)[way], count) for _, one, count in self.runs[at])
            hindered_s = sum(self._hindered_s(done) * count for done, count in passes)
            yield Wrapped(compute_s=compute_s, hindered_s=hindered_s)

    def _past_s(self, sent_s: float, cover: Wrapped) -> float:
        """What an exchange adds to the pass that it runs beside."""
        if self.contention.everything:
            return beside_s(self.contention, cover.compute_s, sent_s) - cover.compute_s
        return max(cover.end(0.0, [(0.0, sent_s)]), sent_s) - cover.compute_s
