"""The seeds of this field by heart, from ``--explain``'s own arithmetic (ZeRO, arXiv 1910.02054, section 5 and figure 1)."""

from __future__ import annotations

import pytest

import ullage
from ullage.report.console import plain
from ullage.report.explain import explained_report, in_words
from ullage.techniques.states import States, states
from ullage.units import GIB, GIGA


def job_of(precision: str, engine: str, zero_stage: int, gpus: int) -> ullage.Job:
    return ullage.read_job(
        {
            "model": "llama-2-7b",
            "cluster": f"{gpus}xH100-SXM-80GB",
            "precision": precision,
            "layout": {"dp": gpus},
            "engine": {"name": engine, "zero_stage": zero_stage},
        }
    )


def of(precision: str, engine: str, zero_stage: int, gpus: int) -> States:
    (found,) = states(job_of(precision, engine, zero_stage, gpus), 0)
    return found


@pytest.mark.parametrize(
    ("zero_stage", "gb_of_7e9", "sum_shown"),
    [
        (0, 126.0, "2 + 4 + 12 = 18 B"),  # Megatron keeps fp32 gradients: 18 and not 16
        (1, 52.5, "2 + 4 + 12 / 8 = 7.5 B"),
    ],
)
def test_megatron(zero_stage: int, gb_of_7e9: float, sum_shown: str) -> None:
    found = of("bf16-mixed", "megatron", zero_stage, 8)
    assert float(sum(state.per_parameter for state in found.states)) * 7e9 / GIGA == gb_of_7e9
    assert f"{in_words(found)} B" == sum_shown


@pytest.mark.parametrize(
    ("zero_stage", "gb_of_7e9", "sum_shown"),
    [
        (0, 112.0, "2 + 2 + 12 = 16 B"),
        (1, 38.5, "2 + 2 + 12 / 8 = 5.5 B"),
        (3, 14.0, "2 / 8 + 2 / 8 + 12 / 8 = 2 B"),
    ],
)
def test_deepspeed(zero_stage: int, gb_of_7e9: float, sum_shown: str) -> None:
    found = of("bf16-mixed", "deepspeed", zero_stage, 8)
    assert float(sum(state.per_parameter for state in found.states)) * 7e9 / GIGA == gb_of_7e9
    assert f"{in_words(found)} B" == sum_shown


def test_fp32() -> None:
    found = of("fp32", "megatron", 0, 1)
    each = {
        role: sum(float(state.per_parameter) for state in found.states if state.role == role)
        for role in ("parameters", "gradients", "optimizer")
    }
    assert round(each["parameters"] * 6e9 / GIB, 2) == 22.35
    assert round(each["gradients"] * 6e9 / GIB, 2) == 22.35
    assert round(each["optimizer"] * 6e9 / GIB, 1) == 44.7


def test_the_account_agrees_where_nothing_is_added() -> None:
    job = ullage.read_job(
        {"model": "llama-2-7b", "cluster": "8xH100-SXM-80GB", "engine": {"name": "megatron", "zero_stage": 1}}
    )
    estimate = ullage.estimate(job)
    (found,) = states(job, 0)
    held = sum(line.bytes for line in estimate.ledger if line.category in ("parameters", "gradients", "optimizer"))
    assert held == pytest.approx(found.bytes, rel=0.02)  # beside dummy gradients of a layer's shapes


def test_explain_prints_the_derivation() -> None:
    shown = plain(explained_report(ullage.estimate(job_of("bf16-mixed", "megatron", 1, 8))))
    assert "6,738,415,616 parameters on each of ranks 0-7" in shown
    assert "2 + 4 + 12 / 8 = 7.5 B" in shown
    assert "50.54 GB = 47.07 GiB" in shown
