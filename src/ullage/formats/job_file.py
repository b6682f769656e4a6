"""ullage's own job file as one of the formats: any other is read into it, and it is written from any other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as FilePath

from ullage.formats import yaml_text
from ullage.formats.reading import Reading
from ullage.formats.tree import Leaves, Path, Tree, flat
from ullage.job.job import Job
from ullage.job.write import job_to_dict

NAME = "job"
TITLE = "a job file"
ENGINES = ("single", "ddp", "zero1", "fsdp1", "fsdp2", "deepspeed", "megatron")
SYNTAX = yaml_text
CANNOT: Mapping[str, str] = {}

_MARKS = re.compile(
    r"""^\s*\{?\s*["']?(schema["']?\s*[:=]\s*1\b|(model|data|layout|engine|cluster)["']?\s*[:=])|^\s*\[(data|layout|engine)\]""",
    re.M,
)


def detect(text: str, name: str) -> bool:
    """A key at the top that no other format has: schema, two of a job's sections, or its model and its cluster."""
    found = {match[0].strip().strip("{\"'[]:= ") for match in _MARKS.finditer(text)}
    sections = found - {"model"}
    return len(sections) >= 2 or {"model", "cluster"} <= found or any(mark.startswith("schema") for mark in found)


def read(text: str, place: str) -> Reading:
    """The document as it stands: ``read_job`` is the one who checks it."""
    from ullage.job.document import parse_document

    document = parse_document(text, FilePath(place))
    values = document.values
    model = values.get("model")
    if isinstance(model, str) and "/" in model and not FilePath(model).is_absolute():
        beside = document.base_dir / model
        values = values | ({"model": str(beside)} if beside.exists() else {})
    leaves = flat(values, place)
    lines = dict(document.find_lines())
    origins = {".".join(path): path for path in leaves}
    return Reading(
        format=NAME, place=place, tree=Tree(leaves=leaves, lines=lines), keys=values, leftovers=(), origins=origins
    )


def leaves(job: Job) -> dict[Path, object]:
    """Every key that is not left at its default."""
    document = job_to_dict(job)
    taken = {default.partition(" = ")[0] for default in job.defaults}
    found: dict[Path, object] = {}
    for path, value in flat({key: value for key, value in document.items() if key != "model"}, "").items():
        if ".".join(path) not in taken and value not in (None, {}, []):
            found[path] = value
    model = document["model"]
    return {("model",): model} | found if not isinstance(model, dict) else flat({"model": model}, "") | found


def notes(job: Job) -> tuple[str, ...]:
    return ()


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return yaml_text.render(found, comments)
