"""INPUT of ``why``: a message, a file (a log, gzip too, a summary, a snapshot), a folder of ranks' logs and settings, or standard input."""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ullage.errors import InvalidInput
from ullage.frozen import replace
from ullage.memory.allocator_blocks import segment_bytes
from ullage.postmortem.evidence import Block, Event, Evidence
from ullage.postmortem.hints import seen
from ullage.postmortem.log import joined, read_log
from ullage.postmortem.messages import Numbers, numbers_of
from ullage.postmortem.signs import Recognised, sign_of
from ullage.postmortem.summary_text import HEAD, read_summary
from ullage.postmortem.tracebacks import Called
from ullage.units import MIB

if TYPE_CHECKING:
    from ullage.postmortem.snapshot_history import Held

STDIN = "-"
_GZIP = b"\x1f\x8b"
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What PowerShell writes where output is sent to a file."""
_HEAD_BYTES = MIB
_RANK = re.compile(r"rank[ _.-]?(?P<of_file>\d{1,6})[^/]*$|/attempt_\d{1,6}/(?P<of_folder>\d{1,6})/[^/]+$")
_MOST_FILES = 4096
_SETTINGS = (".yaml", ".yml", ".toml", ".json", ".sh")
"""Read for what they say of the cause (``hints.py``), up to a piece; a job is read by --config."""
_LOGS = (".log", ".txt", ".out", ".err", ".gz", ".stdout", ".stderr")

Progress = Callable[[int, int | None], None]
"""Called with the bytes read, and of how many (None: not known)."""


def read_input(given: str, progress: Progress | None = None) -> Evidence:
    """The evidence in what a person gave. Raises InvalidInput for a file that is missing or cannot be read."""
    if given == STDIN:
        return _of_standard_input(sys.stdin.buffer, progress)
    if not given.strip():
        raise InvalidInput("is empty", key="INPUT", allowed="a file, a folder of logs, a message, or -")
    path = Path(given)
    try:
        if path.is_dir():
            return _of_folder(path, progress)
        if path.is_file():
            return _of_rank(path, _of_file(path, progress))
    except OSError as error:  # a message is no path, and may be longer than any
        if _is_a_path(given):
            raise InvalidInput("cannot be read", key="INPUT", value=given[:200], remedy=error.strerror) from None
    except ValueError:  # a NUL
        pass
    if _is_a_path(given):
        raise InvalidInput(
            "is no file", key="INPUT", value=given[:200], allowed="a file, a folder of logs, a message, or -"
        )
    return _of_stream(io.BytesIO(given.encode("utf-8", "replace")), "the message", None, None)


def _of_standard_input(stream: BinaryIO, progress: Progress | None) -> Evidence:
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)  # type: ignore[type-var]
    head = buffered.peek(2)[:2]
    if head in _PICKLES:
        raise InvalidInput(
            "is a pickle on standard input", key="INPUT", value=STDIN, remedy="give the path of the snapshot"
        )
    if head == _GZIP:
        return _of_gzip(buffered, "standard input", progress)
    return _of_stream(buffered, "standard input", None, progress)


def _is_a_path(given: str) -> bool:
    """A text of one word is meant as a path, unless it is one that tells of a failure ("Killed", "OOMKilled")."""
    word = bool(given) and not any(letter.isspace() for letter in given)
    return word and ("/" in given or "." in given or sign_of(given) is None)


def _of_file(path: Path, progress: Progress | None) -> Evidence:
    with path.open("rb") as file:
        head = file.read(2)
        file.seek(0)
        if head in _PICKLES or path.suffix in (".pickle", ".pkl"):
            return _of_snapshot(path)
        if head == _GZIP:
            return _of_gzip(file, str(path), progress)
        return _of_stream(file, str(path), path.stat().st_size, progress)


def _of_rank(path: Path, found: Evidence) -> Evidence:
    """The rank that a file is named for, where its lines tell none: rank3.log, or torchrun's attempt_0/3/stderr.log."""
    event = found.event
    named = _RANK.search(path.as_posix())
    if event is None or event.rank is not None or named is None:
        return found
    rank = int(named["of_file"] or named["of_folder"])
    return replace(found, event=replace(event, rank=rank), ranks=tuple(sorted({*found.ranks, rank})))


def _of_gzip(file: BinaryIO, source: str, progress: Progress | None) -> Evidence:
    import gzip
    import zlib

    try:
        return _of_stream(gzip.open(file), source, None, progress)  # type: ignore[arg-type]
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InvalidInput(f"is no whole gzip file: {error}", key="INPUT", value=source[:200]) from None


def _of_stream(stream: BinaryIO, source: str, size: int | None, progress: Progress | None) -> Evidence:
    head = stream.read(_HEAD_BYTES)
    if head[:2] in _UTF_16:
        stream = codecs.EncodedFile(_After(head, stream), "utf-8", "utf-16", "replace")  # type: ignore[arg-type]
        head = stream.read(_HEAD_BYTES)
    text = head.decode("utf-8", "replace")
    if HEAD.search(text) and (found := read_summary(text, source)) is not None:
        return _with_message(found, text)
    told = (lambda done: progress(done, size)) if progress is not None else None
    return read_log(_After(head, stream), source, told)  # type: ignore[arg-type]


class _After:
    """A stream whose head was read already."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int) -> bytes:
        head, self._head = self._head[:size], self._head[size:]
        return head or self._rest.read(size)


def _with_message(summary: Evidence, text: str) -> Evidence:
    """A summary that was printed beside the failure it explains: the message's numbers, and the summary's fragmentation."""
    found = read_log(io.BytesIO(text.encode()), summary.source)
    if not found.ran_out or found.event is None or not numbers_of(joined(found.event.text)).said:
        return summary
    return Evidence(
        source=found.source,
        event=found.event,
        failures=found.failures,
        ranks=found.ranks,
        split_bytes=summary.split_bytes,
        hints=found.hints,
    )


def _of_folder(path: Path, progress: Progress | None) -> Evidence:
    """The logs of many ranks: the heaviest failure of all, the ranks of any, the hints of these and of the settings beside them.

    One that cannot be read is told, and keeps no other from being read.
    """
    every = [one for one in path.rglob("*") if one.suffix in _LOGS + _SETTINGS and one.is_file()]
    files = sorted(one for one in every if one.suffix in _LOGS)[:_MOST_FILES]
    if not files:
        raise InvalidInput("holds no logs", key="INPUT", value=str(path), allowed=f"files named *{', *'.join(_LOGS)}")
    found: list[Evidence] = []
    unread: list[str] = []
    for file in files:
        try:
            found.append(_of_rank(file, _of_file(file, progress)))
        except (InvalidInput, OSError) as error:
            unread.append(str(error))
    if not found:
        raise InvalidInput(f"holds no log that can be read: {unread[0]}", key="INPUT", value=str(path))
    best = max(found, key=lambda one: (one.event.weight, one.event.numbers.said) if one.event else (0, 0))
    failures: Counter[Recognised] = Counter()
    for one in found:
        failures.update(dict(one.failures))
    ranks = {rank for one in found for rank in one.ranks}
    hints = {hint for one in found for hint in one.hints}
    for file in sorted(one for one in every if one.suffix in _SETTINGS)[:_MOST_FILES]:
        with file.open("rb") as stream:
            text = stream.read(_HEAD_BYTES).lower()
        seen(text, 0, len(text), hints)
    return Evidence(
        source=best.source,
        event=best.event,
        failures=tuple(sorted(failures.items())),
        ranks=tuple(sorted(ranks)),
        series=best.series,
        split_bytes=best.split_bytes,
        blocks=best.blocks,
        highest=best.highest,
        hints=tuple(sorted(hints)),
        unread=tuple(unread),
    )


def _of_snapshot(path: Path) -> Evidence:
    """What a snapshot holds; one whose history ends in a failure tells of it as a message would."""
    from ullage.postmortem.snapshot import read_snapshot, summarise

    summary = summarise(read_snapshot(path))
    failed = summary.failed
    numbers = Numbers(
        tried_bytes=segment_bytes(failed.bytes) if failed is not None else None,
        free_bytes=failed.free_bytes if failed is not None else None,
        allocated_bytes=summary.allocated_bytes,
        reserved_bytes=summary.reserved_bytes,
        device=summary.device,
    )
    event = Event(
        recognised="cuda-oom" if failed is not None else "unknown",
        weight=9 if failed is not None else 1,
        what="a snapshot of torch's allocator" + (", with the request that failed" if failed is not None else ""),
        line=1,
        text=path.name,
        numbers=numbers,
        called=tuple(Called(one, "") for one in reversed(failed.frames)) if failed is not None else (),
    )
    return Evidence(
        source=str(path),
        event=event,
        split_bytes=summary.split_bytes,
        blocks=_blocks(summary.held),
        highest=_blocks(summary.at_peak or ()),
    )


def _blocks(held: Sequence[Held]) -> tuple[Block, ...]:
    counts = Counter((one.bytes, one.requested_bytes, one.category, one.what) for one in held)
    found = [
        Block(bytes=size, requested_bytes=requested, count=n, category=kind, where=where)
        for (size, requested, kind, where), n in counts.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.bytes * one.count, one.where)))
