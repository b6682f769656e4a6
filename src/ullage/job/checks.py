"""The only home of "heads % tp" and its kind: what a layout, an engine and a model must have in common to exist.

Each check looks at a complete job and yields violations; it knows nothing of files and raises nothing. A search counts the
errors, a reader raises the first, and both show the warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from ullage.errors import Contradiction, Infeasible, InvalidInput, UllageError
from ullage.frozen import frozen
from ullage.job.architecture import Architecture, architecture
from ullage.job.fields import show
from ullage.job.job import Job
from ullage.job.options import not_modelled

_ERRORS: dict[str, type[UllageError]] = {
    "infeasible": Infeasible,
    "contradiction": Contradiction,
    "invalid-input": InvalidInput,
}
_MOST_DIVISORS_SHOWN = 12


@frozen
class Violation:
    """``code``: infeasible, contradiction, invalid-input (errors) or warning; ``key`` and ``value`` as in the job file."""

    code: str
    key: str
    value: object
    what: str
    remedy: str

    def error(self) -> UllageError:
        return _ERRORS[self.code](self.what, key=self.key, value=show(self.value), remedy=self.remedy)

    def __str__(self) -> str:
        return f"{self.key} = {show(self.value)}: {self.what}; {self.remedy}"


def violations(job: Job) -> Iterator[Violation]:
    """Every violation of ``job``, the most basic first."""
    from ullage.job import checks_data, checks_encoder, checks_layout, checks_pipeline

    arch = architecture(job.model)
    for check in (
        *checks_encoder.CHECKS,
        *checks_layout.CHECKS,
        *checks_pipeline.CHECKS,
        *checks_data.CHECKS,
        _options_not_modelled,
    ):
        yield from check(job, arch)


Check = Callable[[Job, Architecture], Iterator[Violation]]


def infeasible(key: str, value: object, what: str, remedy: str) -> Violation:
    return Violation(code="infeasible", key=key, value=value, what=what, remedy=remedy)


def contradiction(key: str, value: object, what: str, remedy: str) -> Violation:
    return Violation(code="contradiction", key=key, value=value, what=what, remedy=remedy)


def warning(key: str, value: object, what: str, remedy: str) -> Violation:
    return Violation(code="warning", key=key, value=value, what=what, remedy=remedy)


@lru_cache(maxsize=256)
def divisors_of(number: int) -> str:
    """``use 1, 2, 4 or 8``: what divides ``number``, the small ones where there are many."""
    found = [divisor for divisor in range(1, min(number, 4096) + 1) if number % divisor == 0]
    shown = [str(divisor) for divisor in found[:_MOST_DIVISORS_SHOWN]]
    if len(found) > len(shown):
        return f"use {', '.join(shown)} ..."
    return f"use {', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else f"use {shown[0]}"


def _options_not_modelled(job: Job, arch: Architecture) -> Iterator[Violation]:
    for name in not_modelled(job.engine.options, job.engine.name, job.stack):
        yield warning(
            f"engine.options.{name}",
            job.engine.options[name],
            "is known to matter and is not modelled yet",
            "the interval allows for it",
        )
