"""A read-only, hashable mapping, so that a job and a model can key a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


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
