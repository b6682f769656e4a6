"""Values that never change: classes of them, and a read-only, hashable mapping. A job and a model can key a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field
from inspect import get_annotations
from operator import attrgetter
from typing import TypeVar, dataclass_transform


class FrozenMap(Mapping[str, object]):
    """JSON-like values, frozen all the way down: lists become tuples, mappings become FrozenMaps."""

    __slots__ = ("_hash", "_items")

    def __init__(self, keys: Mapping[str, object] | None = None) -> None:
        self._items = {str(key): _frozen(value) for key, value in (keys or {}).items()}
        self._hash = hash(frozenset(self._items.items()))

    def __getitem__(self, key: str) -> object:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self._items == other._items
        return NotImplemented

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, object]]]:
        return FrozenMap, (self._items,)  # texts hash differently in each process, so the hash is not carried over

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    def as_dict(self) -> dict[str, object]:
        """Plain JSON values: lists and dicts again."""
        return {key: _thawed(value) for key, value in self._items.items()}


def _frozen(value: object) -> object:
    if isinstance(value, FrozenMap):
        return value
    if isinstance(value, Mapping):
        return FrozenMap(value)
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value


def _thawed(value: object) -> object:
    if isinstance(value, FrozenMap):
        return value.as_dict()
    if isinstance(value, tuple):
        return [_thawed(item) for item in value]
    return value


def hash_once(value: object, *parts: object) -> int:
    """The hash of a frozen dataclass, computed from ``parts`` once and kept in its field ``_hash``.

    Jobs, graphs and ranks key caches on every call; hashing their whole tree each time would cost more than the answer.
    """
    known: int | None = value._hash  # type: ignore[attr-defined]
    if known is None:
        known = hash(parts)
        object.__setattr__(value, "_hash", known)
    return known


_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Like:
    """A dataclass of the standard library: what ours tell ``dataclasses`` about themselves is taken from it."""

    one: int


_KIND = getattr(_Like.__dataclass_fields__["one"], "_field_type")  # noqa: B009 - what fields() and replace() look for


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: _Class) -> _Class:
    """``dataclass(frozen=True, slots=True, kw_only=True)``, made in a quarter of the time: a command makes some sixty of them.

    The standard decorator compiles six methods for every class. Here only ``__init__`` is compiled; the others are shared. What
    ``dataclasses`` offers works: ``fields``, ``replace``, ``asdict``, ``field``, ``__post_init__``; so do ``copy`` and ``pickle``.
    """
    own = {name: _field(cls, name, kind) for name, kind in get_annotations(cls).items()}
    inherited: dict[str, Field[object]] = {}
    for base in reversed(cls.__mro__[1:]):
        inherited |= base.__dict__.get("__dataclass_fields__", {})
    fields = inherited | own
    body = {name: value for name, value in cls.__dict__.items() if name not in own and name not in _OF_EVERY_CLASS}
    for name, method in _SHARED.items():
        body.setdefault(name, method)
    body["__slots__"] = tuple(name for name in own if name not in inherited)
    body["__dataclass_fields__"] = fields
    body["__dataclass_params__"] = _Like.__dict__["__dataclass_params__"]
    compared = [name for name, one in fields.items() if one.compare]
    equal, hashed = _comparing(attrgetter(*compared) if compared else _nothing)
    body.setdefault("__eq__", equal)
    body.setdefault("__hash__", hashed)
    made: _Class = type(cls)(cls.__name__, cls.__bases__, body)
    made.__qualname__ = cls.__qualname__
    type.__setattr__(made, "__init__", _init(made, fields))
    return made


_OF_EVERY_CLASS = ("__dict__", "__weakref__")


def _nothing(_: object) -> tuple[()]:
    return ()


def _comparing(compared: Callable[[object], object]) -> tuple[object, object]:
    """``__eq__`` and ``__hash__`` over what ``compared`` takes of an object."""

    def equal(self: object, other: object) -> bool:
        return bool(compared(self) == compared(other)) if type(other) is type(self) else NotImplemented

    def hashed(self: object) -> int:
        return hash(compared(self))

    return equal, hashed


def _field(cls: type, name: str, kind: object) -> Field[object]:
    default = cls.__dict__.get(name, MISSING)
    found: Field[object] = default if isinstance(default, Field) else field(default=default)
    for attribute, value in (("name", name), ("type", kind), ("kw_only", True), ("_field_type", _KIND)):
        setattr(found, attribute, value)
    return found


def _init(cls: type, fields: Mapping[str, Field[object]]) -> object:
    """``__init__(self, *, ...)``, which sets each slot by its descriptor: no class has a setter of its own."""
    names: dict[str, object] = {"MISSING": MISSING}
    parameters, lines = [], []
    for name, one in fields.items():
        names[f"set_{name}"] = getattr(cls, name).__set__
        names[f"default_{name}"] = one.default
        names[f"make_{name}"] = one.default_factory
        value = name
        if one.default_factory is not MISSING:
            value = f"make_{name}() if {name} is MISSING else {name}" if one.init else f"make_{name}()"
            parameter = f"{name}=MISSING"
        else:
            parameter = name if one.default is MISSING else f"{name}=default_{name}"
            value = name if one.init else f"default_{name}"
        if one.init:
            parameters.append(parameter)
        lines.append(f" set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    head = f"def __init__(self, *, {', '.join(parameters)}):" if parameters else "def __init__(self):"
    exec("\n".join([head, *(lines or [" pass"])]), names)  # as dataclasses does; the names are a class's own
    init = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"  # type: ignore[attr-defined]
    return init


def _repr(self: object) -> str:
    shown = (f"{name}={getattr(self, name)!r}" for name, one in _fields(self).items() if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _setattr(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: object) -> list[object]:
    """What ``__init__`` takes. A kept hash stays behind: texts hash differently in each process."""
    return [getattr(self, name) if one.init else one.default for name, one in _fields(self).items()]


def _setstate(self: object, state: list[object]) -> None:
    for name, value in zip(_fields(self), state, strict=True):
        object.__setattr__(self, name, value)


_Value = TypeVar("_Value")


def replace(value: _Value, **changes: object) -> _Value:
    """``dataclasses.replace`` of a ``frozen`` one, in a third of the time: a search makes a million of them."""
    changed: _Value = value.__replace__(**changes)  # type: ignore[attr-defined]
    return changed


def _replace(self: object, **changes: object) -> object:
    """Compiled for a class when it is first asked for, as few are: each slot is set once, without ``__init__`` between."""
    cls = type(self)
    own: dict[str, object] = {"cls": cls, "new": object.__new__, "KEPT": object()}
    lines = []
    for name, one in _fields(self).items():
        own[f"set_{name}"] = getattr(cls, name).__set__
        own |= {f"default_{name}": one.default, f"make_{name}": one.default_factory}
        value = f"self.{name} if {name} is KEPT else {name}"
        if not one.init:
            value = f"default_{name}" if one.default_factory is MISSING else f"make_{name}()"
        lines.append(f" set_{name}(made, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append(" made.__post_init__()")
    parameters = ", ".join(f"{name}=KEPT" for name, one in _fields(self).items() if one.init)
    body = "\n".join([f"def __replace__(self, *, {parameters}):", " made = new(cls)", *lines, " return made"])
    exec(body, own)
    type.__setattr__(cls, "__replace__", own["__replace__"])
    return replace(self, **changes)


def _fields(self: object) -> dict[str, Field[object]]:
    found: dict[str, Field[object]] = self.__dataclass_fields__  # type: ignore[attr-defined]
    return found


_SHARED = {
    "__repr__": _repr,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
    "__getstate__": _getstate,
    "__setstate__": _setstate,
    "__replace__": _replace,
}
