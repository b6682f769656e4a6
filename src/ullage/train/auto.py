"""``--auto``: the best plan of a job whose missing keys are free, among those that the trainer runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ullage.errors import Infeasible, Unsupported
from ullage.frozen import replace
from ullage.job.job import Job
from ullage.planner.plan import Plan, plan
from ullage.planner.wanted import wanted
from ullage.train.reach import TORCH, refuse_what_is_not_run

_PLAIN = {
    "layout.tp": "1",
    "layout.sp": "false",
    "layout.pp": "1",
    "layout.cp": "1",
    "layout.ep": "1",
    "loss": "full",
}
"""What a free key is fixed to where the best plan's value is not run."""


def chosen(source: str | Path | Mapping[str, object], overrides: Sequence[str], engines: str | None = None) -> Plan:
    """engines: names with commas between, None: torch's. Raises Infeasible where no plan fits, Unsupported where none is run."""
    searched = tuple(name.strip() for name in engines.split(",") if name.strip()) if engines else TORCH
    asked = wanted(source, tuple(overrides), searched)
    fixed: dict[str, str] = {}
    while True:
        found = plan(source, [*overrides, *(f"{key}={value}" for key, value in fixed.items())], engines=searched)
        if not found.plans:
            assert found.nothing_fits is not None
            remedies = "; ".join(one.what for one in found.nothing_fits.remedies)
            raise Infeasible(f"nothing fits: {found.nothing_fits.why}", key="--auto", remedy=remedies or None)
        refused = [_refused(one.job) for one in found.plans]
        key = refused[0].key if refused[0] is not None else None
        if key in _PLAIN and key not in fixed and key not in asked.written:
            fixed[key] = _PLAIN[key]
            continue
        for one, why in zip(found.plans, refused, strict=True):
            if why is None:
                return replace(one, job=_named(one.job, asked.document.get("model")))
        raise Unsupported(f"no plan is run here; the best: {refused[0]}", key="--auto")


def _named(job: Job, model: object) -> Job:
    """With the folder that its model came from, which has its tokenizer: a plan knows the model's keys alone."""
    if not isinstance(model, str) or not Path(model).exists():
        return job
    return replace(job, model=replace(job.model, name=model))


def _refused(job: Job) -> Unsupported | None:
    try:
        refuse_what_is_not_run(job)
    except Unsupported as error:
        return error
    return None
