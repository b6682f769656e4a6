"""How often intervals hold, on rows whose spread is known."""

from __future__ import annotations

import random

import pytest

from ullage.report.validation import intervals
from ullage.validation.compare import Row
from ullage.validation.coverage import FEWEST, coverage


def rows(
    file: str,
    count: int,
    *,
    spread: float = 0.05,
    off: float = 1.0,
    doubts: tuple[str, ...] = ("model",),
    seed: int = 0,
) -> list[Row]:
    draw = random.Random(f"{file}{seed}")
    return [
        Row(
            id=f"{file}-{at}", source="s", grade="A", quantity="allocated", measured=off * draw.gauss(1.0, spread), predicted=1.0,
            error_ratio=0.0, low=0.9, high=1.1, verdict="fits", fits=True, file=file, doubts=doubts,
        )
        for at in range(count)
    ]  # fmt: skip


def test_sources_that_are_alike_hold_what_is_meant() -> None:
    found = coverage([row for file in "abcdefgh" for row in rows(file, 100)])
    assert found is not None
    assert found.measurements == 800
    assert found.held_out == pytest.approx(found.nominal, abs=0.02)
    assert found.stated == pytest.approx(0.95, abs=0.02)  # two standard deviations either way


def test_a_source_that_is_off_is_not_held() -> None:
    alike = [row for file in "abc" for row in rows(file, 100)]
    found = coverage([*alike, *rows("d", 100, off=1.5)])
    assert found is not None
    assert found.held_out is not None
    assert found.held_out < 0.76


def test_what_is_as_uncertain_is_held_against_its_like() -> None:
    """Wide residuals of one class do not widen another's: of tight rows all others' spread would hold every one."""
    sure = [row for file in "ab" for row in rows(file, 100, spread=0.001)]
    unsure = [row for file in "ab" for row in rows(file, 100, spread=0.2, doubts=("model", "routing"))]
    found = coverage([*sure, *unsure])
    assert found is not None
    assert found.held_out == pytest.approx(found.nominal, abs=0.04)


def test_one_source_is_left_out_by_parts_and_too_few_are_not_told() -> None:
    alone = coverage(rows("a", 200))
    assert alone is not None
    assert alone.held_out == pytest.approx(0.95, abs=0.04)
    few = coverage(rows("a", FEWEST // 2))
    assert few is not None
    assert few.held_out is None
    assert "too few" in intervals(few)
    assert coverage([]) is None


def test_it_is_said_in_words() -> None:
    found = coverage([row for file in "ab" for row in rows(file, 60)])
    assert found is not None
    assert "120 measurements" in intervals(found)
    assert "meant for 95 %" in intervals(found)
