"""Text files read with limits, so that a wrong path is one clear message and never a full memory; and the JSON in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ullage.errors import InvalidInput


def read_start(path: Path, n_bytes: int, *, remedy: str, missing: str = "there is no such file") -> bytes:
    """The first ``n_bytes`` of a file, and one more where it is longer. InvalidInput if there is none or it may not be read.

    Whatever else may be wrong stays an OSError, or the ValueError of a NUL in the path.
    """
    place = str(path)
    try:
        with path.open("rb") as file:
            return file.read(n_bytes + 1)
    except FileNotFoundError:
        raise InvalidInput(missing, remedy=remedy, place=place) from None
    except PermissionError:
        raise InvalidInput("no permission to read it", remedy="make it readable: chmod +r", place=place) from None


def parse_json(
    text: str, place: str, *, remedy: str, too_deep: str, parse_constant: Callable[[str], object] | None = None
) -> object:
    """JSON in which no key stands twice. InvalidInput, with ``remedy``, or ``too_deep`` for its nesting.

    A number of more than 4,300 digits is a plain ValueError, as json leaves it.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=parse_constant)
    except json.JSONDecodeError as error:
        truncated = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        raise InvalidInput(
            f"is no valid JSON: {error.msg}",
            remedy="the file ends too early; is it truncated?" if truncated else remedy,
            place=f"{place}, line {error.lineno}",
        ) from None
    except InvalidInput as error:
        raise error.at(place) from None
    except RecursionError:
        raise InvalidInput("is nested too deep", remedy=too_deep, place=place) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput("is written twice", key=twice, remedy="keep one of the two")
    return keys
