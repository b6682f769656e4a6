"""What a rank may hold, and what is said and tried where it asked for more."""

from __future__ import annotations

import re
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed

from ullage.errors import OutOfMemory
from ullage.memory.allocator_blocks import segment_bytes
from ullage.train.heap import give_back_what_is_freed
from ullage.units import KIB, format_bytes

_ON_CPU = re.compile(r"DefaultCPUAllocator: .{0,60}tried to allocate (\d+) bytes")


@contextmanager
def limited(budget_bytes: int | None, device: torch.device) -> Iterator[None]:
    """The allocator refuses what is beyond the budget: CUDA's by itself, the CPU's because the system does (RLIMIT_DATA).

    On the CPU the budget is of what the process adds from here on, whatever adds it: copies for a checkpoint too.
    """
    if budget_bytes is None:
        yield
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        give_back_what_is_freed()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_status_bytes("VmData") + budget_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def explained(out: Path, moment: str, budget_bytes: int | None) -> Iterator[None]:
    """An allocation that failed as OutOfMemory, with its traceback in a file for ``ullage why``."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        on_cpu = _ON_CPU.search(str(error))
        if on_cpu is None and not isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        told = "".join(traceback.format_exception(error))
        if on_cpu is not None and budget_bytes is not None:
            told += _as_of_a_card(int(on_cpu[1]), budget_bytes)
        log = out / f"oom-rank-{rank}.log"
        log.write_text(told)
        what = told.strip().splitlines()[-1].partition(": ")[2].partition(". ")[0] or _of_python(budget_bytes)
        raise OutOfMemory(f"{moment}: {what}", key=f"rank {rank}", value=str(log)) from None


def _of_python(budget_bytes: int | None) -> str:
    """Of a MemoryError, which has no words of its own."""
    within = "" if budget_bytes is None else f" within the budget of {format_bytes(budget_bytes)}"
    return f"no memory for Python's own objects{within}"


def _as_of_a_card(tried_bytes: int, budget_bytes: int) -> str:
    """What CUDA's allocator says of the same request on a card of that size: it asks for whole segments."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    free = max(0, limit - _status_bytes("VmData"))
    return (
        f"OutOfMemoryError: the budget is out of memory. Tried to allocate {segment_bytes(tried_bytes)} bytes, "
        f"with a total capacity of {budget_bytes} bytes of which {free} bytes is free. "
        f"Of the allocated memory {budget_bytes - free} bytes is allocated by PyTorch.\n"
    )


def held(device: torch.device) -> list[int]:
    """This rank's bytes allocated at the highest moment since this was last asked, and reserved; on the CPU its resident size alone."""
    if device.type != "cuda":
        return [_status_bytes("VmRSS")]
    sizes = [torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]
    torch.cuda.reset_peak_memory_stats()
    return sizes


def _status_bytes(name: str) -> int:
    """A line of /proc/self/status: VmData is what RLIMIT_DATA limits, VmRSS what is resident (proc(5))."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux has it"
    return int(found[1]) * KIB
