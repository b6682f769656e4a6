"""What crosses the borders between the parts of a traced model."""

from __future__ import annotations

from itertools import pairwise

from ullage.trace.cut import Part
from ullage.trace.events import Allocation
from ullage.trace.steps import Tape


class Carried:
    """What the parts of a model hand to each other: one tensor each, the one whose gradient comes back.

    tied: bytes of the parameters that several parts use; their gradients are told as such.
    """

    def __init__(self, tape: Tape, cuts: list[Part], tied: frozenset[int] = frozenset()) -> None:
        self.cuts = cuts
        self.tied = tied
        self.outputs = [self.handed(tape, before, after) for before, after in pairwise(cuts)]
        self.grads = [self._gradient(tape, at) for at in range(len(self.outputs))]
        self.skips = self._skips(tape)

    def _skips(self, tape: Tape) -> list[tuple[int, int, Allocation]]:
        """(made in, let go of in, gradient) of every other gradient that crosses a border: of a skip connection, of a memory."""
        found = []
        for at, cut in enumerate(self.cuts):
            for one in (one for tick in tape.ticks[cut.start : cut.stop] for one in tick.made):
                end = tape.backward_tick(tape.ended(one))
                if end < cut.start and one not in self.grads and one.bytes not in self.tied:
                    found.append((at, next(to for to, other in enumerate(self.cuts) if end < other.stop), one))
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

    def _gradient(self, tape: Tape, at: int) -> Allocation | None:
        """The gradient of the tensor handed on after part ``at``: the last one made behind the cut that lives on before it."""
        output = self.outputs[at]
        border = self.cuts[at].stop
        found = [
            one
            for tick in tape.ticks[border : self.cuts[at + 1].stop]
            for one in tick.made
            if output is not None and one.bytes == output.bytes and tape.backward_tick(tape.ended(one)) < border
        ]
        return max(found, key=lambda one: one.birth, default=None)
