"""A job file as text: read with limits, so that a wrong path is one clear message and never a full memory."""

from __future__ import annotations

from pathlib import Path

from ullage.errors import InvalidInput
from ullage.textfile import read_start
from ullage.units import MIB, format_bytes

LONGEST_FILE_BYTES = 1 * MIB


def read_text(path: Path, what: str = "a job file") -> str:
    """The text of ``path``; InvalidInput if it is no readable, small text file. what: that a message says was expected."""
    place = str(path)
    remedy = f"give the path of {what}"
    try:
        raw = read_start(path, LONGEST_FILE_BYTES, remedy=remedy)
    except IsADirectoryError:
        raise InvalidInput("is a directory", remedy=f"{remedy} in it", place=place) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot be read: {error}", remedy=remedy, place=place) from None
    if len(raw) > LONGEST_FILE_BYTES:
        size = max(path.stat().st_size, len(raw))  # a pipe says 0
        raise InvalidInput(
            f"is {format_bytes(size)} long",
            allowed=f"{what} of at most {format_bytes(LONGEST_FILE_BYTES)}",
            remedy="is this a checkpoint or a data set?",
            place=place,
        )
    return _decoded(raw, place, what)


def _decoded(raw: bytes, place: str, what: str) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"is no text file (byte {error.start} is no UTF-8)",
            allowed=f"{what} in YAML, TOML or JSON, as UTF-8 text",
            place=place,
        ) from None
    if "\0" in text:
        raise InvalidInput("is a binary file", allowed=f"{what} in YAML, TOML or JSON", place=place)
    return text
