"""Seconds of a block's forward, backward and recomputation on one rank, by part."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ullage.calibration.overlap import beside_s, contention
from ullage.frozen import frozen
from ullage.hardware.cluster import Cluster
from ullage.job.job import Layout, Recompute
from ullage.kernels.step import Context
from ullage.model.graph import Block
from ullage.timing.again import work_again
from ullage.timing.issued import Issuing, issuing
from ullage.timing.machine import attention_s, matmul_s, sent_s, traffic_s
from ullage.timing.mixture import calls
from ullage.timing.ops import block_work
from ullage.timing.work import Exchange, OpWork, Pass

COMPUTE, MEMORY = "matmul", "memory"
ATTENTION = "attention"
EXPERTS = "ep"


@frozen
class Parts:
    """Seconds by part: matmul, attention, memory, and what is waited for on each axis (tp, cp, ep, ...)."""

    items: tuple[tuple[str, float], ...] = ()

    @property
    def total_s(self) -> float:
        return sum(value for _, value in self.items)

    def of(self, part: str) -> float:
        return next((value for name, value in self.items if name == part), 0.0)

    @property
    def others_s(self) -> float:
        """Of what computes, all but matmuls."""
        return self.of(ATTENTION) + self.of(MEMORY)

    def __add__(self, other: Parts) -> Parts:
        return added((self, other))

    def times(self, factor: float) -> Parts:
        return Parts(items=tuple((name, value * factor) for name, value in self.items))


def added(parts: Iterable[Parts]) -> Parts:
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items:
            sums[name] = sums.get(name, 0.0) + value
    return Parts(items=tuple(sums.items()))


@frozen
class BlockTime:
    """One block, one micro-batch. recompute: what the backward runs again before it. issued: seconds of the host for the forward, and for
    the backward with what it runs again."""

    forward: Parts
    backward: Parts
    recompute: Parts = Parts()
    issued: tuple[float, float] = (0.0, 0.0)

    @property
    def backward_s(self) -> float:
        return self.backward.total_s + self.recompute.total_s

    @property
    def weights_s(self) -> float:
        """Of the backward, the matmuls that make weights' gradients: every other one."""
        return self.backward.of(COMPUTE) / 2

    @property
    def backward_matmul_s(self) -> float:
        return self.backward.of(COMPUTE) + self.recompute.of(COMPUTE)


@frozen
class Place:
    """Where a block runs: all that its time depends on beside the block and its context.

    asynchronous: tensor parallelism sends beside the matmuls of a backward. accumulates: those add into an fp32 buffer.
    early_stop: a checkpointed block runs again only as far as its backward needs. hides_experts: what goes to experts and back is sent
    beside another micro-batch's pass (Megatron-Core pipeline_parallel/combined_1f1b.py).
    """

    cluster: Cluster
    layout: Layout
    attention: str
    asynchronous: bool = True
    accumulates: bool = True
    early_stop: bool = False
    hides_experts: bool = False


@frozen
class Sending:
    """One exchange of a pass. sent_s: by itself. wait_s: what the rank waits for it, past the matmuls that it hides behind."""

    exchange: Exchange
    sent_s: float
    wait_s: float


@lru_cache(maxsize=16384)
def block_time(block: Block, context: Context, place: Place, mode: str, recompute: Recompute) -> BlockTime:
    """mode: of memory/chunk.py."""
    work = block_work(block, context, place.accumulates)
    again = work_again(block, context, mode, recompute, early_stop=place.early_stop)
    host = issuing(context, place.cluster.device)
    found = BlockTime(
        forward=added(pass_parts(one.forward, place, backward=False) for one in work),
        backward=added(pass_parts(one.backward, place, backward=True) for one in work),
        recompute=added(pass_parts(one.forward, place, backward=False) for one in again),
        issued=_issued_s(host, block, context, work, again) if host else (0.0, 0.0),
    )
    if not place.hides_experts:
        return found
    back = _experts_wire_s((one.backward for one in work), place) + _experts_wire_s(
        (one.forward for one in again), place
    )
    return _past_experts(found, _experts_wire_s((one.forward for one in work), place), back, place)


def _issued_s(
    host: Issuing, block: Block, context: Context, work: tuple[OpWork, ...], again: tuple[OpWork, ...]
) -> tuple[float, float]:
    beside = calls(block, context)
    return host.of(work, beside), host.of(work, beside, backward=True) + host.of(again, beside)


def _experts_wire_s(passes: Iterable[Pass], place: Place) -> float:
    sent = (one for work in passes for one in work.exchanges if one.axis == EXPERTS)
    return sum(sent_s(place.cluster, place.layout, one) for one in sent)


def _past_experts(found: BlockTime, there_s: float, back_s: float, place: Place) -> BlockTime:
    """A forward and another micro-batch's backward run together: what they send runs beside what both compute, of which matmuls lose
    to it what they lose to any collective. Warm-up and drain, which have no partner, are taken to have one."""
    wire_s = there_s + back_s
    if not wire_s:
        return found
    matmul_s = found.forward.of(COMPUTE) + found.backward_matmul_s
    computed_s = found.forward.total_s + found.backward_s
    beside = min(1.0, wire_s / computed_s) * matmul_s
    lost_s = beside_s(contention(place.cluster.device), beside, beside) - beside
    left_s = max(wire_s, computed_s + lost_s) - computed_s

    def more(share: float) -> Parts:
        return Parts(items=((EXPERTS, left_s * share),))

    forward, backward = found.forward + more(there_s / wire_s), found.backward + more(back_s / wire_s)
    return BlockTime(forward=forward, backward=backward, recompute=found.recompute, issued=found.issued)


def pass_s(work: Pass, place: Place, *, backward: bool) -> float:
    """``pass_parts`` added up."""
    found = sum(_matmuls_s(work, place)) + _attention_s(work, place, backward=backward)
    found += sum(traffic_s(place.cluster.device, one, backward=backward) for one in work.traffic)
    return found + sum(one.wait_s for one in sendings(work, place, backward=backward))


def sendings(work: Pass, place: Place, *, backward: bool) -> tuple[Sending, ...]:
    """Each exchange of a pass, in order."""
    if not work.exchanges:
        return ()
    matmuls = _matmuls_s(work, place)
    cover = covers(matmuls, _attention_s(work, place, backward=backward), backward=backward)
    found = []
    for one in work.exchanges:
        alone = sent_s(place.cluster, place.layout, one)
        wait_s = waited_s(one, alone, cover.get(one.behind, 0.0), place)
        found.append(Sending(exchange=one, sent_s=alone, wait_s=wait_s))
    return tuple(found)


def covers(matmuls: list[float], attention: float, *, backward: bool) -> dict[str, float]:
    """Seconds of what an exchange hides behind, by its name."""
    cover = {"attention": attention, "forward": sum(matmuls)}
    if backward and matmuls:
        cover |= {"dgrad": sum(matmuls[0::2]), "wgrad": sum(matmuls[1::2])}
    return cover


def pass_parts(work: Pass, place: Place, *, backward: bool) -> Parts:
    """Seconds of one direction of one op."""
    memory = sum(traffic_s(place.cluster.device, one, backward=backward) for one in work.traffic)
    attention = _attention_s(work, place, backward=backward)
    items = [(COMPUTE, sum(_matmuls_s(work, place))), (ATTENTION, attention), (MEMORY, memory)]
    items += [(one.exchange.axis, one.wait_s) for one in sendings(work, place, backward=backward)]
    return added([Parts(items=tuple(item for item in items if item[1]))])


def _matmuls_s(work: Pass, place: Place) -> list[float]:
    return [matmul_s(place.cluster.device, one) for one in work.matmuls]


def _attention_s(work: Pass, place: Place, *, backward: bool) -> float:
    if work.attention is None:
        return 0.0
    return attention_s(place.cluster.device, work.attention, place.attention, backward=backward)


def waited_s(exchange: Exchange, wire_s: float, cover_s: float, place: Place) -> float:
    """What an exchange adds to the work that runs meanwhile: what is left to wait for, and what it takes from that work."""
    if exchange.axis == EXPERTS and place.hides_experts:
        return 0.0  # of a pass by itself; ``block_time`` knows what is left
    if exchange.pieces > 1:  # the first piece is waited for; copy engines carry the others
        return max(wire_s / exchange.pieces, wire_s - cover_s)
    if exchange.behind in ("dgrad", "wgrad") and not place.asynchronous:
        return wire_s
    if exchange.behind in ("dgrad", "wgrad"):
        return beside_s(contention(place.cluster.device), cover_s, wire_s) - cover_s
    return max(0.0, wire_s - cover_s)
