"""A calibration file, as `ullage bench` writes it, and the device that it makes of a machine. docs/calibration.md has the format."""

from __future__ import annotations

import functools
import itertools
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ullage.errors import InvalidInput, UllageError
from ullage.frozen import frozen, replace
from ullage.hardware import store
from ullage.hardware.cluster import Device
from ullage.hardware.curve import Samples
from ullage.hardware.measured import Attended, Measured, Moved, Multiplied
from ullage.textfile import read_start
from ullage.units import MIB

T = TypeVar("T")

SCHEMA = 2
THIS = "this-machine"
"""How a job's cluster names the machine that the file at ``usual_place`` was measured on."""
_SUFFIX = ".toml"
_MOST_BYTES = 4 * MIB
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_DIRECTIONS = ("forward", "dgrad", "wgrad", "batched")
_AGAIN = "write it again: ullage bench"


@frozen
class Machine:
    """A calibration file. device: without what was measured of it; runs: by processes."""

    device: Device
    runs: tuple[Measured, ...]


def usual_place() -> Path:
    """Where `ullage bench` writes without --out."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ullage" / f"{THIS}{_SUFFIX}"


def names_one(name: object) -> bool:
    """Whether a job's device is a calibration file or the machine that is measured in the usual one."""
    return isinstance(name, str) and (name.endswith(_SUFFIX) or store.normalised(name) == store.normalised(THIS))


def calls(measured: Measured) -> str:
    """How a job's device names it."""
    return THIS if measured.file == str(usual_place()) else str(Path(measured.file).absolute())


def measured_device(name: str, processes: int, key: str) -> Device:
    """The device that ``processes`` ranks of a job are on; on the CPU each has its share of the memory.

    Of several numbers of processes the file's nearest speaks, above before below.
    """
    path = Path(name).expanduser() if name.endswith(_SUFFIX) else usual_place()
    try:
        machine = read(path)
    except UllageError as error:
        if error.key is None:
            error.key, error.value = key, store.short(name)
        raise
    run = min(machine.runs, key=lambda one: (max(one.processes / processes, processes / one.processes), -one.processes))
    device = replace(machine.device, measured=run)
    if device.vendor != "cpu":
        return device
    share = device.capacity_bytes // processes
    return replace(device, capacity_bytes=share, capacity_range_bytes=(share, share))


def here() -> Device | None:
    """This machine, whole, where it was measured into the usual place."""
    return replace(read(usual_place()).device, name=THIS) if usual_place().is_file() else None


def read(path: Path) -> Machine:
    """Raises InvalidInput for what is no calibration file, with the key, what is allowed and what to do."""
    missing = "there is no such calibration file"
    content = read_start(path, _MOST_BYTES, remedy="measure this machine: ullage bench", missing=missing)
    if len(content) > _MOST_BYTES:
        raise InvalidInput("is no calibration file: too large", remedy=_AGAIN, place=str(path))
    return _parsed(content, str(path))


@functools.lru_cache(maxsize=8)
def _parsed(content: bytes, place: str) -> Machine:
    try:
        return _machine(_Table(tomllib.loads(content.decode()), ""), place)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"is no calibration file: {error}", remedy=_AGAIN, place=place) from None
    except UllageError as error:
        error.remedy = error.remedy or _AGAIN
        raise error.at(place) from None


class _Table:
    """One table of the file, read key by key; what is wrong is told with the key's whole name."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values, self._name = values, name

    def key(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name

    def get(self, name: str, kind: type[T]) -> T:
        if name not in self._values:
            raise InvalidInput("is missing", key=self.key(name))
        value = self._values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidInput(f"is no {kind.__name__}", key=self.key(name), value=store.short(value))
        return value

    def positive(self, name: str) -> float:
        value = self._values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise InvalidInput("is no positive number", key=self.key(name), value=store.short(value))
        return float(value)

    def least(self, name: str) -> float:
        """A number from 0 on; 0 where it is left out."""
        value = self._values.get(name, 0)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise InvalidInput("is no number from 0 on", key=self.key(name), value=store.short(value))
        return float(value)

    def word(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.get(name, str)
        if value not in allowed:
            raise InvalidInput("is unknown", key=self.key(name), value=store.short(value), allowed=", ".join(allowed))
        return value

    def numbers(self, name: str, *, rising: bool, count: int | None = None) -> tuple[float, ...]:
        values = self.get(name, list)
        if not values:
            raise InvalidInput("is empty", key=self.key(name))
        if not all(isinstance(one, int | float) and 0 < one < math.inf for one in values):
            raise InvalidInput("has a number that is not positive", key=self.key(name), value=store.short(values))
        if rising and any(after <= before for before, after in itertools.pairwise(values)):
            raise InvalidInput("does not rise", key=self.key(name), value=store.short(values))
        if count is not None and len(values) != count:
            raise InvalidInput(f"has {len(values)} numbers, and its axes have {count}", key=self.key(name))
        return tuple(map(float, values))

    def table(self, name: str) -> _Table:
        return _Table(self.get(name, dict), self.key(name))

    def tables(self, name: str, *, least: int = 1) -> list[_Table]:
        found = self.get(name, list) if least or name in self._values else []
        if len(found) < least or not all(isinstance(one, dict) for one in found):
            raise InvalidInput("is empty" if not found else "is no list of tables", key=self.key(name))
        return [_Table(one, f"{self.key(name)}[{at}]") for at, one in enumerate(found)]

    def each(self, name: str, read_one: Callable[[_Table], T], *, least: int = 1) -> tuple[T, ...]:
        return tuple(read_one(one) for one in self.tables(name, least=least))

    def __contains__(self, name: str) -> bool:
        return name in self._values


def _machine(root: _Table, place: str) -> Machine:
    if root.get("schema", int) != SCHEMA:
        raise InvalidInput("is of another version", key="schema", value=root.get("schema", int), allowed=str(SCHEMA))
    date, source = root.get("date", str), root.get("source", str)
    told = root.table("device")
    process_bytes = int(told.positive("process_bytes"))
    runs = root.each("run", lambda one: _run(one, place, date, source, process_bytes))
    return Machine(device=_device(told, runs, source), runs=runs)


def _device(told: _Table, runs: tuple[Measured, ...], source: str) -> Device:
    """A GPU of the catalogue keeps what is known of it beside its speed."""
    name = told.get("name", str)
    peaks: dict[str, float] = {}
    for one in (grid for run in runs for grid in run.matmuls):
        peaks[one.dtype] = max(peaks.get(one.dtype, 0.0), *one.flops_per_s)
    for series in (series for run in runs for series in run.attention):
        peaks[series.dtype] = max(peaks.get(series.dtype, 0.0), *series.flops_per_s)
    flops_per_s = tuple(sorted(peaks.items()))
    copied = [one for run in runs for one in run.traffic if one.kind == "copy"]
    moved = max((one.bytes[-1] / one.seconds[-1] for one in copied), default=None)
    if store.normalised(name) in {store.normalised(known) for known in store.devices()}:
        known = store.device(name)
        flops_per_s = tuple({**dict(known.flops_per_s), **peaks}.items())
        return replace(known, flops_per_s=flops_per_s, memory_bytes_per_s=moved)
    capacity = int(told.positive("memory_bytes"))
    return Device(
        name=name,
        capacity_bytes=capacity,
        capacity_range_bytes=(capacity, capacity),
        vendor=told.word("vendor", ("cpu", "nvidia", "amd")),
        memory_bytes_per_s=moved,
        flops_per_s=flops_per_s,
        source=source,
    )


def _run(run: _Table, place: str, date: str, source: str, process_bytes: int) -> Measured:
    overlap = run.get("overlap", float)
    if not 0 <= overlap <= 1:
        raise InvalidInput("is no share", key=run.key("overlap"), value=overlap, allowed="0 to 1")
    host = None
    if "host" in run:
        host = run.table("host").positive("to_device_bytes_per_s"), run.table("host").positive("to_host_bytes_per_s")
    processes = int(run.positive("processes"))
    return Measured(
        file=place,
        date=date,
        source=source,
        processes=processes,
        threads=int(run.positive("threads")),
        spread=run.get("spread", float),
        overlap=overlap,
        process_bytes=process_bytes,
        matmuls=run.each("matmul", _multiplied),
        traffic=run.each("memory", _moved),
        attention=run.each("attention", _attended),
        collectives=run.each("collective", _collective, least=len(_KINDS) if processes > 1 else 0),
        sharded_layer_s=run.least("sharded_layer_s"),
        split_layer_s=run.least("split_layer_s"),
        host_bytes_per_s=host,
    )


def _multiplied(one: _Table) -> Multiplied:
    m, n, k = (one.numbers(axis, rising=True) for axis in "mnk")
    return Multiplied(
        dtype=one.get("dtype", str),
        direction=one.word("direction", _DIRECTIONS),  # type: ignore[arg-type]
        m=m,
        n=n,
        k=k,
        flops_per_s=one.numbers("flops_per_s", rising=False, count=len(m) * len(n) * len(k)),
    )


def _moved(one: _Table) -> Moved:
    sizes = one.numbers("bytes", rising=True)
    return Moved(
        kind=one.get("kind", str),
        dtype=one.get("dtype", str),
        backward=one.get("backward", bool),
        bytes=sizes,
        seconds=one.numbers("seconds", rising=False, count=len(sizes)),
    )


def _attended(one: _Table) -> Attended:
    seq = one.numbers("seq", rising=True)
    return Attended(
        dtype=one.get("dtype", str),
        head_dim=int(one.positive("head_dim")),
        causal=one.get("causal", bool),
        backward=one.get("backward", bool),
        seq=seq,
        flops_per_s=one.numbers("flops_per_s", rising=False, count=len(seq)),
    )


def _collective(one: _Table) -> Samples:
    sizes = one.numbers("payload_bytes", rising=True)
    return Samples(
        kind=one.word("kind", _KINDS),  # type: ignore[arg-type]
        ranks=int(one.positive("ranks")),
        payload_bytes=sizes,
        seconds=one.numbers("seconds", rising=False, count=len(sizes)),
    )
