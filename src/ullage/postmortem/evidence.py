"""What was found in an input: the failures, the numbers, the traceback, and how memory went before."""

from __future__ import annotations

from ullage.frozen import frozen
from ullage.postmortem.hints import Hint
from ullage.postmortem.messages import Numbers
from ullage.postmortem.signs import Recognised
from ullage.postmortem.tracebacks import Called, Phase, phases


@frozen
class Event:
    """One line that tells of a failure. line: 1-based in its input; text: the message, shortened, printable; rank: None where not said."""

    recognised: Recognised
    weight: int
    what: str
    line: int
    text: str
    numbers: Numbers
    called: tuple[Called, ...] = ()
    rank: int | None = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        return phases(self.called, self.text)


@frozen
class Block:
    """Equal blocks that a snapshot shows as held, each of these bytes, for tensors of requested_bytes.

    where: the line of code that made them, if recorded.
    """

    bytes: int
    requested_bytes: int
    count: int
    category: str
    where: str


@frozen
class Evidence:
    """event: what happened, by weight and then by time (None: nothing of that kind was found). failures: how often each kind was seen.

    series: allocated bytes that the log told of, in time, of one rank. split_bytes: free in segments that cannot go back to the
    driver, where a snapshot or a summary says it. blocks: a snapshot's, the largest total first; highest: those at the highest point of
    its history, if it has one. hints: what a log's other lines say of the cause. unread: files of a folder that cannot be read, and why.
    """

    source: str
    event: Event | None
    failures: tuple[tuple[Recognised, int], ...] = ()
    ranks: tuple[int, ...] = ()
    series: tuple[int, ...] = ()
    split_bytes: int | None = None
    blocks: tuple[Block, ...] = ()
    highest: tuple[Block, ...] = ()
    hints: tuple[Hint, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def recognised(self) -> Recognised:
        return self.event.recognised if self.event is not None else "unknown"

    @property
    def numbers(self) -> Numbers:
        return self.event.numbers if self.event is not None else Numbers()

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.event.phases if self.event is not None else ()

    @property
    def ran_out(self) -> bool:
        return self.recognised not in ("not-oom", "unknown")
