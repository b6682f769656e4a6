"""What crosses the borders between the parts of a traced model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from ullage.trace.cut import Part
from ullage.trace.events import Allocation
from ullage.trace.steps import Tape


@dataclass(frozen=True, slots=True)
class Lent:
    """A tensor beside the stream: made in one part, used in others. Parts by their place.

    users: later parts that read it, or until whose forward a frame of the layer code names it. keeper: the part that let go of it.
    grad: whether autograd asks for its gradient.
    """

    one: Allocation
    maker: int
    users: tuple[int, ...]
    keeper: int
    slot: int
    grad: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """A gradient that one part made and an earlier one let go of: of the stream, of a skip connection, of an encoder's output."""

    one: Allocation
    maker: int
    taker: int
    slot: int


class Carried:
    """What the parts of a model hand to each other: one tensor each, the stream, what else crosses, and the gradients that come back.

    tied: bytes of the parameters that several parts use; their gradients are told as such.
    """

    def __init__(self, tape: Tape, cuts: list[Part], tied: frozenset[int] = frozenset()) -> None:
        self.cuts = cuts
        self.tied = tied
        self._stops = [cut.stop for cut in cuts]
        self.outputs = [self._stream(tape, before, after) for before, after in pairwise(cuts)]
        self.lent = self._lent(tape)
        self.sent = self._sent(tape)

    def part_of(self, tick: int) -> int:
        return bisect_right(self._stops, tick)

    def _lent(self, tape: Tape) -> list[Lent]:
        streams = {one.birth for one in self.outputs if one is not None}
        makers = {
            one.birth: (at, one, tick.differentiable)
            for at, cut in enumerate(self.cuts)
            for tick in tape.ticks[cut.start : cut.stop]
            for one in tick.writes
            if one.birth not in streams
        }
        users: dict[int, set[int]] = {birth: set() for birth in makers}
        for tick, op in enumerate(tape.forward):
            for birth in op.reads:
                if birth in makers:
                    users[birth].add(self.part_of(tick))
        slots = _Slots()
        found = []
        for birth, (maker, one, grad) in makers.items():
            end = tape.ended(one)
            keeper = self.part_of(tape.forward_tick(end) if end <= tape.turn else tape.backward_tick(end))
            if end <= tape.turn:
                users[birth].add(keeper)
            if later := sorted(at for at in users[birth] if at > maker):
                found.append(Lent(one, maker, tuple(later), keeper, slots.take(maker, later[-1]), grad))
        return found

    def _sent(self, tape: Tape) -> list[Sent]:
        slots = _Slots()
        found = []
        for at in reversed(range(len(self.cuts))):
            cut = self.cuts[at]
            for one in (one for tick in tape.ticks[cut.start : cut.stop] for one in tick.made):
                end = tape.backward_tick(tape.ended(one))
                if end < cut.start and one.bytes not in self.tied:
                    taker = self.part_of(end)
                    found.append(Sent(one, at, taker, slots.take(-at, -taker)))
        return found

    @staticmethod
    def handed(tape: Tape, before: Part, after: Part) -> Allocation | None:
        """The tensor that ``before`` makes and ``after`` reads: one with a gradient, the latest."""
        made = {
            one.birth: (tick.differentiable, one.birth, one)
            for tick in tape.ticks[before.start : before.stop]
            for one in tick.writes
        }
        read = {birth for op in tape.forward[after.start : after.stop] for birth in op.reads if birth in made}
        return max((made[birth] for birth in read), default=(False, 0, None))[2]

    @staticmethod
    def _stream(tape: Tape, before: Part, after: Part) -> Allocation | None:
        """What is handed on. None too where ``before`` saves it itself (a ReLU's, an LSTM's) or parts behind ``after`` read it as well
        (an encoder's output): that is lent."""
        found = Carried.handed(tape, before, after)
        if found is not None and any(found.birth in op.reads for op in tape.forward[after.stop :]):
            return None
        if found is None or tape.ended(found) <= tape.turn:
            return found
        return None if before.start <= tape.backward_tick(tape.ended(found)) < before.stop else found


class _Slots:
    """Numbers for what is on its way: a number is free again from the part on that its last holder was handed to."""

    def __init__(self) -> None:
        self._until: list[int] = []

    def take(self, start: int, stop: int) -> int:
        """The first number that is free at ``start``, taken until ``stop``."""
        slot = next((slot for slot, until in enumerate(self._until) if until <= start), len(self._until))
        self._until[slot : slot + 1] = [stop]
        return slot
