"""What was read of a file: the keys of a job that it says, and all the rest, which is shown and never dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal, TypeVar

from ullage.errors import InvalidInput
from ullage.formats.tree import Path, Tree, dotted
from ullage.frozen import frozen
from ullage.job.fields import Read, show

Severity = Literal["error", "warning", "advice"]
T = TypeVar("T")


@frozen
class Leftover:
    """A key that no job holds, with the reason; path: where it stands in the file."""

    path: Path
    value: object
    why: str

    @property
    def key(self) -> str:
        return dotted(self.path)


@frozen
class Finding:
    """key: theirs, as they write it. fix: leaves of their file to set (None: to drop), which put it right."""

    severity: Severity
    key: str
    what: str
    remedy: str
    fix: tuple[tuple[Path, object], ...] = ()


@frozen
class Batch:
    """A step's sequences as three numbers that must multiply: whole = micro x accumulation x data-parallel ranks.

    Each with the path of its key; None: not written.
    """

    whole: tuple[int, Path] | None = None
    micro: tuple[int, Path] | None = None
    accum: tuple[int, Path] | None = None


@frozen
class Reading:
    """keys: a job document (docs/job.md), with the model and the cluster missing where the file does not say them.

    origins: the dotted job key -> the path in the file that said it; findings: what stands in the file alone; renamed: a key's path
    today -> as the file writes it; elsewhere: a job key that the file leaves to another -> who says it, and how to; by_engine: of a file
    that leaves the engine to its launch, the keys that each engine makes of it.
    """

    format: str
    place: str
    tree: Tree
    keys: Mapping[str, object]
    leftovers: tuple[Leftover, ...]
    origins: Mapping[str, Path]
    batch: Batch = Batch()
    findings: tuple[Finding, ...] = ()
    renamed: Mapping[Path, Path] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    by_engine: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def where(self, path: Path) -> str:
        """``ds_config.json, line 12``."""
        line = self.tree.lines.get(path)
        return self.place if line is None else f"{self.place}, line {line}"


class Keys:
    """The leaves of a file, each taken once: into the job, or left over with a reason."""

    def __init__(self, tree: Tree, place: str) -> None:
        self.tree = tree
        self.place = place
        self._open = dict(tree.leaves)
        self.job: dict[str, object] = {}
        self.origins: dict[str, Path] = {}
        self.leftovers: list[Leftover] = []
        self.findings: list[Finding] = []
        self.elsewhere: dict[str, str] = {}

    def has(self, path: Path) -> bool:
        return path in self._open

    def opened(self, leaves: Mapping[Path, object]) -> None:
        """More leaves to be taken: of a file that this one names."""
        self._open |= leaves

    def under(self, path: Path) -> list[Path]:
        """The leaves not yet taken at ``path`` and below."""
        return [leaf for leaf in self._open if leaf[: len(path)] == path]

    def raw(self, path: Path) -> object:
        """The value of a leaf, taken; None where it is not written."""
        return self._open.pop(path, None)

    def take(self, path: Path, read: Read[T]) -> T | None:
        """The value of a leaf as ``read`` has it; None where it is not written, or null. InvalidInput with the line."""
        value = self._open.get(path)
        if value is None:
            return None
        try:
            found = read(value, dotted(path))
        except InvalidInput as error:
            raise error.at(self.where(path)) from None
        del self._open[path]
        return found

    def where(self, path: Path) -> str:
        line = self.tree.lines.get(path)
        return self.place if line is None else f"{self.place}, line {line}"

    def put(self, key: str, value: object, path: Path | None = None) -> None:
        """Sets a job key by its dotted name."""
        section = self.job
        *above, name = key.split(".")
        for part in above:
            inner = section.setdefault(part, {})
            assert isinstance(inner, dict)
            section = inner
        section[name] = value
        if path is not None:
            self.origins[key] = path

    def put_option(self, name: str, value: object, path: Path) -> None:
        """Sets ``engine.options.NAME``: an option's name may hold no dot, a path does."""
        self.put(f"engine.options.{name}", value, path)

    def move_options(self, names: Mapping[Path, str], engine: str, stack: str) -> None:
        """Takes each leaf that is one of the engine's options: path -> the option's name."""
        from ullage.job.options import find_option

        for path, name in names.items():
            if self._open.get(path) is None:
                continue
            option = find_option(name, engine, stack)
            assert option is not None, name
            value = self.tree.leaves[path]
            self.take(path, option.read)
            self.put_option(name, value, path)

    def move(self, path: Path, key: str, read: Read[T]) -> T | None:
        """Takes a leaf into the job."""
        value = self.take(path, read)
        if value is not None:
            self.put(key, value, path)
        return value

    def leave(self, path: Path, why: str) -> None:
        if path in self._open:
            self.leftovers.append(Leftover(path=path, value=self._open.pop(path), why=why))

    def rest(self, why: Callable[[Path], str]) -> None:
        """All that nobody took is left over."""
        for path in list(self._open):
            self.leave(path, why(path))

    def find(self, severity: Severity, key: str, what: str, remedy: str, *fix: tuple[Path, object]) -> None:
        self.findings.append(Finding(severity=severity, key=key, what=what, remedy=remedy, fix=fix))

    def done(self, name: str, batch: Batch | None = None) -> Reading:
        return Reading(
            format=name,
            place=self.place,
            tree=self.tree,
            keys=self.job,
            leftovers=tuple(self.leftovers),
            origins=self.origins,
            batch=batch or Batch(),
            findings=tuple(self.findings),
            elsewhere=self.elsewhere,
        )


def size(value: object, key: str) -> int:
    """A whole number of at least 1; 5e8 is one."""
    from ullage.job.fields import integer

    return integer(1)(value, key)


def lenient_flag(value: object, key: str) -> bool:
    """true or false, in a text too, as yes and no: how YAML and shells of other tools write it."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, bool):
        return value
    found = words.get(str(value).strip().lower()) if isinstance(value, str | int) else None
    if found is None:
        raise InvalidInput("is neither true nor false", key=key, value=show(value), allowed="true or false")
    return found
