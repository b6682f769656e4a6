"""``--set layout.tp=2``: one key changed from the shell, before the job is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ullage.errors import InvalidInput
from ullage.hardware.spec import as_mapping
from ullage.job.document import Document
from ullage.job.yaml_tree import TEXT_PATHS, parse_yaml

# A short form becomes the mapping that it stands for, so that --set optimizer.impl=foreach changes one key of it.
_SHORT_FORM_KEY = {"model": "base", "optimizer": "name", "loss": "kind"}
# Setting one of two exclusive keys takes the other back.
_EXCLUSIVE = {"data.global_batch": "grad_accum", "data.grad_accum": "global_batch"}
# Here null is a value; for any other key it means "left out".
_NULLABLE = frozenset(
    {"lora", "stack_version", "data.seq_len_mean", "engine.shard_group", "lora.dtype", "precision.master"}
)


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Sets each ``dotted.key=value``, value in YAML; null leaves the key out. InvalidInput if it is no assignment."""
    for override in overrides:
        place = f"--set {override}"
        key, equals, text = override.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise InvalidInput("is no assignment", allowed="KEY=VALUE, such as layout.tp=2", place=place)
        _set(document, path, _value(text, path, place), place)


def _value(text: str, path: tuple[str, ...], place: str) -> object:
    if path in TEXT_PATHS:
        return None if text.strip() in ("", "null", "~") else text.strip().strip("'\"")
    try:
        return parse_yaml(text, place)[0]
    except InvalidInput as error:
        error.place = place  # a line number says nothing here
        raise


def _set(document: Document, path: tuple[str, ...], value: object, place: str) -> None:
    dotted = ".".join(path)
    section = document.values
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.get(part)
        above = ".".join(path[:depth])
        if isinstance(inner, str) and above in _SHORT_FORM_KEY:
            inner = {_SHORT_FORM_KEY[above]: inner}
        elif above == "cluster" and isinstance(inner, str) and (mapping := as_mapping(inner)) is not None:
            inner = mapping
        elif inner is None:
            inner = {}
            document.places.setdefault(above, place)
        elif not isinstance(inner, dict):
            raise InvalidInput(
                "is no mapping, so no key of it can be set",
                key=above,
                value=inner,
                remedy=f"set the whole of it: --set '{above}={{...}}'",
                place=place,
            )
        section[part] = inner
        section = cast("dict[str, object]", inner)
    if dotted in _EXCLUSIVE:
        section.pop(_EXCLUSIVE[dotted], None)
    if value is None and dotted not in _NULLABLE:
        section.pop(path[-1], None)
    else:
        section[path[-1]] = value
    document.places[dotted] = place
