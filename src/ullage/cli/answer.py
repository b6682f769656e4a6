"""How a command writes its answer: as JSON, or as a report for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType


def write_json(answer: Mapping[str, object]) -> None:
    from ullage.report.json import dumps

    sys.stdout.write(dumps(answer) + "\n")


def write_report(parts: Iterable[RenderableType]) -> None:
    from ullage.report.console import to_stdout, write

    write(parts, to_stdout())


def save(path: Path, text: str) -> None:
    """Raises InvalidInput where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot be written: {error.strerror}", key="--out", value=str(path)) from None
