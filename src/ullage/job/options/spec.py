"""What is known of one engine option: whose it is, what it may hold, and whether an estimate accounts for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from ullage.errors import InvalidInput
from ullage.job import fields
from ullage.job.fields import Read, show


class Status(Enum):
    MODELLED = "modelled"  # the estimate accounts for it
    NO_EFFECT = "no-effect"  # known not to move memory or time enough to matter: names, logging, numerics
    NOT_MODELLED = "not-modelled"  # known to matter and not accounted for: named in warnings, widens the interval


class Option(NamedTuple):
    """``engines`` and ``stacks``: it may be given where the job's engine or its stack is one of these; none: anywhere."""

    name: str
    read: Read[object]
    status: Status
    engines: frozenset[str] = frozenset()
    stacks: frozenset[str] = frozenset()

    def belongs_to(self, engine: str, stack: str) -> bool:
        return not (self.engines or self.stacks) or engine in self.engines or stack in self.stacks

    @property
    def owners(self) -> str:
        engines = [f"engine {name}" for name in sorted(self.engines)]
        return " or ".join(engines + [f"stack {name}" for name in sorted(self.stacks)])


def table(
    rows: Mapping[Status, Mapping[Read[object], str]], *, engines: Iterable[str] = (), stacks: Iterable[str] = ()
) -> tuple[Option, ...]:
    """Options of the same owners from status -> reader -> names."""
    return tuple(
        Option(name=name, read=read, status=status, engines=frozenset(engines), stacks=frozenset(stacks))
        for status, readers in rows.items()
        for read, names in readers.items()
        for name in names.split()
    )


DTYPE_ALIASES = {
    "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "uint8": "fp8", "float8": "fp8",
}  # fmt: skip

FLAG: Read[object] = fields.flag
COUNT: Read[object] = fields.integer(0)
NUMBER: Read[object] = fields.number(-math.inf)
SHARE: Read[object] = fields.number(0.0, 1.0)
TEXT: Read[object] = fields.text
DTYPE: Read[object] = fields.choice("fp32", "bf16", "fp16", "fp8", aliases=DTYPE_ALIASES)


def WORDS(value: object, key: str) -> object:  # noqa: N802 - a reader, named like its siblings
    """A name, or a list of names: both are how these engines' users write it."""
    return fields.texts(value, key) if isinstance(value, list) else fields.text(value, key)


def SWITCH(value: object, key: str) -> object:  # noqa: N802
    """true, false, or the name of a mode."""
    return value if isinstance(value, bool) else fields.text(value, key)


def RESHARD(value: object, key: str) -> object:  # noqa: N802
    """fully_shard's argument (true, false, a group size) or torchtitan's word for it."""
    if isinstance(value, str):
        return fields.choice("default", "always", "never")(value, key)
    return value if isinstance(value, bool) else fields.integer(2)(value, key)


def ANY(value: object, key: str) -> object:  # noqa: N802
    """Any JSON value: schedules and shapes that only their engine reads."""
    if value is None:
        raise InvalidInput("is empty", key=key, value=show(value), remedy="leave it out")
    return value
