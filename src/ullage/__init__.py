"""ullage: what every byte on every GPU is, for a training job.

>>> import ullage
>>> estimate = ullage.estimate(ullage.read_job("job.yaml"))
>>> estimate.verdict, estimate.peak.device_bytes

Everything in ``__all__`` is public and loads when it is first asked for; the rest may change between releases.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ullage.api import (
        Check,
        Conversion,
        Estimate,
        Job,
        Measured,
        ModelFacts,
        Planned,
        Proof,
        Settings,
        Shown,
        Step,
        Trained,
        Training,
        Validation,
        Why,
        as_dict,
        bench,
        check,
        convert,
        devices,
        estimate,
        measure,
        models,
        plan,
        prove,
        read_job,
        show,
        validate,
        watch,
        why,
    )
    from ullage.errors import (
        Contradiction,
        Infeasible,
        InvalidInput,
        OutOfMemory,
        UllageError,
        UnknownKey,
        UnknownName,
        Unsupported,
    )

__version__ = "0.1.0"

__all__ = [
    "Check",
    "Contradiction",
    "Conversion",
    "Estimate",
    "Infeasible",
    "InvalidInput",
    "Job",
    "Measured",
    "ModelFacts",
    "OutOfMemory",
    "Planned",
    "Proof",
    "Settings",
    "Shown",
    "Step",
    "Trained",
    "Training",
    "UllageError",
    "UnknownKey",
    "UnknownName",
    "Unsupported",
    "Validation",
    "Why",
    "as_dict",
    "bench",
    "check",
    "convert",
    "devices",
    "estimate",
    "measure",
    "models",
    "plan",
    "prove",
    "read_job",
    "show",
    "validate",
    "watch",
    "why",
]

_ERRORS = frozenset(
    {
        "Contradiction",
        "Infeasible",
        "InvalidInput",
        "OutOfMemory",
        "UllageError",
        "UnknownKey",
        "UnknownName",
        "Unsupported",
    }
)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module("ullage.errors" if name in _ERRORS else "ullage.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
