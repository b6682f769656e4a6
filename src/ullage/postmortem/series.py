"""How allocated memory went, as a log tells it step by step: DeepSpeed's, Megatron-LM's, axolotl's, torchtitan's and torchtune's lines,
and what a person prints of torch.cuda.memory_allocated()."""

from __future__ import annotations

import re

from ullage.postmortem.messages import printed

_MARKERS = (b" ma ", b"allocated: ", b"memory: ", b"max_mem_active", b"memory_allocated", b"peak_memory_active")
_PATTERN = re.compile(
    rb"(?: MA (?P<a>\d{1,9}(?:\.\d{1,6})?) (?P<A>GB|MB)|"  # DeepSpeed's see_memory_usage divides by 1024^3 and says GB
    rb"(?<!max )\ballocated: (?P<b>\d{1,12}(?:\.\d{1,6})?)(?P<B>(?= ?\|)| ?[GM]i?B\b)|"  # Megatron-LM: megabytes of 1024^2, without a unit
    rb"\bmemory: {1,3}(?P<c>\d{1,9}(?:\.\d{1,6})?)(?P<C>GiB)|"  # torchtitan
    rb"max_mem_active\(gib\)'?\"?: '?\"?(?P<d>\d{1,9}(?:\.\d{1,6})?)(?P<D>)|"
    rb"\bpeak_memory_active:(?P<e>\d{1,9}(?:\.\d{1,6})?)(?P<E>)|"  # torchtune's get_memory_stats, of the steps since the last line
    rb"\bmemory_allocated(?:\(\))?['\"]?[:=]? {0,4}(?P<f>\d{7,15}(?![\d.])|\d{1,12}(?:\.\d{1,6})?(?= ?[KMG]i?B))(?P<F>(?: ?[KMG]i?B)?))"
)
_UNITS = {"a": "GiB", "b": "MiB", "d": "GiB", "e": "GiB", "f": "bytes"}
"""Where a line says none."""
_POWERS_OF_1024 = {b"GB": "GiB", b"MB": "MiB"}
MOST_POINTS = 4096


class Series:
    """Keeps at most some thousand points: when there are more, every second one."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._every = 1
        self._count = 0

    def take(self, buffer: bytes, lower: bytes, start: int, stop: int) -> None:
        """The points of a part of a log; lower: the same in lower case."""
        if not any(lower.find(marker, start, stop) >= 0 for marker in _MARKERS):
            return
        for match in _PATTERN.finditer(buffer, start, stop):
            name = next(name for name in "abcdef" if match[name] is not None)
            unit = match[name.upper()].strip()
            self._add(match[name].decode(), _POWERS_OF_1024.get(unit, unit.decode()) or _UNITS[name])

    def _add(self, number: str, unit: str) -> None:
        self._count += 1
        if self._count % self._every:
            return
        size = printed(number, unit)
        if size is not None:
            self._points.append(size.bytes)
        if len(self._points) >= MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def allocated(self) -> tuple[int, ...]:
        return tuple(self._points)
