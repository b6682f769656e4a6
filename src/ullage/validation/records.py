"""Files of measured runs: lists of records as docs/job.md describes them.

A file that holds no such list is an error; a record that is wrong inside its file is told with its reason and the others are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ullage.errors import InvalidInput, UllageError, nearest
from ullage.frozen import frozen
from ullage.textfile import read_start
from ullage.units import GIB, MIB, format_bytes

LONGEST_FILE_BYTES = 256 * MIB
GRADES = ("A", "B", "C")
MEMORY = ("allocated", "reserved", "device", "unspecified")
TIME = ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
PREDICTED_TIME = TIME[:2]
QUANTITIES = (*MEMORY, *PREDICTED_TIME)

_GIVE = "give a file or folder of records"
_REQUIRED = ("id", "source", "grade", "job", "measured", "fits")
_KEYS = (*_REQUIRED, "assumed", "notes")
_MEASURED_KEYS = (*(f"{name}_gib" for name in MEMORY), "static_allocated_gib", "per_stage_gib", "rank", *TIME)
_OPERATION_KEYS = frozenset({"op", "impl", "shapes", "measured_mib"})


@frozen
class Record:
    """One measured run. memory: bytes by quantity; time: what the source states of it, by docs/job.md's name.

    rank: which rank was measured: "max", "last" or the index of a pipeline stage. per_stage: allocated bytes of each stage.
    """

    id: str
    source: str
    grade: str
    job: Mapping[str, object]
    memory: Mapping[str, float]
    time: Mapping[str, float]
    rank: str | int
    fits: bool | None
    static_allocated_bytes: float | None = None
    per_stage_bytes: tuple[float, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: str = ""
    file: str = ""


@frozen
class Rejected:
    """A record that cannot be held against anything, and why. short: without what would be allowed instead."""

    id: str
    why: str
    short: str
    file: str = ""


@frozen
class Records:
    """Everything that was read. skipped: files that are known to hold something else, with a word on what."""

    records: tuple[Record, ...]
    rejected: tuple[Rejected, ...] = ()
    skipped: tuple[str, ...] = ()


def rejected_for(error: UllageError, name: str, file: str) -> Rejected:
    short = UllageError(error.what, key=error.key, value=error.value)
    return Rejected(id=name, why=str(error), short=str(short), file=file)


def read_records(paths: Sequence[str | Path]) -> Records:
    """The records of files, and of every .json file in folders. InvalidInput for a path that holds none."""
    records: list[Record] = []
    rejected: list[Rejected] = []
    skipped: list[str] = []
    for path in _files(paths):
        entries = _entries(path)
        if entries and all(isinstance(entry, dict) and entry.keys() >= _OPERATION_KEYS for entry in entries):
            skipped.append(f"{path.name}: {len(entries)} single operations, no jobs")
            continue
        for index, entry in enumerate(entries):
            try:
                records.append(_record(entry, path.name))
            except InvalidInput as error:
                rejected.append(rejected_for(error, _name(entry, path, index), path.name))
    if not records and not rejected:
        raise InvalidInput("hold no record", key="PATH", value=", ".join(map(str, paths))[:200])
    return Records(records=tuple(records), rejected=tuple(rejected), skipped=tuple(skipped))


def _files(paths: Iterable[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise InvalidInput("is a folder without .json files", remedy="give a file of records", place=str(path))
            found += inside
        else:
            found.append(path)
    return found


def _entries(path: Path) -> list[object]:
    place = str(path)
    try:
        raw = read_start(path, LONGEST_FILE_BYTES, remedy=_GIVE)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot be read: {error}", remedy=_GIVE, place=place) from None
    if len(raw) > LONGEST_FILE_BYTES:
        limit = format_bytes(LONGEST_FILE_BYTES)
        raise InvalidInput("is too long", allowed=f"a file of at most {limit}", remedy="split it", place=place)
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InvalidInput("is no text file", allowed="a list of records, as JSON", place=place) from None
    except json.JSONDecodeError as error:
        where = f"{place}, line {error.lineno}"
        raise InvalidInput(f"is no valid JSON: {error.msg}", allowed="a list of records", place=where) from None
    except (RecursionError, ValueError) as error:  # ValueError: a number of more than 4,300 digits
        raise InvalidInput(f"is no valid JSON: {error}", allowed="a list of records", place=place) from None
    if not isinstance(value, list):
        remedy = "for a job file: ullage estimate" if isinstance(value, dict) and "model" in value else None
        raise InvalidInput("holds no list", allowed="a list of records", remedy=remedy, place=place)
    return value


def _name(entry: object, path: Path, index: int) -> str:
    name = entry.get("id") if isinstance(entry, dict) else None
    return name if isinstance(name, str) and name else f"{path.name}[{index}]"


def _record(entry: object, file: str) -> Record:
    if not isinstance(entry, dict):
        raise InvalidInput("is no record", value=repr(entry)[:60], key="record", allowed="an object")
    _known(entry, _KEYS, "")
    for key in _REQUIRED:
        if key not in entry:
            raise InvalidInput("is missing", key=key)
    for key, kind, what in (
        ("id", str, "a text"),
        ("source", str, "a text"),
        ("job", dict, "a job"),
        ("measured", dict, "an object"),
    ):
        if not isinstance(entry[key], kind) or not entry[key]:
            raise InvalidInput(f"is not {what}", key=key, value=repr(entry[key])[:60])
    if entry["grade"] not in GRADES:
        raise InvalidInput("is no grade", key="grade", value=repr(entry["grade"])[:60], allowed=", ".join(GRADES))
    if entry["fits"] not in (True, False, None):
        raise InvalidInput("is neither", key="fits", value=repr(entry["fits"])[:60], allowed="true, false, null")
    measured = entry["measured"]
    _known(measured, _MEASURED_KEYS, "measured.")
    return Record(
        id=entry["id"],
        source=entry["source"],
        grade=entry["grade"],
        job=entry["job"],
        memory={name: GIB * size for name in MEMORY if (size := _number(measured, f"{name}_gib")) is not None},
        time={name: number for name in TIME if (number := _number(measured, name)) is not None},
        rank=_rank(measured.get("rank")),
        fits=entry["fits"],
        static_allocated_bytes=_bytes(measured, "static_allocated_gib"),
        per_stage_bytes=_per_stage(measured),
        assumed=tuple(map(str, entry.get("assumed") or ())),
        notes=str(entry.get("notes") or ""),
        file=file,
    )


def _known(found: Mapping[str, object], known: Sequence[str], prefix: str) -> None:
    for key in found:
        if key not in known:
            near = nearest(str(key), known)
            remedy = f"did you mean {near}?" if near else None
            raise InvalidInput("is no key of a record", key=f"{prefix}{key}", allowed=", ".join(known), remedy=remedy)


def _number(measured: Mapping[str, object], key: str) -> float | None:
    value = measured.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidInput(
            "is no measurement", key=f"measured.{key}", value=repr(value)[:60], allowed="above 0, or null"
        )
    return float(value)


def _bytes(measured: Mapping[str, object], key: str) -> float | None:
    size = _number(measured, key)
    return None if size is None else size * GIB


def _per_stage(measured: Mapping[str, object]) -> tuple[float, ...]:
    value = measured.get("per_stage_gib")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidInput("is no list", key="measured.per_stage_gib", value=repr(value)[:60])
    sizes = [_number({"per_stage_gib": one}, "per_stage_gib") for one in value]
    return tuple(size * GIB for size in sizes if size is not None)


def _rank(value: object) -> str | int:
    if value is None or value in ("max", "last"):
        return "max" if value is None else str(value)
    if isinstance(value, str) and value.isdecimal() and len(value) < 8:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise InvalidInput(
        "is no rank", key="measured.rank", value=repr(value)[:60], allowed="max, last or a stage's index"
    )
