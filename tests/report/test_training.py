"""The line that a training prints after each step."""

from __future__ import annotations

from ullage.frozen import replace
from ullage.report.training import step_line
from ullage.train.answers import Step
from ullage.units import GIB

STEP = Step(
    step=12,
    steps=500,
    loss=3.14159,
    lr=1e-3,
    grad_norm=0.5,
    loss_scale=None,
    skipped=False,
    tokens_per_s=1234.4,
    mfu=0.41,
    memory_bytes=41 * GIB,
    reserved_bytes=44 * GIB,
    tokens=1_000_000,
    step_s=0.8,
)


def test_a_gpus_step_has_loss_speed_mfu_and_memory_beside_what_was_predicted() -> None:
    expected = "step 12/500  loss 3.1416  1,234 tokens/s  MFU 41.0 %  41.00 GiB allocated (42.00 GiB predicted, 79.11 GiB there)"
    assert step_line(STEP, 42 * GIB, round(79.11 * GIB)) == expected


def test_a_cpus_step_has_what_is_resident() -> None:
    line = step_line(replace(STEP, mfu=None, reserved_bytes=None, loss=None, skipped=True), None, 80 * GIB)
    assert "loss no number (skipped: fp16 overflow)" in line
    assert "MFU" not in line
    assert line.endswith("41.00 GiB resident (on the job's GPU no prediction of 80.00 GiB)")
