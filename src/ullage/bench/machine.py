"""What the system says of the machine that is measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from ullage.errors import InvalidInput, Unsupported
from ullage.frozen import frozen
from ullage.hardware import store
from ullage.hardware.machine import THIS


@frozen
class Facts:
    """name: how a job calls the device: the catalogue's name of a GPU that is in it, else this-machine."""

    name: str
    vendor: str
    processor: str
    cores: int
    memory_bytes: int


def facts(device: str) -> Facts:
    """device: cpu or cuda."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cpu":
        return Facts(name=THIS, vendor="cpu", processor=_processor(), cores=cores, memory_bytes=_memory_bytes())
    name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    vendor = "amd" if torch.version.hip else "nvidia"
    return Facts(name=_catalogued(name, total), vendor=vendor, processor=name, cores=cores, memory_bytes=total)


def choose(device: str | None) -> str:
    """What --device says, or what there is: cuda where torch sees a GPU."""
    if device not in (None, "cpu", "cuda"):
        raise InvalidInput("is no kind of device", key="--device", value=device, allowed="cpu, cuda")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise Unsupported(
            "torch sees no GPU here", key="--device", value=device, remedy="measure the CPU: --device cpu"
        )
    return device or ("cuda" if there else "cpu")


def numbers(text: str | None, device: str) -> tuple[int, ...]:
    """Of processes, what --processes says, as 1,2,4; or 1 and 2 on the CPU, 1 and all GPUs on cuda."""
    if text is None:
        most = torch.cuda.device_count() if device == "cuda" else 2
        return tuple(sorted({1, most}))
    found = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= _MOST_PROCESSES:
            raise InvalidInput(
                "is no number of processes",
                key="--processes",
                value=text[:60],
                allowed=f"1 to {_MOST_PROCESSES}, or several: 1,2,4",
            )
        found.append(int(part))
    if device == "cuda" and max(found) > torch.cuda.device_count():
        raise InvalidInput(
            "are more than there are GPUs",
            key="--processes",
            value=text[:60],
            allowed=f"1 to {torch.cuda.device_count()}",
        )
    return tuple(sorted(set(found)))


_MOST_PROCESSES = 64


def _catalogued(name: str, memory_bytes: int) -> str:
    """The catalogue's device of nearly that memory whose words stand in the driver's name."""
    said = store.normalised(name)
    for known in store.devices():
        device = store.device(known)
        maker = store.normalised(known.split("-")[0])
        if maker in said and abs(device.capacity_bytes / memory_bytes - 1) < _SAME_MEMORY:
            return known
    return THIS


_SAME_MEMORY = 0.05


def _memory_bytes() -> int:
    """Of the host, or what the process's control group leaves of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total]
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(place).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
