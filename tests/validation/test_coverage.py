"""How often intervals hold, and what residuals make of them, on rows whose spread is known."""

from __future__ import annotations

import math
import random
import tomllib

import pytest

from ullage.engines.interval import ANY, KINDS
from ullage.report.residuals import residuals_text
from ullage.report.validation import intervals
from ullage.validation.compare import Row, Validation
from ullage.validation.coverage import coverage
from ullage.validation.residuals import ABOVE, BELOW, FEWEST, kinds


def rows(
    file: str,
    count: int,
    *,
    spread: float = 0.05,
    off: float = 1.0,
    kind: str = "model",
    seed: int = 0,
) -> list[Row]:
    """Residuals of a normal distribution; the stated intervals hold two standard deviations of the default."""
    draw = random.Random(f"{file}{seed}")
    residuals = [draw.gauss(math.log(off), spread) for _ in range(count)]
    return [
        Row(
            id=f"{file}-{at}", source="s", grade="A", quantity="allocated", measured=math.exp(residual), predicted=1.0,
            error_ratio=0.0, low=0.905, high=1.105, verdict="fits", fits=True, file=file, kind=kind, residual=residual,
        )
        for at, residual in enumerate(residuals)
    ]  # fmt: skip


def test_sources_that_are_alike_hold_what_is_meant() -> None:
    found = coverage([row for file in "abcdefgh" for row in rows(file, 100)])
    assert found is not None
    assert found.measurements == 800
    assert found.nominal == 1 - BELOW - ABOVE
    assert found.held_out == pytest.approx(found.nominal, abs=0.02)
    assert found.stated == pytest.approx(0.95, abs=0.02)  # two standard deviations either way


def test_a_source_that_is_off_is_not_held() -> None:
    alike = [row for file in "abc" for row in rows(file, 100)]
    found = coverage([*alike, *rows("d", 100, off=1.5)])
    assert found is not None
    assert found.held_out is not None
    assert found.held_out < 0.76  # three of four sources, and of those not all


def test_what_is_as_uncertain_is_held_against_its_like() -> None:
    """Wide residuals of one class do not widen another's: of tight rows all others' spread would hold every one."""
    sure = [row for file in "ab" for row in rows(file, 100, spread=0.001)]
    unsure = [row for file in "ab" for row in rows(file, 100, spread=0.2, kind="experts")]
    found = coverage([*sure, *unsure])
    assert found is not None
    assert found.held_out == pytest.approx(found.nominal, abs=0.04)


def test_ends_lie_where_the_shares_say() -> None:
    """Of a normal distribution: 1.96 standard deviations below, 1.645 above; each kind in its own scale."""
    wide = [row for file in "abcd" for row in rows(file, 500, spread=0.4, kind="texts")]
    found = kinds([*wide, *(row for file in "abcd" for row in rows(file, 500, spread=0.1, kind="experts", seed=1))])
    for name, spread in (("texts", 0.4), ("experts", 0.1)):
        assert found[name].measurements == 2000
        assert math.log(found[name].spread.low) == pytest.approx(-1.96 * spread, rel=0.1)
        assert math.log(found[name].spread.high) == pytest.approx(1.645 * spread, rel=0.1)


def test_how_far_out_one_record_lies_widens_nothing() -> None:
    """Ranks alone count: three of a hundred at a factor of two or of nine."""
    near, far = (kinds([*rows("a", 97), *rows("b", 3, spread=0.0, off=off)]) for off in (2.0, 9.0))
    assert near == far


def test_a_kind_measured_too_seldom_has_the_spread_of_all() -> None:
    found = kinds([*rows("a", 100), *rows("b", FEWEST - 1, kind="compile")])
    assert found.keys() == {"model", ANY}
    assert kinds(rows("a", FEWEST - 1)) == {}


def test_the_data_file_is_what_the_command_writes() -> None:
    """In the order of KINDS, each with what it was made of."""
    told = [*rows("a.json", 40, kind="texts"), *rows("b.json", 40, kind="fork")]
    text = residuals_text(Validation(rows=tuple(told), unsupported=(), records=80))
    written = tomllib.loads(text)["kinds"]
    assert list(written) == [*(name for name in KINDS if name in ("texts", "fork")), ANY]
    assert written["texts"]["sources"] == ["a"]
    assert written[ANY]["measurements"] == 80
    for name, one in kinds(told).items():
        assert written[name]["low"] == pytest.approx(one.spread.low, abs=0.001)
        assert written[name]["high"] == pytest.approx(one.spread.high, abs=0.001)


def test_one_source_is_left_out_by_parts_and_too_few_are_not_told() -> None:
    alone = coverage(rows("a", 200))
    assert alone is not None
    assert alone.held_out == pytest.approx(alone.nominal, abs=0.04)
    few = coverage(rows("a", FEWEST // 2))
    assert few is not None
    assert few.held_out is None
    assert "too few" in intervals(few)
    assert coverage([]) is None


def test_it_is_said_in_words() -> None:
    found = coverage([row for file in "ab" for row in rows(file, 60)])
    assert found is not None
    assert "120 measurements" in intervals(found)
    assert "meant for 92 %" in intervals(found)
