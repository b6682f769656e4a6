"""Reads the keys of a config.json strictly: a wrong type or an absurd value names the key, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeGuard

from ullage.errors import InvalidInput, nearest

LARGEST_SIZE: Final = 10**7
LONGEST_CONTEXT: Final = 10**9  # Llama 4 Scout's is above 10^7
MOST_LAYERS: Final = 10**4
_LONGEST_VALUE: Final = 60
_MISSPELT: Final = 0.8
"""Least likeness of a key to one that is missing: max_position_embeddings is no misspelt tie_word_embeddings."""
_BEYOND: Final = 2**63  # Python refuses to write a very long integer in decimal


class Required:
    """Stands for: no default, the key must be there."""


REQUIRED: Final = Required()


class Activation(NamedTuple):
    """act: what it computes, as kernels know it; form: its name in config.json."""

    act: str
    form: str


# config.json's names (transformers/activations.py) -> what is computed. Most gelus differ in their code alone, hence in memory.
_ACTIVATIONS: Final[Mapping[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_10": "gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_python_tanh": "gelu",
    "gelu_accurate": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "squared-relu",
    "xielu": "xielu",
}


class Keys:
    """A config.json's keys. Names after the first are other spellings of the same key; ``asked`` collects all that were read.

    A key that is null counts as absent, as it does in most configuration classes.
    """

    def __init__(self, keys: Mapping[str, object], prefix: str = "model") -> None:
        self._keys = keys
        self._prefix = prefix
        self.asked: set[str] = set()
        self.defaults: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the key is written at all, null included."""
        self.asked.add(name)
        return name in self._keys

    def size(self, *names: str, default: int | Required = REQUIRED) -> int:
        """A whole number from 1 to LARGEST_SIZE."""
        return self._whole(names, default, lowest=1, highest=LARGEST_SIZE)

    def count(self, *names: str, default: int | Required = REQUIRED) -> int:
        """A whole number from 0 to LARGEST_SIZE."""
        return self._whole(names, default, lowest=0, highest=LARGEST_SIZE)

    def context(self, *names: str) -> int:
        """The longest sequence that a model is made for; it sizes nothing but a learned table."""
        return self._whole(names, 0, lowest=0, highest=LONGEST_CONTEXT)

    def layers(self, *names: str) -> int:
        return self._whole(names, REQUIRED, lowest=1, highest=MOST_LAYERS)

    def optional(self, *names: str) -> int | None:
        """A size, or None where the key is absent or null."""
        return None if self._find(names) is None else self.size(*names)

    def flag(self, *names: str, default: bool) -> bool:
        value = self._value(names, default)
        if not isinstance(value, bool):
            raise self._wrong(names, value, "true or false")
        return value

    def rate(self, *names: str, default: float = 0.0) -> float:
        """A probability or a fraction: 0 <= p <= 1."""
        value = self._number(names, default)
        if not 0 <= value <= 1:
            raise self._wrong(names, value, "a number from 0 to 1")
        return value

    def number(self, *names: str, default: float) -> float:
        return self._number(names, default)

    def choice(self, *names: str, allowed: tuple[str, ...], default: str | Required = REQUIRED) -> str:
        value = self._value(names, default)
        if not isinstance(value, str) or value not in allowed:
            guess = nearest(value, allowed) if isinstance(value, str) else None
            raise self._wrong(names, value, " | ".join(allowed), remedy=f"did you mean {guess}?" if guess else None)
        return value

    def activation(self, *names: str, default: str) -> Activation:
        """Of the MLP, by transformers' name for it."""
        form = self.choice(*names, allowed=tuple(_ACTIVATIONS), default=default)
        return Activation(_ACTIVATIONS[form], form)

    def per_layer(self, name: str, layers: int) -> tuple[object, ...] | None:
        """A list with one entry per layer, or a text with a letter for each; what is beyond ``layers`` is not read, so that a model can
        be cut short."""
        value = self._find((name,))
        if value is None:
            return None
        if not isinstance(value, tuple | list | str) or len(value) < layers:
            entries = f"{len(value)} entries" if isinstance(value, tuple | list) else value
            raise self._wrong((name,), entries, f"a list with an entry for each of the {layers} layers")
        return tuple(value[:layers])

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """A size, or a list of two: (height, width)."""
        value = self._find((name,))
        if not isinstance(value, tuple | list):
            one = self.size(name, default=default)
            return one, one
        if len(value) != 2 or not all(_is_whole(item) and 1 <= item <= LARGEST_SIZE for item in value):
            raise self._wrong((name,), list(value), "a size, or a list of a height and a width")
        return int(value[0]), int(value[1])

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; absent or null: none."""
        value = self._find((name,))
        if value is None:
            return ()
        if not isinstance(value, tuple | list) or not all(isinstance(item, str) for item in value):
            raise self._wrong((name,), value, "a list of texts")
        return tuple(value)

    def entries(self, name: str) -> int | None:
        """How many entries a mapping has, or None where it is absent or null."""
        value = self._find((name,))
        if value is None:
            return None
        if not isinstance(value, Mapping) or not value:
            raise self._wrong((name,), value or "empty", "a mapping of one entry or more")
        return len(value)

    def indices(self, name: str) -> frozenset[int] | None:
        """A list of layer indices."""
        value = self._find((name,))
        if value is None:
            return None
        if not isinstance(value, tuple | list) or not all(_is_whole(item) for item in value):
            raise self._wrong((name,), value, "a list of layer numbers")
        return frozenset(int(item) for item in value)

    def nested(self, name: str) -> Keys:
        """The keys of a mapping inside; absent or null: no keys."""
        value = self._find((name,))
        if value is None:
            return Keys({}, f"{self._prefix}.{name}")
        if not isinstance(value, Mapping):
            raise self._wrong((name,), value, "a mapping")
        return Keys(value, f"{self._prefix}.{name}")

    def wrong(self, name: str, allowed: str, remedy: str | None = None) -> InvalidInput:
        """The error for a key whose value contradicts another key."""
        return self._wrong((name,), self._find((name,)), allowed, remedy)

    def _whole(self, names: tuple[str, ...], default: int | Required, *, lowest: int, highest: int) -> int:
        value = self._value(names, default)
        if not _is_whole(value) or not lowest <= value <= highest:
            raise self._wrong(names, value, f"a whole number from {lowest} to {highest:,}")
        return int(value)

    def _number(self, names: tuple[str, ...], default: float) -> float:
        value = self._value(names, default)
        if (
            isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _BEYOND
        ):  # false for nan too
            raise self._wrong(names, value, "a number")
        return float(value)

    def _find(self, names: tuple[str, ...]) -> object:
        self.asked.update(names)
        for name in names:
            if self._keys.get(name) is not None:
                return self._keys[name]
        return None

    def _value(self, names: tuple[str, ...], default: object) -> object:
        value = self._find(names)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self._missing(names)
        self.defaults.append(f"{self._prefix}.{names[0]} = {_shown(default)}")
        return default

    def _missing(self, names: tuple[str, ...]) -> InvalidInput:
        guess = nearest(names[0], set(self._keys) - self.asked, _MISSPELT)
        remedy = f"is {guess} meant?" if guess else "a model needs it"
        return InvalidInput("is missing", key=f"{self._prefix}.{names[0]}", remedy=remedy)

    def _wrong(self, names: tuple[str, ...], value: object, allowed: str, remedy: str | None = None) -> InvalidInput:
        name = next((name for name in names if self._keys.get(name) is not None), names[0])
        return InvalidInput(
            "is not possible", key=f"{self._prefix}.{name}", value=_shown(value), allowed=allowed, remedy=remedy
        )


def _is_whole(value: object) -> TypeGuard[int | float]:
    """5e8 in YAML is a float, and whole."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = hex(value) if isinstance(value, int) and abs(value) > _BEYOND else str(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"
