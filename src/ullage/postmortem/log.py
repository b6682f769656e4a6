"""A log read once, in pieces, whatever its length: the failures that it tells of, the first of each kind with its traceback.

A piece is searched for the markers of all signs at memory speed; only lines with a marker are looked at closer, and of each marker no
more than some in a piece, so that the time is linear in the length whatever stands in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO

from ullage.postmortem.evidence import Event, Evidence
from ullage.postmortem.hints import Hint, seen
from ullage.postmortem.messages import numbers_of
from ullage.postmortem.series import Series
from ullage.postmortem.signs import MARKERS, Recognised, Sign, sign_of
from ullage.postmortem.tracebacks import frames_of
from ullage.units import KIB, MIB

PIECE_BYTES = MIB
_BEFORE_BYTES = 16 * KIB
"""Of a traceback before its message."""
_AFTER_BYTES = 4 * KIB
_MOST_MARKED = 32
_LONGEST_MESSAGE = 2000
_LONGEST_SHOWN = 400
_MOST_RANKS = 10_000
_CONTINUED = re.compile(r"\s*\n(?:\[rank\d{1,6}\]:?|\([^()\n]{1,80}\)|\d{1,6}:)?\s*")
_COLOUR = re.compile(r"\x1b\[[\d;]{0,20}m")
_RANK = re.compile(r"\[?\brank[ :=]{0,2}(\d{1,6})\b", re.IGNORECASE)

Progress = Callable[[int], None]


def read_log(stream: BinaryIO, source: str, progress: Progress | None = None) -> Evidence:
    """The evidence of a stream of bytes. progress: called with the bytes read so far."""
    reader = _Reader(source)
    before = b""
    while piece := stream.read(PIECE_BYTES):
        before = reader.take(before, piece)
        if progress is not None:
            progress(reader.read_bytes)
    reader.take(before, b"", last=True)
    return reader.evidence()


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.read_bytes = 0
        self.best: Event | None = None
        self.failures: Counter[Recognised] = Counter()
        self.ranks: set[int] = set()
        self.series = Series()
        self.hints: set[Hint] = set()
        self._lines = 0  # before the buffer
        self._seen = 0  # bytes of the buffer whose marks are done
        self._message_end = 0

    def take(self, before: bytes, piece: bytes, *, last: bool = False) -> bytes:
        """Looks at a piece after what is left of those before it; what the next one needs is returned."""
        self.read_bytes += len(piece)
        buffer = before + piece
        until = len(buffer) if last else max(self._seen, len(buffer) - _AFTER_BYTES)
        lower = buffer.lower()
        for at in self._marked(lower, self._seen, until):
            self._look(buffer, at)
        self.series.take(buffer, lower, self._seen, until)
        seen(lower, self._seen, until, self.hints)
        if last and self.best is None:
            self._look_at_end(buffer)
        keep = max(0, until - _BEFORE_BYTES)
        self._lines += buffer.count(b"\n", 0, keep)
        self._seen = until - keep
        self._message_end -= keep
        return buffer[keep:]

    def _marked(self, lower: bytes, start: int, stop: int) -> list[int]:
        """Positions of markers, of each the first some of a piece."""
        found: set[int] = set()
        for marker in MARKERS:
            at = start
            for _ in range(_MOST_MARKED):
                at = lower.find(marker, at, stop + len(marker))
                if at < 0 or at >= stop:
                    break
                found.add(at)
                at = lower.find(b"\n", at, stop)
                if at < 0:
                    break
        return sorted(found)

    def _look(self, buffer: bytes, at: int) -> None:
        if at < self._message_end:  # a message has many markers
            return
        start = max(buffer.rfind(b"\n", max(0, at - _LONGEST_MESSAGE), at) + 1, at - _LONGEST_MESSAGE, 0)
        window = _unwrapped(buffer[start : at + _LONGEST_MESSAGE])
        line = window.partition("\n")[0]
        sign = sign_of(line) or sign_of(window[: _LONGEST_SHOWN + at - start])
        if sign is None:
            return
        self.failures[sign.recognised] += 1
        end = buffer.find(b"\n", at)
        self._message_end = end if end >= 0 else len(buffer)
        self._note_rank(line)
        self._weigh(sign, buffer, start, window)

    def _look_at_end(self, buffer: bytes) -> None:
        """The last error of a log that has no marker: it died, and not of memory."""
        tail = buffer[-_AFTER_BYTES:].decode("utf-8", "replace")
        for line in reversed(tail.splitlines()):
            sign = sign_of(line)
            if sign is not None:
                self.failures[sign.recognised] += 1
                self._weigh(sign, buffer, len(buffer), line)
                return

    def _weigh(self, sign: Sign, buffer: bytes, start: int, window: str) -> None:
        best = self.best
        if best is not None and (best.weight > sign.weight or (best.weight == sign.weight and best.numbers.said)):
            return
        message = joined(window)
        numbers = numbers_of(message)
        if best is not None and best.weight == sign.weight and not numbers.said:
            return
        above = _unwrapped(buffer[max(0, start - _BEFORE_BYTES) : start])
        rank = _RANK.search(window[:_LONGEST_SHOWN])
        self.best = Event(
            recognised=sign.recognised,
            weight=sign.weight,
            what=sign.what,
            line=self._lines + buffer.count(b"\n", 0, start) + 1,
            text=_printable(message[:_LONGEST_SHOWN]),
            numbers=numbers,
            called=frames_of(above),
            rank=int(rank[1]) if rank else None,
        )

    def _note_rank(self, line: str) -> None:
        rank = _RANK.search(line)
        if rank is not None and len(self.ranks) < _MOST_RANKS:
            self.ranks.add(int(rank[1]))

    def evidence(self) -> Evidence:
        return Evidence(
            source=self.source,
            event=self.best,
            failures=tuple(sorted(self.failures.items())),
            ranks=tuple(sorted(self.ranks)),
            series=self.series.allocated(),
            hints=tuple(sorted(self.hints)),
        )


def joined(window: str) -> str:
    """The message that begins a window, its lines joined; it ends where another begins."""
    text = _CONTINUED.sub(" ", window)
    first = text.lower().find("tried to allocate")
    again = text.lower().find("tried to allocate", first + 1) if first >= 0 else -1
    return text[:again] if again >= 0 else text


def _unwrapped(part: bytes) -> str:
    """Text without colours, and as it was before it became a string of JSON's."""
    text = _COLOUR.sub("", part.decode("utf-8", "replace"))
    return text.replace('\\"', '"').replace("\\n", "\n") if '\\"' in text or '{"' in text else text


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text).strip()
