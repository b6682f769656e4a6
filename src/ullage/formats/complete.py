"""From what a file says to a whole job: the user's flags on top, the batch made to multiply, errors told at the file's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from ullage.errors import Contradiction, UllageError
from ullage.formats.reading import Batch, Finding, Reading
from ullage.formats.tree import Path, dotted
from ullage.job.job import Job
from ullage.job.read import launch_of, layout_of, read_job


def document_of(reading: Reading, overrides: Sequence[str] = ()) -> tuple[dict[str, object], tuple[Finding, ...]]:
    """The job document that a file says, ``overrides`` not yet set, and what its batch sizes contradict."""
    document: dict[str, object] = deepcopy(dict(reading.keys))
    if reading.by_engine:
        _launched(document, reading, overrides)
    batch = reading.batch
    if batch == Batch():
        return document, ()
    layout_only = [override for override in overrides if not override.startswith("data.")]
    dp = layout_of(document, layout_only).dp
    data = document.setdefault("data", {})
    assert isinstance(data, dict)
    sizes, findings = _multiplied(reading, batch, dp)
    data.update(sizes)
    return document, findings


def _launched(document: dict[str, object], reading: Reading, overrides: Sequence[str]) -> None:
    """Nobody names an engine: processes on several GPUs are DDP's, one alone is nobody's. Element types follow the engine."""
    name, gpus = launch_of(document, overrides)
    if name is None:
        name = "ddp" if gpus > 1 else "single"
        engine = document.setdefault("engine", {})
        assert isinstance(engine, dict)
        engine["name"] = name
    for key, value in reading.by_engine.get(name, {}).items():
        document.setdefault(key, deepcopy(value))


def job_of(reading: Reading, document: dict[str, object], overrides: Sequence[str] = ()) -> Job:
    """The job of a document; an error is placed where the file says the key."""
    try:
        return read_job(document, tuple(overrides))
    except UllageError as error:
        path = origin(reading, error)
        if path is None:
            error.remedy = reading.elsewhere.get(error.key or "", error.remedy)
            raise
        error.place = f"{reading.where(path)}: {dotted(path)}"
        raise


def origin(reading: Reading, error: UllageError) -> Path | None:
    """Where the file says the key of an error; None where it does not, or where a flag says it."""
    if error.key is None or (error.place or "").startswith("--"):
        return None
    key = error.key
    while key:
        if key in reading.origins:
            return reading.origins[key]
        key = key.rpartition(".")[0]
    return None


def _multiplied(reading: Reading, batch: Batch, dp: int) -> tuple[dict[str, object], tuple[Finding, ...]]:
    """micro_batch and grad_accum of dp data-parallel ranks; a finding where the three numbers do not multiply."""
    micro = batch.micro[0] if batch.micro else None
    accum = batch.accum[0] if batch.accum else None
    if batch.whole is None:
        return {key: value for key, value in (("micro_batch", micro), ("grad_accum", accum)) if value is not None}, ()
    whole, path = batch.whole
    per_rank, rest = divmod(whole, dp)
    if micro is None and accum is None:
        micro, accum = per_rank, 1
    elif micro is None:
        assert accum is not None
        micro, odd = divmod(per_rank, accum)
        rest = rest or odd
    elif accum is None:
        accum, odd = divmod(per_rank, micro)
        rest = rest or odd
    assert micro is not None
    assert accum is not None
    if not rest and micro >= 1 and accum >= 1 and micro * accum * dp == whole:
        return {"micro_batch": micro, "grad_accum": accum}, ()
    micro, accum = max(1, micro), max(1, accum)
    product = micro * accum * dp
    finding = Finding(
        severity="error",
        key=dotted(path),
        what=f"{whole} is not micro-batch {micro} x accumulation {accum} x {dp} data-parallel ranks = {product}",
        remedy=f"write {product}, or change one of the others",
        fix=((path, product),),
    )
    return {"micro_batch": micro, "grad_accum": accum}, (finding,)


def contradiction(reading: Reading, finding: Finding) -> Contradiction:
    """A finding of severity error as what a strict reader raises."""
    path = next((path for path, _ in finding.fix), ())
    return Contradiction(finding.what, key=finding.key, remedy=finding.remedy, place=reading.where(path))
