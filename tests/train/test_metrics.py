"""What TensorBoard reads of a training, and what stands there after one that was ended in the middle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.training import job_of

from ullage.train.answers import Step
from ullage.train.metrics import BOARD, Metrics
from ullage.train.run import train
from ullage.train.settings import Training

pytest.importorskip("tensorboard")

ONE = Step(
    step=1,
    steps=4,
    loss=5.5,
    lr=1e-3,
    grad_norm=None,
    skipped=False,
    loss_scale=None,
    tokens=192,
    step_s=0.25,
    tokens_per_s=768.0,
    mfu=None,
    memory_bytes=2**30,
    reserved_bytes=None,
)


def on_board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By name (step, value), as TensorBoard's own reader has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_has_the_figures_of_the_file(tmp_path: Path) -> None:
    data = tmp_path / "tokens.npy"
    np.save(data, np.arange(24 * 12, dtype=np.uint16))
    job = job_of("single", 1, model={"num_hidden_layers": 1})
    training = Training(data=(data,), out=tmp_path / "out", steps=3)
    train(job, training)
    rows = [json.loads(line) for line in (training.out / "metrics.jsonl").read_text().splitlines()]
    scalars = on_board(training.out / BOARD)
    assert {"loss", "tokens_per_s", "memory_bytes"} <= scalars.keys()
    assert scalars.keys() == {name for name, value in rows[0].items() if value is not None} - {
        "step",
        "steps",
        "skipped",
    }
    for name, points in scalars.items():
        assert [step for step, _ in points] == [1, 2, 3]
        assert [value for _, value in points] == pytest.approx([row[name] for row in rows], rel=1e-6)  # written in fp32


def test_steps_after_the_last_checkpoint_of_an_ended_run_are_dropped(tmp_path: Path) -> None:
    """From the file and from the board, where they come again."""
    for done, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        with Metrics(tmp_path, done) as metrics:
            for step in steps:
                metrics.add(replace(ONE, step=step, loss=float(10 * step + done)))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 10), (2, 21), (3, 31)]
    assert on_board(tmp_path / BOARD)["loss"] == [(1, 10), (2, 21), (3, 31)]
