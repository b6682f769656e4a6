"""Lower bounds of a strategy's step and of its memory, from costs of single blocks: what a search may leave out, proven.

Time. A rank cannot start before the first micro-batch has come through the ranks before it, works through all micro-batches, and the
step ends when the first rank has the last gradient: fill + m x (forward + backward) + drain, for each rank. Sharded blocks cannot be
faster than their computing, nor than their wire. Sends, and what the optimizer and replicas do afterwards, only add.

Memory. When the pipeline is full a rank holds its states and, of each micro-batch in flight, what the blocks left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil

from ullage.engines.fsdp2.policy import reshards
from ullage.engines.interval import demand
from ullage.frozen import frozen, replace
from ullage.hardware import overheads
from ullage.job.job import Job, Recompute
from ullage.planner.costs import GridCosts
from ullage.planner.shapes import ShapeCosts
from ullage.planner.space import FULL, NONE, Family
from ullage.planner.stages import Counts, Flights, Stage, flights
from ullage.planner.states import EachElement, each_element
from ullage.timing.gradients import accumulated_bytes, once_bytes
from ullage.timing.machine import exchange_cost, moved_s
from ullage.timing.optimizer import optimizer_s
from ullage.timing.states import FSDP, is_sharded, reductions, replica_gathers, replica_reductions, resident


@frozen
class StageTime:
    """Of one micro-batch: all chunks of a rank, and the first alone, forward and backward together.

    chunks_s: forward and backward of each chunk, computing alone.
    """

    both_s: float
    first_chunk_s: float
    chunks_s: tuple[tuple[float, float], ...]

    @property
    def shortest_forward_s(self) -> float:
        return min(forward for forward, _ in self.chunks_s)

    @property
    def shortest_backward_s(self) -> float:
        return min(backward for _, backward in self.chunks_s)


def computing_s(costs: ShapeCosts, stages: Sequence[Stage], recompute: Recompute) -> list[StageTime]:
    """Of every rank, with nothing but what happens inside of blocks."""
    return _stage_times(costs, stages, recompute, lambda part, computing: sum(computing))


def stage_times(
    costs: ShapeCosts, stages: Sequence[Stage], jobs: Sequence[Job], recompute: Recompute
) -> list[StageTime]:
    """Of every rank, with what the engine gathers and reduces around blocks; of several jobs' engines, the least."""
    wires = [(job, costs.wire_s(job)) for job in jobs if is_sharded(job) and not resident(job)]
    if len(wires) < len(jobs):
        return computing_s(costs, stages, recompute)
    return _stage_times(
        costs,
        stages,
        recompute,
        lambda part, _: min(_beside_wire_s(costs, job, wire, part, recompute) for job, wire in wires),
    )


def _stage_times(
    costs: ShapeCosts,
    stages: Sequence[Stage],
    recompute: Recompute,
    both: Callable[[Counts, tuple[float, float]], float],
) -> list[StageTime]:
    known: dict[tuple[Counts, ...], StageTime] = {}
    parts: dict[Counts, tuple[tuple[float, float], float]] = {}
    for stage in stages:
        if not stage.first_of_kind:
            continue
        for part in stage.chunks:
            if part not in parts:
                computing = _chunk_s(costs, part, recompute)
                parts[part] = computing, both(part, computing)
        each = [parts[part] for part in stage.chunks]
        known[stage.chunks] = StageTime(
            both_s=sum(both_s for _, both_s in each),
            first_chunk_s=each[0][1],
            chunks_s=tuple(computing for computing, _ in each),
        )
    return [known[stage.chunks] for stage in stages]


def _chunk_s(costs: ShapeCosts, part: Counts, recompute: Recompute) -> tuple[float, float]:
    """Computing, and what it waits for inside of blocks."""
    forward = backward = 0.0
    for kind, count, _ in part:
        cost = costs.blocks[kind]
        forward += count * cost.forward_s
        backward += count * cost.backward_s
    if recompute.kind != "none":
        backward += sum(count * costs.again_s(kind, how) for kind, count, how in modes(part, recompute))
    return forward, backward


def _beside_wire_s(
    costs: ShapeCosts, job: Job, wire: Sequence[tuple[float, float]], part: Counts, recompute: Recompute
) -> float:
    """A chunk whose parameters are gathered around each block, forward and backward (timing/overlap.py)."""
    reduces = reductions(job) > 1
    root_stays = job.engine.name in FSDP
    forward: list[Piped] = []
    backward: list[Piped] = []
    for kind, count, how in modes(part, recompute):
        cost, (gather, reduce) = costs.blocks[kind], wire[kind]
        again = 0.0 if root_stays and not (costs.is_layer[kind] and reshards(job)) else gather
        forward.append((count, cost.forward_s, gather, 0.0))
        backward.append((count, cost.backward_s + costs.again_s(kind, how), again, reduce if reduces else 0.0))
    return piped_s(forward) + piped_s(backward[::-1])


def wire_bound_s(costs: GridCosts, job: Job) -> list[float]:
    """Of each kind of block, what a micro-batch sends of its parameters and gradients at the least."""
    reduces, root_stays = reductions(job) > 1, job.engine.name in FSDP
    again = reshards(job) if root_stays else True
    return [
        gather * (2 if again and (layer or not root_stays) else 1) + (reduce if reduces else 0.0)
        for (gather, reduce), layer in zip(costs.wire_s(job), costs.is_layer, strict=True)
    ]


Piped = tuple[int, float, float, float]
"""Equal blocks one after another: how many, and of each the seconds that it computes, is gathered, and is reduced."""


def piped_s(runs: Sequence[Piped]) -> float:
    """Blocks on two streams: a block's gather waits for those before it and for all but the last reduction before it.

    However they go on, from any block that is gathered on all others still have to be computed, and the last one reduced.
    """
    most = left = sum(count * compute for count, compute, _, _ in runs)
    wire = last = 0.0
    for count, compute, gather, reduce in runs:
        wire += gather  # the first of the run has come
        most = max(most, wire + left) if gather else most
        if count > 1:  # and the last
            wire += (count - 1) * gather + last + (count - 2) * reduce
            most = max(most, wire + left - (count - 1) * compute) if gather else most
            last = reduce
        left -= count * compute
        wire, last = wire + last, reduce
    return most + last


class Held:
    """Elements of parameters that are trained on a rank, and bytes of frozen ones, summed from its blocks."""

    def __init__(self, costs: ShapeCosts, stage: Stage) -> None:
        self.dense = sum(count * costs.blocks[kind].dense for kind, count, _ in stage.counts)
        self.experts = sum(count * costs.blocks[kind].experts for kind, count, _ in stage.counts)
        self.frozen_bytes = sum(count * costs.blocks[kind].frozen_bytes for kind, count, _ in stage.counts)
        if stage.both_ends:
            dense, _, frozen_bytes = costs.grid.tied
            self.dense -= dense
            self.frozen_bytes -= frozen_bytes

    def numel(self, *, expert: bool) -> int:
        return self.experts if expert else self.dense


def outside_bound_s(job: Job, held: Held, time: StageTime) -> float:
    """The optimizer, what replicas exchange once a step or more, less all that a forward or a backward could hide, and what is done to
    whole gradients."""
    device, options = job.cluster.device, job.engine.options
    found = optimizer_s(job, held)
    if is_sharded(job):
        return found
    numel = held.dense + held.experts
    found += moved_s(device, numel * once_bytes(job))
    overlaps = job.engine.name in ("ddp", "zero1") or options.get("overlap_grad_reduce") is True
    gathers = options.get("overlap_param_gather") is True
    # a backward may run its whole forward again, and adds up its gradients
    summed = moved_s(device, numel * accumulated_bytes(job, compute_of(job)), dtype=job.precision.grads)
    last = time.shortest_backward_s + time.shortest_forward_s + summed
    for one in replica_reductions(job, held):
        found += reductions(job) * max(0.0, exchange_cost(job, one).seconds - (last if overlaps else 0.0))
    for one in replica_gathers(job, held):
        found += max(0.0, exchange_cost(job, one).seconds - (time.shortest_forward_s if gathers else 0.0))
    return found


def compute_of(job: Job) -> str:
    compute = job.precision.compute
    return compute if compute not in ("fp8", "fp4") else "bf16"


def modes(part: Counts, recompute: Recompute) -> list[tuple[int, int, Recompute]]:
    """A chunk's kinds of block with how many of each are recomputed how."""
    if recompute.kind != "layers":
        return [(kind, count, recompute if layer else NONE) for kind, count, layer in part]
    left = recompute.layers
    found: list[tuple[int, int, Recompute]] = []
    for kind, count, layer in part:
        checkpointed = min(left, count) if layer else 0
        left -= checkpointed
        if checkpointed:
            found.append((kind, checkpointed, FULL))
        if count > checkpointed:
            found.append((kind, count - checkpointed, NONE))
    return found


def step_bound_s(times: Sequence[StageTime], micro_batches: int, send_s: float, *, grouped: bool = False) -> float:
    """No rank's fill, work and drain takes longer than the step.

    send_s: from one stage to the next. grouped: whether chunks take turns, after as many micro-batches as there are ranks.
    """
    most = interleaved_bound_s(times, micro_batches, send_s) if grouped else 0.0
    before = 0.0
    for one in times:
        most = max(most, before + micro_batches * one.both_s)
        before += one.first_chunk_s + 2 * send_s
    return most


def ends_bound_s(times: Sequence[StageTime], micro_batches: int, send_s: float) -> list[float]:
    """Of each rank, when its last backward has ended: after its fill and its work, and after that of the next rank, whose gradient it
    takes."""
    starts = [0.0, *accumulate(one.chunks_s[0][0] + send_s for one in times)]
    ends: list[float] = []
    for start, one in zip(starts[-2::-1], reversed(times), strict=True):
        after = ends[-1] + send_s + one.chunks_s[0][1] if ends else 0.0
        ends.append(max(start + micro_batches * one.both_s, after))
    return ends[::-1]


def interleaved_bound_s(times: Sequence[StageTime], micro_batches: int, send_s: float) -> float:
    """One way through an interleaved schedule (schedule/interleaved.py, as many micro-batches in a group as ranks), on its last two ranks.

    The last rank's last chunk has the head: while a group of micro-batches passes it, all wait for it, and the others' chunks are longer
    while a group passes those. The way stays on the last rank for the former, moves to the rank before with the backward of the group's
    last micro-batch, and back with a forward two turns before the next group comes to the last chunk: the rank before is two turns ahead.
    """
    ranks = len(times)
    last, before = times[-1].chunks_s, times[-2].chunks_s
    groups = micro_batches // ranks
    fill = sum(one.chunks_s[0][0] + send_s for one in times[:-1]) + ranks * sum(forward for forward, _ in last[:-1])
    inner = ranks * sum(forward + backward for forward, backward in before[1:-1])
    turn = inner + (ranks - 2) * sum(before[0]) + sum(before[-1]) + 2 * send_s
    end = before[-1][1] + send_s + ranks * sum(backward for _, backward in before[:-1])
    drain = sum(one.chunks_s[0][1] + send_s for one in times[:-2])
    return fill + groups * ranks * sum(last[-1]) + (groups - 1) * turn + end + drain


def any_chunks_bound_s(costs: ShapeCosts, times: Sequence[StageTime], micro_batches: int, send_s: float) -> float:
    """The least of ``step_bound_s`` however each rank's layers are cut into chunks: the first of each has a layer at least."""
    most = before = 0.0
    for rank, one in enumerate(times):
        most = max(most, before + micro_batches * one.both_s)
        before += costs.shortest_s + 2 * send_s + (costs.first_s if rank == 0 else 0.0)
    return most


def one_chunk_bound_s(whole_s: float, ranks: int, micro_batches: int, send_s: float) -> float:
    """The least of ``step_bound_s`` however layers are cut over ranks that have one chunk each: every rank waits for all of those before.

    Of a step of T seconds a rank that has waited for s of them takes no more than (T - s) / m of each of m micro-batches, so that what is
    left after it is no less than (1 - 1/m) of what was: with p ranks the blocks take no more than 1 - (1 - 1/m)^p of T.
    """
    share = 1 - (1 - 1 / micro_batches) ** ranks
    return (whole_s + 2 * send_s * (ranks - micro_batches * share)) / share


def evenly_bound_s(
    costs: ShapeCosts, ranks: int, micro_batches: int, send_s: float, *, interleaves: bool = True
) -> float:
    """The least of ``any_chunks_bound_s`` however layers are cut over ranks: the longest of them takes no less than their mean, nor than
    what the first and the last have beside one layer at least, nor than ranks that each have a whole number of layers.

    interleaves: whether a rank may have several chunks."""
    if ranks == 1:
        return micro_batches * costs.whole_s
    each = costs.shortest_s + 2 * send_s
    starts = [0.0, *(costs.first_s + rank * each for rank in range(1, ranks))]
    first = micro_batches * (costs.first_s + costs.shortest_s)
    last = starts[-1] + micro_batches * (costs.last_s + costs.shortest_s)
    seconds = max((sum(starts) + micro_batches * costs.whole_s) / ranks, first, last)
    starts[0] += micro_batches * costs.first_s
    starts[-1] += micro_batches * costs.last_s
    seconds += _until_whole_s(costs, starts, micro_batches, seconds)
    return seconds if interleaves else max(seconds, one_chunk_bound_s(costs.whole_s, ranks, micro_batches, send_s))


def _until_whole_s(costs: ShapeCosts, starts: Sequence[float], micro_batches: int, seconds: float) -> float:
    """How much longer it takes until ranks that are free from ``starts`` on have room for all layers of the kind that takes most, each for
    a whole number of them; ``seconds`` being enough for fractions, one more on some ranks is."""
    layer_s, count = costs.longest
    at_once = 1 / (micro_batches * layer_s)
    room = [(seconds - start) * at_once + _ROUNDED_UP for start in starts]
    whole = [int(layers) for layers in room]
    missing = count - sum(whole)
    if missing <= 0:
        return 0.0
    left = sorted([many + 1 - layers for many, layers in zip(whole, room, strict=True)])
    return left[min(missing, len(left)) - 1] / at_once


_ROUNDED_UP = 1e-9


class MemoryBound:
    """What a device has room for, and the least that a stage of a strategy holds of it. tight: as much as may do."""

    def __init__(self, job: Job, *, tight: bool = False) -> None:
        device = job.cluster.device
        self.room_bytes = demand(job, tight=tight).room_bytes(
            device.capacity_bytes, overheads.context(device, lazy=True)
        )

    def states_bytes(self, held: Held, each: EachElement) -> tuple[float, float]:
        """Between two steps, and at the end of the last backward."""
        dense, experts, frozen = each
        return (
            held.dense * dense.kept + held.experts * experts.kept + held.frozen_bytes * frozen.kept,
            held.dense * dense.end + held.experts * experts.end + held.frozen_bytes * frozen.end,
        )

    def stage_bytes(self, costs: ShapeCosts, stage: Stage, job: Job, recompute: Recompute) -> float:
        """With the pipeline full, or with all gradients: whichever is more."""
        kept, end = self.states_bytes(Held(costs, stage), each_element(job))
        return max(kept + in_flight_bytes(costs, stage, flights(job)[stage.index], recompute), end)

    def may_fit(self, costs: ShapeCosts, stages: Sequence[Stage], job: Job, recompute: Recompute) -> bool:
        stages = [one for one in stages if one.first_of_kind]
        return all(self.stage_bytes(costs, one, job, recompute) <= self.room_bytes for one in stages)

    def layers_again(
        self, costs: ShapeCosts, stage: Stage, in_flight: Flights, states_bytes: float, family: Family
    ) -> int | None:
        """The fewest layers of a chunk that are recomputed; None: even all is not enough.

        states_bytes: what it holds beside what is in flight, at the least.
        """
        over = states_bytes + in_flight_bytes(costs, stage, in_flight, family.kinds[0]) - self.room_bytes
        if over <= 0:
            return 0
        if not family.layered:
            return None
        plain, checkpointed = costs.kept(NONE), costs.kept(FULL)
        saved = max((plain[kind] - checkpointed[kind] for kind, _, layer in stage.counts if layer), default=0)
        if saved * sum([many * _layers(part) for many, part in zip(in_flight, stage.chunks, strict=True)]) < over:
            return None
        return ceil(over / (saved * sum(in_flight)) * _ROUNDING)

    def modules_again_s(self, costs: ShapeCosts, stage: Stage, in_flight: Flights, states_bytes: float) -> float | None:
        """The least seconds of a micro-batch that sets of modules take again with which it fits, or nothing does."""
        most = self.room_bytes - states_bytes
        if _kept_bytes(costs, stage, in_flight, costs.smallest) > most:
            return None
        plain = costs.kept(NONE)
        if _kept_bytes(costs, stage, in_flight, plain) <= most:
            return 0.0
        layers = costs.grid.groups.layers
        counted = [(at, count) for kind, count, layer in stage.counts if layer for at in (layers.index(kind),)]
        least = None
        for one in costs.selections:
            kept = list(plain)
            for kind, left in zip(layers, one.left_bytes, strict=True):
                kept[kind] += left
            if _kept_bytes(costs, stage, in_flight, kept) <= most:
                seconds = sum([count * one.again_s[at] for at, count in counted])
                least = seconds if least is None else min(least, seconds)
        return least


def in_flight_bytes(costs: ShapeCosts, stage: Stage, in_flight: Flights, recompute: Recompute) -> int:
    """What forwards leave behind that are in flight; what they send on may be gone (Megatron's deallocate_pipeline_outputs)."""
    if recompute.kind != "layers":
        return _kept_bytes(costs, stage, in_flight, costs.kept(recompute))
    known: dict[Counts, int] = {}
    for part in stage.chunks:
        if part not in known:
            known[part] = sum([count * costs.kept(how)[kind] for kind, count, how in modes(part, recompute)])
    return _less_sent(costs, stage, in_flight, [known[part] for part in stage.chunks])


def _kept_bytes(costs: ShapeCosts, stage: Stage, in_flight: Flights, kept: Sequence[int]) -> int:
    """The same of blocks that keep so much each, by kind."""
    known = {part: sum([count * kept[kind] for kind, count, _ in part]) for part in set(stage.chunks)}
    return _less_sent(costs, stage, in_flight, [known[part] for part in stage.chunks])


def _less_sent(costs: ShapeCosts, stage: Stage, in_flight: Flights, each: Sequence[int]) -> int:
    sent = 0 if stage.both_ends else costs.sent_bytes
    return sum([many * (one - sent) for many, one in zip(in_flight, each, strict=True)])


_ROUNDING = 1 - 1e-12


def longer_by(time: StageTime, seconds: float) -> StageTime:
    """With more to compute in each micro-batch; in which of its chunks is not said."""
    return replace(time, both_s=time.both_s + seconds)


def _layers(part: Counts) -> int:
    return sum(count for _, count, layer in part if layer)
