"""Where a report goes: a terminal with colours, or plain text. NO_COLOR and COLUMNS are honoured."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

PLAIN_WIDTH = 110
NARROWEST = 60


def to_stdout() -> Console:
    """Colours and width as the terminal has them; without one plain text, PLAIN_WIDTH wide."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    if console.width < NARROWEST:
        console.width = NARROWEST
    return console


def plain(parts: Iterable[RenderableType], width: int = PLAIN_WIDTH) -> str:
    """The report as plain text."""
    console = Console(
        width=width,
        file=io.StringIO(),
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None,
        legacy_windows=False,
    )
    write(parts, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def write(parts: Iterable[RenderableType], console: Console) -> None:
    """Prints each part; lines carry no trailing blanks, so that a saved report diffs well."""
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def heading(text: str, note: str = "") -> Text:
    found = Text(f"\n{text}", style="bold")
    if note:
        found.append(f"  {note}", style="not bold dim")
    return found


def indented(part: RenderableType, by: int = 2) -> Padding:
    return Padding(part, (0, 0, 0, by), expand=False)
