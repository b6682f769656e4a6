"""The C library's heap in a process that is a rank on the CPU, and nothing else (mallopt(3))."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc, malloc.h
_KEEP = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}
_DEFAULT = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 2**17, _TRIM_THRESHOLD: 2**17}


def keep_what_is_freed() -> bool:
    """From here on the process keeps freed memory for what it allocates next, as CUDA's allocator does. Whether the C library can.

    glibc hands large blocks, and the top of its heap, back to the system when they are freed, and a step then takes them page by page from
    there again: a seventh of the seconds of a small FSDP2 step. Here no block is one of its own, and the heap is not trimmed.
    """
    return _set(_KEEP)


def give_back_what_is_freed() -> bool:
    """As the C library does by itself: a limit on the process then counts what it uses, and no more."""
    changed = _set(_DEFAULT)
    if changed:
        ctypes.CDLL(None).malloc_trim(0)
    return changed


@contextmanager
def keeping_what_is_freed() -> Iterator[None]:
    """The process keeps what it frees meanwhile, and gives it back at the end."""
    keep_what_is_freed()
    try:
        yield
    finally:
        give_back_what_is_freed()


def _set(parameters: dict[int, int]) -> bool:
    try:
        mallopt: Any = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another library, another system
        return False
    return all(bool(mallopt(name, value)) for name, value in parameters.items())
