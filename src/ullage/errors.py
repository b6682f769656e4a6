"""What can go wrong, as a tree with stable codes.

    UllageError                    anything that ends a command with a message and no traceback
    ├── InvalidInput               what the user gave is wrong: exit status 2
    │   ├── UnknownKey             a key that no reader knows
    │   ├── Contradiction          two keys that exclude each other
    │   └── UnknownName            a model, device or engine that no catalogue holds
    ├── Unsupported                the input is right and ullage does not model it (yet)
    ├── Infeasible                 the layout cannot exist on this cluster; a search counts these
    └── OutOfMemory                a training asked a GPU for more than it had

Each message names the value, the limit, the place and the remedy. A broken invariant of ours is an ``assert``.
"""

from __future__ import annotations

from collections.abc import Iterable


class UllageError(Exception):
    """Base of every error that a person can cause or meet; ``code`` is stable across releases."""

    code = "ullage"

    def __init__(
        self,
        what: str,
        *,
        key: str | None = None,
        value: object = None,
        allowed: str | None = None,
        remedy: str | None = None,
        place: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.key = key
        self.value = value
        self.allowed = allowed
        self.remedy = remedy
        self.place = place

    def __str__(self) -> str:
        head = f"{self.key} = {self.value}: " if self.key is not None and self.value is not None else ""
        head = head or (f"{self.key}: " if self.key is not None else "")
        tail = "".join(
            part
            for part in (
                f"; allowed: {self.allowed}" if self.allowed else "",
                f"; {self.remedy}" if self.remedy else "",
                f" ({self.place})" if self.place else "",
            )
        )
        return _one_line(f"{head}{self.what}{tail}")

    def at(self, place: str) -> UllageError:
        """The same error, told where it was found (a file, a line); the first place named stands."""
        if self.place is None:
            self.place = place
        return self


class InvalidInput(UllageError):
    code = "invalid-input"


class UnknownKey(InvalidInput):
    code = "unknown-key"


class Contradiction(InvalidInput):
    code = "contradiction"


class UnknownName(InvalidInput):
    code = "unknown-name"


class Unsupported(UllageError):
    code = "unsupported"


class Infeasible(UllageError):
    code = "infeasible"


class OutOfMemory(UllageError):
    """``value``: a file with the traceback, for ``ullage why``."""

    code = "out-of-memory"


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that ``name`` was probably meant to be, or None. likeness: the least, of 1 (difflib's ratio)."""
    import difflib  # only when something is wrong

    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return matches[0] if matches else None


def _one_line(text: str) -> str:
    """The text with what would break a line written as Python writes it: a value can hold anything."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
