"""How allocated memory went, as a log tells it step by step: DeepSpeed's, Megatron-LM's, axolotl's and torchtitan's lines."""

from __future__ import annotations

import re

from ullage.postmortem.messages import printed

_MARKERS = (b" ma ", b"allocated: ", b"memory: ", b"max_mem_active", b"memory_allocated")
_PATTERN = re.compile(
    rb"(?: MA (?P<a>\d{1,9}(?:\.\d{1,6})?) (?P<b>GB|MB)|"  # DeepSpeed's see_memory_usage divides by 1024^3 and says GB
    rb"(?<!max )\ballocated: (?P<c>\d{1,12}(?:\.\d{1,6})?)(?P<d>(?= ?\|)| ?[GM]i?B\b)|"  # Megatron-LM: megabytes of 1024^2, without a unit
    rb"\bmemory: {1,3}(?P<e>\d{1,9}(?:\.\d{1,6})?)(?P<f>GiB)|"  # torchtitan
    rb"max_mem_active\(gib\)'?\"?: '?\"?(?P<g>\d{1,9}(?:\.\d{1,6})?)(?P<h>))"
)
_UNITS = {b"GB": "GiB", b"MB": "MiB", b"": "MiB", b"GiB": "GiB", b"MiB": "MiB"}
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
            number = next(match[name] for name in "aceg" if match[name] is not None)
            unit = "GiB" if match["g"] is not None else _UNITS[(match["b"] or match["d"] or match["f"] or b"").strip()]
            self._add(number.decode(), unit)

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
