"""What a message of an allocation that failed says in numbers, in every form that torch and what stands on it has printed.

    torch 0.4 to 1.1   (GPU 0; 11.17 GiB total capacity; 10.65 GiB already allocated; 1.56 MiB free; 200.00 KiB cached)
    1.2 to 2.0         (... 1.56 MiB free; 10.80 GiB reserved in total by PyTorch), with "... allowed" where a fraction was set
    2.1 and later      GPU 0 has a total capacity of ... of which ... is free. Process N has ... memory in use. ...
                       Of the allocated memory ... is allocated by PyTorch, [with ... allocated in private pools,] and ... is reserved
                       by PyTorch but unallocated.
    cudaMallocAsync    Allocation on device 0 would exceed allowed memory. (out of memory), then lines: Currently allocated : ...,
                       Requested : ..., Device limit : ..., Free (according to CUDA): ..., PyTorch limit (...) : ...

The texts are c10/cuda/CUDACachingAllocator.cpp's (``OutOfMemoryError``) of each release, with HIP, XPU and NPU in CUDA's place,
c10/cuda/CUDAMallocAsyncAllocator.cpp's, aten/src/ATen/mps/MPSAllocator.mm's, c10/core/impl/alloc_cpu.cpp's, and NCCL's include/alloc.h.
Each number is looked for by the words beside it, so that a text cut short or joined from lines keeps the others.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import cache
from typing import NamedTuple

from ullage.frozen import frozen
from ullage.units import unit_bytes

_SIZE = r"(\d{1,24}(?:,\d{3}){0,6}(?:\.\d{1,9})?) ?([Bb]ytes?|[KMGTPE]i?B|B)\b"


class Printed(NamedTuple):
    """A size as printed. within_bytes: half of its last digit, so the true one lies no farther away."""

    bytes: int
    within_bytes: int


def printed(number: str, unit: str) -> Printed | None:
    """``("3.14", "GiB")`` as bytes, without a unit as bytes already; None for an unknown unit."""
    size = unit_bytes(unit) if unit else 1
    if size is None:
        return None
    number = number.replace(",", "")
    digits = len(number.partition(".")[2])
    within = 0 if size == 1 else int(Decimal(size).scaleb(-digits) / 2) + 1
    return Printed(int(Decimal(number) * size), within)


class _Said(NamedTuple):
    """A number and the words beside it. marker: a text of every message that ``pattern`` knows; it is compiled when one has it."""

    marker: str
    pattern: str

    def find(self, text: str) -> Printed | None:
        if self.marker not in text:
            return None
        match = _compiled(self.pattern).search(text)
        return None if match is None else printed(match[1], match[2])


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


_FIELDS = {
    "tried": (
        _Said("ried to allocate", rf"[Tt]ried to allocate (?:more than )?{_SIZE}"),
        _Said("CUDA calloc", rf"[Ff]ailed to CUDA calloc(?: async)? {_SIZE}"),
        _Said("ttempting to allocate", rf"[Aa]ttempting to allocate {_SIZE}"),
        _Said("nable to allocate", rf"[Uu]nable to allocate {_SIZE}"),
        _Said("memory allocating", rf"[Oo]ut of memory allocating {_SIZE}"),
        _Said("trying to allocate", rf"[Oo]ut of memory (?:while )?trying to allocate {_SIZE}"),
        _Said("ailed to allocate", rf"[Ff]ailed to allocate {_SIZE}"),
        _Said("ailed to allocate", rf"[Ff]ailed to allocate [\d.]{{1,12}}[KMGT] \({_SIZE}\)"),
        _Said("annot allocate", rf"[Cc]annot allocate {_SIZE}"),
        _Said("Requested", rf"\bRequested\s{{0,20}}: {_SIZE}"),
        _Said("Invalid buffer size", rf"Invalid buffer size: {_SIZE}"),
        _Said("Allocation failed", r"Allocation failed for size::(\d{1,24})()"),
    ),
    "capacity": (
        _Said("total capacity", rf"{_SIZE} total capacity"),
        _Said("total capac", rf"total capac(?:i)?ty of {_SIZE}"),
        _Said("Device limit", rf"Device limit\s{{0,20}}: {_SIZE}"),
    ),
    "free": (
        _Said("of which", rf"of which {_SIZE} is free"),
        _Said(" free", rf"{_SIZE} free\b"),
        _Said("available memory", rf"available memory is only {_SIZE}"),
        _Said("according to CUDA", rf"Free \(according to CUDA\): {_SIZE}"),
    ),
    "allocated": (
        _Said("Currently allocated", rf"Currently allocated\s{{0,20}}: {_SIZE}"),
        _Said("allocated so far", rf"allocated so far: {_SIZE}"),
        _Said("already allocated", rf"{_SIZE} already allocated"),
        _Said("is allocated by", rf"{_SIZE} is allocated by"),
        _Said("MPS allocated", rf"MPS allocated: {_SIZE}"),
        _Said("has been allocated", rf"{_SIZE} memory has been allocated"),
    ),
    "reserved": (_Said("reserved in total", rf"{_SIZE} reserved in total"), _Said("cached", rf"{_SIZE} cached")),
    "unallocated": (_Said("but unallocated", rf"{_SIZE} is reserved by \w+ but unallocated"),),
    "private_pools": (_Said("private pools", rf"with {_SIZE} allocated in private pools"),),
    "metal_elsewhere": (_Said("other allocations", rf"other allocations: {_SIZE}"),),
    "process": (_Said("this process has", rf"this process has {_SIZE} memory in use"),),
    "allowed": (
        _Said("max allowed", rf"max allowed: {_SIZE}"),
        _Said("allowed", rf"{_SIZE} allowed"),
        _Said("user-supplied", rf"PyTorch limit \(set by user-supplied memory fraction\)\s{{1,30}}: {_SIZE}"),
    ),
}
_OTHERS = re.compile(rf"\bProcess \d{{1,10}} has {_SIZE} memory in use")
_MOST_PROCESSES = 64
_DEVICE = re.compile(r"\b(?:GPU|NPU|XPU|[Aa]llocation on device) (\d{1,4})\b")
_METAL = re.compile(r"MPS (?:backend|allocated)|Invalid buffer size")
_METAL_UNIT = re.compile(r"(?<=\d )([KMG])B\b")
"""MPSAllocator's format_size divides by powers of 1024, and says GB (torch 2.0 to 2.5)."""
NONSENSE_RATIO = 4
"""A figure of this many times the card's capacity is no memory: WSL2 and containers answer 2^64 for what they hide."""


@frozen
class Numbers:
    """Bytes as the message says them; None: not said. tried_within_bytes: how far rounding in print may have moved ``tried``.

    allocated: handed out by the framework; reserved: held from the driver, in use or not; process: all that this process holds, context
    and libraries included; other_processes: of all others on the card, and how many they are (also where the driver
    tells of none how much it holds); allowed: a limit set by hand.
    """

    tried_bytes: int | None = None
    tried_within_bytes: int = 0
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    other_processes_bytes: int | None = None
    other_processes_count: int = 0
    process_bytes: int | None = None
    private_pools_bytes: int | None = None
    allowed_bytes: int | None = None
    device: int | None = None

    @property
    def unused_bytes(self) -> int:
        """Held from the driver and not handed out."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return 0
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def said(self) -> int:
        """How many of the numbers the text says."""
        return sum(getattr(self, f"{name}_bytes") is not None for name in ("tried", "capacity", "free", "allocated"))

    def sane(self, size: int | None) -> int | None:
        """The figure, or None where the card could not hold a quarter of it."""
        if size is None or self.capacity_bytes is None or size <= NONSENSE_RATIO * self.capacity_bytes:
            return size
        return None


def numbers_of(text: str) -> Numbers:
    """Every number that ``text`` says; text: one message, its lines joined by blanks, at most some thousand characters."""
    text = _METAL_UNIT.sub(r"\1iB", text) if _METAL.search(text) else text
    found = {name: one for name, ways in _FIELDS.items() if (one := _first(ways, text)) is not None}
    size = {name: one.bytes for name, one in found.items()}
    reserved = size.get("reserved")
    if reserved is None and "allocated" in size and "unallocated" in size:
        reserved = size["allocated"] + size["unallocated"]
    told = [one.bytes for match in _some(_OTHERS, text) if (one := printed(*match.groups())) is not None]
    others = [one for one in told if one]  # a container may hide what processes hold: 0 bytes of each
    process = size.get("process")
    if process is None and "metal_elsewhere" in size and "allocated" in size:
        process = size["allocated"] + size["metal_elsewhere"]
    used = size.get("capacity", 0) - size.get("free", 0)
    if process is None and (process := _own(others, reserved or size.get("allocated"), used)) is not None:
        others.remove(process)
        told.remove(process)
    device = _DEVICE.search(text)
    return Numbers(
        tried_bytes=size.get("tried"),
        tried_within_bytes=found["tried"].within_bytes if "tried" in found else 0,
        capacity_bytes=size.get("capacity"),
        free_bytes=size.get("free"),
        allocated_bytes=size.get("allocated"),
        reserved_bytes=reserved,
        other_processes_bytes=sum(others) if others else None,
        other_processes_count=len(told),
        process_bytes=process,
        private_pools_bytes=size.get("private_pools"),
        allowed_bytes=size.get("allowed"),
        device=int(device[1]) if device else None,
    )


def _own(processes: list[int], reserved: int | None, used: int) -> int | None:
    """This process among those of the card. torch knows it by its number, which in a container is another than the driver's: it is then
    told as any "Process N", and is the one that holds what torch has reserved, or the most, where torch counts what is not on the card.
    used: of the card by all; where it has room for what torch has beside all that are told, this one is not among them."""
    if reserved is None or sum(processes) + reserved <= used:
        return None
    return min((one for one in processes if one >= reserved), default=max(processes, default=None))


def _first(ways: tuple[_Said, ...], text: str) -> Printed | None:
    return next((found for way in ways if (found := way.find(text)) is not None), None)


def _some(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return [match for match, _ in zip(pattern.finditer(text), range(_MOST_PROCESSES), strict=False)]
