"""The JSON answers, as docs/job.md names them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ullage.engines.moments import moments
from ullage.timing.step import StepTime, time_or_why

if TYPE_CHECKING:
    from ullage.engines.estimate import Estimate
    from ullage.formats.check import Check
    from ullage.formats.convert import Conversion
    from ullage.formats.reading import Finding, Leftover
    from ullage.hardware.cluster import Device
    from ullage.memory.ledger import Line
    from ullage.model.facts import ModelFacts
    from ullage.planner.plan import Answer
    from ullage.techniques.told import Shown
    from ullage.train.answers import Measured, Proof, RankMemory, Trained
    from ullage.validation.compare import Row, Validation
    from ullage.validation.summary import Summary

SCHEMA = 1


def dumps(answer: Mapping[str, object]) -> str:
    """JSON that a person can read too: one line for each key, and one for each entry of a list of objects."""
    parts = ",\n ".join(f"{json.dumps(key)}: {_value(value)}" for key, value in answer.items())
    return f"{{{parts}}}"


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in value) + "]"
    return json.dumps(value, allow_nan=False)


def estimate(answer: Estimate) -> dict[str, object]:
    """``ullage estimate --json``."""
    peak = answer.peak
    time, unknown = _time(answer)
    return {
        "schema": SCHEMA,
        "verdict": answer.verdict,
        "capacity_bytes": answer.capacity_bytes,
        "peak": {
            "rank": peak.rank,
            "moment": peak.moment,
            "allocated_bytes": peak.allocated_bytes,
            "reserved_bytes": peak.reserved_bytes,
            "device_bytes": peak.device_bytes,
            "low_bytes": peak.low_bytes,
            "high_bytes": peak.high_bytes,
        },
        "ranks": [
            {
                "ranks": list(one.ranks),
                "stage": one.stage,
                "allocated_bytes": one.allocated_bytes,
                "reserved_bytes": one.reserved_bytes,
                "device_bytes": one.device_bytes,
                "moment": one.moment,
                "static_bytes": one.static_bytes,
            }
            for one in answer.ranks
        ],
        "ledger": [ledger_line(line) for line in answer.ledger],
        "outside_allocator": [
            {"what": what, "bytes": size, "provenance": provenance} for what, size, provenance in answer.outside
        ],
        "host_bytes": answer.host_bytes,
        "moments": [asdict(one) for one in moments(answer)],
        "time": time,
        "parameters": answer.parameters,
        "trainable_parameters": answer.trainable_parameters,
        "flops_per_step": answer.flops_per_step,
        "defaults": list(answer.defaults),
        "warnings": [*answer.warnings, *unknown],
    }


def _time(answer: Estimate) -> tuple[dict[str, object], list[str]]:
    """The step's time by part, and a warning where it is not known."""
    found = time_or_why(answer.job)
    if not isinstance(found, StepTime):
        nothing: dict[str, object] = {
            "step_s": None,
            "tokens_per_s_per_gpu": None,
            "mfu": None,
            "hfu": None,
            "parts": {},
        }
        return nothing, [f"time is not predicted: {found}"]
    return {
        "step_s": found.step_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "parts": dict(found.parts),
    }, []


def ledger_line(line: Line) -> dict[str, object]:
    return {
        "category": line.category,
        "what": line.what,
        "bytes": line.bytes,
        "formula": line.formula,
        "provenance": line.provenance,
        "count": line.count,
        "lives": line.lives,
    }


def check(answer: Check) -> dict[str, object]:
    """``ullage check --json``."""
    from ullage.job.write import job_to_dict

    return {
        "job": job_to_dict(answer.job),
        "leftovers": [_leftover(one) for one in answer.leftovers],
        "estimate": estimate(answer.estimate),
        "findings": [_finding(one) for one in answer.findings],
        "edit": answer.edit,
    }


def planned(answer: Answer) -> dict[str, object]:
    """``ullage plan --json``."""
    from ullage.job.write import job_to_dict

    nothing = answer.nothing_fits
    return {
        "evaluated": answer.evaluated,
        "pruned": answer.pruned,
        "infeasible": answer.infeasible,
        "seconds": answer.seconds,
        "plans": [
            {
                "name": one.name,
                "job": job_to_dict(one.job),
                "estimate": estimate(one.estimate),
                "limited_by": one.limited_by,
                "why": list(one.why),
                "strategy": one.strategy,
            }
            for one in answer.plans
        ],
        "nothing_fits": None
        if nothing is None
        else {
            "why": nothing.why,
            "remedies": [{"what": one.what, "change": one.change.as_dict()} for one in nothing.remedies],
        },
        "refused": dict(answer.refused),
    }


def conversion(answer: Conversion) -> dict[str, object]:
    """``ullage convert --json``."""
    return {
        "format": answer.format,
        "text": answer.text,
        "unsaid": [{"key": one.key, "value": one.value, "why": one.why} for one in answer.unsaid],
        "notes": list(answer.notes),
        "leftovers": [_leftover(one) for one in answer.leftovers],
    }


def shown(answer: Shown) -> dict[str, object]:
    """``ullage show --format json``. A step's totals are those of its columns that add up."""
    found: dict[str, object] = {
        "schema": SCHEMA,
        "technique": answer.technique,
        "stage": answer.stage,
        "steps": [
            {
                "title": part.title,
                "about": part.about,
                "rows": [
                    {column.name: value for column, value in zip(part.columns, row, strict=True)} for row in part.rows
                ],
                "totals": {column.name: part.total(column.name) for column in part.columns if column.summed},
            }
            for part in answer.parts
        ],
        "notes": list(answer.notes),
    }
    if answer.gantt is not None:
        found["gantt"] = [
            {"stage": stage, "after_s": after_s, "passes": [list(slot) for slot in slots]}
            for stage, (slots, after_s) in enumerate(zip(answer.gantt.ranks, answer.gantt.after_s, strict=True))
        ]
    return found


def proof(answer: Proof) -> dict[str, object]:
    """``ullage prove --json``; a difference that is no number is null."""
    found = {"equal": answer.equal, **asdict(answer), "rows": [asdict(row) for row in answer.rows]}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()
    }


def trained(answer: Trained) -> dict[str, object]:
    """``ullage train --json``."""
    return asdict(answer) | {"versions": list(answer.versions)}


def measured(answer: Measured) -> dict[str, object]:
    """``ullage measure --json``."""
    return {
        "within": answer.within,
        "error_ratio": answer.error,
        "bound": answer.bound,
        "device": answer.device,
        "versions": list(answer.versions),
        "predicted": {
            "allocated_bytes": answer.predicted_bytes,
            "moment": answer.predicted_moment,
            "categories": dict(answer.predicted),
        },
        "ranks": [_rank_memory(one) for one in answer.ranks],
        "step_s": answer.step_s,
        "predicted_step_s": answer.predicted_step_s,
        "tokens_per_s_per_rank": answer.tokens_per_s_per_rank,
    }


def _rank_memory(one: RankMemory) -> dict[str, object]:
    return {**asdict(one), "categories": dict(one.categories)}


def _leftover(one: Leftover) -> dict[str, object]:
    return {"key": one.key, "value": one.value, "why": one.why}


def _finding(one: Finding) -> dict[str, object]:
    return {"severity": one.severity, "key": one.key, "what": one.what, "remedy": one.remedy}


def models(found: Sequence[ModelFacts]) -> dict[str, object]:
    """``ullage models --json``."""
    return {"models": [one._asdict() for one in found]}


def devices(found: Sequence[tuple[Device, tuple[str, ...]]]) -> dict[str, object]:
    """``ullage devices --json``."""
    return {
        "devices": [
            {
                "name": device.name,
                "vendor": device.vendor,
                "architecture": device.architecture,
                "capacity_bytes": device.capacity_bytes,
                "memory_bytes_per_s": device.memory_bytes_per_s,
                "flops_per_s": dict(device.flops_per_s),
                "link_bytes_per_s": device.link_bytes_per_s,
                "host_link_bytes_per_s": device.host_link_bytes_per_s,
                "aliases": list(aliases),
                "provenance": device.provenance,
                "source": device.source,
            }
            for device, aliases in found
        ]
    }


def validation(answer: Validation) -> dict[str, object]:
    """``ullage validate --json``. by_size splits the allocated records where rounding and workspaces stop to matter."""
    return {
        "records": [_row(row) for row in answer.rows],
        "unsupported": [{"id": one.id, "why": one.why} for one in answer.unsupported],
        "summary": [_summary(one) for one in answer.summary],
        "by_size": [
            {**_summary(one), "least_bytes": one.least_bytes, "below_bytes": one.below_bytes} for one in answer.by_size
        ],
        "coverage": asdict(answer.coverage) if answer.coverage is not None else None,
        "verdicts": dict(answer.verdicts),
    }


def _row(row: Row) -> dict[str, object]:
    return {
        "id": row.id,
        "source": row.source,
        "grade": row.grade,
        "quantity": row.quantity,
        "measured": row.measured,
        "predicted": row.predicted,
        "error_ratio": row.error_ratio,
        "low": row.low,
        "high": row.high,
        "verdict": row.verdict,
        "fits": row.fits,
    }


def _summary(one: Summary) -> dict[str, object]:
    return {
        "quantity": one.quantity,
        "grade": one.grade,
        "records": one.records,
        "median_abs_error": one.median,
        "p90_abs_error": one.p90,
        "worst_abs_error": one.worst,
        "covered_by_interval": one.covered,
    }
