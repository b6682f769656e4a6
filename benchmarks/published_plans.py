"""Published strategies beside the plans that are found for the same job: ``python -m benchmarks.published_plans FILE...``.

Of each record of a truth file that was run with Megatron: its own strategy's seconds by the model, and the fastest plan's, with degrees,
micro-batch, ZeRO stage and recomputation left free and everything else as published. What was published and is called tight is put
beside plans that may be tight. Prints a table in Markdown.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ullage
from ullage.errors import UllageError
from ullage.job.job import Job
from ullage.planner.plan import Plan
from ullage.planner.reasons import lost_by, strategy
from ullage.planner.strategies import Found
from ullage.timing.step import step_time
from ullage.validation.records import Record, read_records

LAYOUT_OPTIONS = frozenset(
    {
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "use_distributed_optimizer",
        "checkpoint_activations",
    }
)
"""Options that say what a plan decides."""


TOLD = 0.1
"""A difference that is explained."""


class Row(NamedTuple):
    record: Record
    published: str
    verdict: str
    published_s: float
    planned: str
    planned_verdict: str
    planned_s: float
    lost_by: str

    @property
    def ratio(self) -> float:
        return self.planned_s / self.published_s


def rows(records: list[Record]) -> Iterator[Row | tuple[str, str]]:
    for record in records:
        try:
            yield _row(record)
        except UllageError as error:
            yield record.id, str(error)


def _row(record: Record) -> Row:
    job = ullage.read_job(record.job)
    answer, own = ullage.estimate(job), step_time(job)
    best = _best(json.dumps(_freed(job, record.job), sort_keys=True), tight=answer.verdict == "tight")
    if best is None:
        raise UllageError(f"published {strategy(job)} is called {answer.verdict}, and no plan fits")
    first = Found(job=best.job, time=best.time, estimate=best.estimate, value=())
    mine = Found(job=job, time=own, estimate=answer, value=())
    return Row(
        record=record,
        published=strategy(job),
        verdict=answer.verdict,
        published_s=own.step_s,
        planned=best.strategy,
        planned_verdict=best.estimate.verdict,
        planned_s=best.time.step_s,
        lost_by=lost_by(first, mine),
    )


@functools.cache
def _best(freed: str, *, tight: bool) -> Plan | None:
    """Of many releases of one job the plan is the same."""
    return next(iter(ullage.plan(json.loads(freed), top=1, tight=tight).plans), None)


def _freed(job: Job, written: Mapping[str, object]) -> dict[str, object]:
    engine = dict(written["engine"])  # type: ignore[call-overload]
    options = {name: value for name, value in (engine.get("options") or {}).items() if name not in LAYOUT_OPTIONS}
    sequences = job.data.micro_batch * job.data.grad_accum * job.layout.dp
    free = {key: value for key, value in written.items() if key not in ("layout", "recompute", "data", "engine")}
    return {
        **free,
        "data": {"seq_len": job.data.seq_len, "global_batch": sequences},
        "engine": {"name": engine["name"], "options": options},
    }


def main(files: list[str]) -> None:
    records = [
        one
        for one in read_records([Path(file) for file in files]).records
        if isinstance(engine := one.job.get("engine"), dict) and engine.get("name") == "megatron"
    ]
    print("| record | published | verdict | s | plan | verdict | s | plan / published |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    slower, told = [], []
    for row in rows(records):
        if isinstance(row, Row):
            print(
                f"| {row.record.id} | {row.published} | {row.verdict} | {row.published_s:.4g} | {row.planned} | {row.planned_verdict} "
                f"| {row.planned_s:.4g} | {row.ratio:.2f} |",
                flush=True,
            )
            if row.ratio < 1 - TOLD:
                slower.append((row.record.id, row.lost_by))
        else:
            told.append(row)
    if slower:
        print(f"\nWhat the published strategy loses by, where that is more than {100 * TOLD:.0f} %:\n")
    for name, why in slower:
        print(f"- {name}: {why}")
    if told:
        print("\nNot compared:\n")
    for name, why in told:
        print(f"- {name}: {why}")


if __name__ == "__main__":
    start = time.perf_counter()
    main(sys.argv[1:])
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
