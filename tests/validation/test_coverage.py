"""How often intervals hold, and what residuals make of them, on rows whose spread is known."""

from __future__ import annotations

import math
import random
import tomllib
from dataclasses import replace

import pytest

from ullage.engines.interval import ANY, KINDS, Bracket, Spread
from ullage.report.residuals import residuals_text
from ullage.report.validation import intervals
from ullage.validation.compare import Row, Validation
from ullage.validation.coverage import coverage
from ullage.validation.residuals import ABOVE, BELOW, FEWEST, kinds

SOME = ("fork", "option", "compile", "experts")
SIZE = 10**12
PLAIN = Bracket(
    least_bytes=SIZE,
    most_bytes=SIZE,
    needed_bytes=SIZE,
    below_bytes=0,
    above_bytes=0,
    sure_bytes=0,
    capacity_bytes=10 * SIZE,
)


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
            id=f"{file}-{at}", source="s", grade="A", quantity="allocated", measured=SIZE * math.exp(residual), predicted=SIZE,
            error_ratio=0.0, low=0.905 * SIZE, high=1.105 * SIZE, verdict="fits", fits=True, file=file, kind=kind, bracket=PLAIN,
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


def test_a_small_source_counts_as_much_in_the_mean_of_sources() -> None:
    alike = [row for file in "abc" for row in rows(file, 100)]
    found = coverage([*alike, *rows("d", 10, spread=0.0, off=1.5)])
    assert found is not None
    assert found.held_out is not None
    assert found.mean_of_sources is not None
    assert found.held_out > 0.85
    assert found.mean_of_sources == pytest.approx(0.75 * found.held_out * 310 / 300, abs=1e-9)
    assert "in the mean of the sources" in intervals(found)


def test_what_is_below_the_states_is_held_by_no_spread() -> None:
    """As the interval itself, whose low end no spread takes below what is counted tensor by tensor."""
    (row,) = rows("a", 1, spread=0.0, off=0.5)
    wide = Spread(low=0.1, high=10.0)
    assert row.held_by(wide)
    assert not replace(row, bracket=replace(PLAIN, sure_bytes=6 * SIZE // 10)).held_by(wide)


def test_what_is_as_uncertain_is_held_against_its_like() -> None:
    """Wide residuals of one class do not widen another's: of tight rows all others' spread would hold every one."""
    sure = [row for file in "ab" for row in rows(file, 100, spread=0.001)]
    unsure = [row for file in "ab" for row in rows(file, 100, spread=0.2, kind="experts")]
    found = coverage([*sure, *unsure])
    assert found is not None
    assert found.held_out == pytest.approx(found.nominal, abs=0.04)


def test_ends_lie_where_the_shares_say() -> None:
    """Of a normal distribution: 1.96 standard deviations below, 1.645 above; each kind in its own scale."""
    wide = [row for file in "abcd" for row in rows(file, 500, spread=0.4, kind="fork")]
    found = kinds([*wide, *(row for file in "abcd" for row in rows(file, 500, spread=0.1, kind="experts", seed=1))])
    for name, spread in (("fork", 0.4), ("experts", 0.1)):
        assert found[name].measurements == 2000
        assert math.log(found[name].spread.low) == pytest.approx(-1.96 * spread, rel=0.1)
        assert math.log(found[name].spread.high) == pytest.approx(1.645 * spread, rel=0.1)


def test_how_far_out_one_record_lies_widens_nothing() -> None:
    """Ranks alone count: three of a hundred at a factor of two or of nine."""
    near, far = (kinds([*rows("a", 97), *rows("a", 3, spread=0.0, off=off)]) for off in (2.0, 9.0))
    assert near == far


def test_a_kind_measured_too_seldom_has_the_spread_of_all() -> None:
    found = kinds([*rows("a", 100), *rows("b", FEWEST - 1, kind="compile")])
    assert found.keys() == {"model", ANY}
    assert kinds(rows("a", FEWEST - 1)) == {}


def test_of_what_was_not_measured_each_source_says_as_much() -> None:
    """Of four sources with a standard deviation of 0.2 and one with next to none, a tenth of the whole lies beyond where an eighth of the
    four's does: 1.150 standard deviations out instead of 1.282. Of 2,000 narrow records and 480 wide ones alike it would be 0.05."""
    wide = [row for file, kind in zip("abcd", SOME, strict=True) for row in rows(file, 120, spread=0.2, kind=kind)]
    found = kinds([*wide, *rows("e", 2000, spread=0.001, kind="megatron")])
    own = [math.log(found[kind].spread.high) for kind in SOME]
    assert math.log(found[ANY].spread.high) == pytest.approx(1.150 / 1.282 * sum(own) / len(own), rel=0.15)
    assert found["megatron"].spread.high < 1.1


def test_texts_have_the_high_end_of_what_is_modelled_in_full() -> None:
    """What they cache is in their bracket: residuals of one table, however far above, are no one's high end."""
    others = [row for file in "ab" for row in rows(file, 100)]
    alone, beside = kinds(others), kinds([*others, *rows("c", 100, off=3.0, kind="texts")])
    assert beside["texts"].spread.high == beside["model"].spread.high == alone["model"].spread.high


def test_what_a_bracket_explains_widens_nothing() -> None:
    """Each measurement lies within 5 % of one of two readings of its job, half as large the one as the other."""
    told = replace(PLAIN, least_bytes=SIZE // 2)
    both = [*rows("a", 100, spread=0.02), *rows("b", 100, spread=0.02, off=0.5)]
    found = kinds(replace(row, bracket=told) for row in both)["model"].spread
    assert 0.9 < found.low < 1 < found.high < 1.1
    assert kinds(both)["model"].spread.low < 0.5


def test_the_data_file_is_what_the_command_writes() -> None:
    """In the order of KINDS, each with what it was made of."""
    told = [*rows("a.json", 40, kind="option"), *rows("b.json", 40, kind="fork")]
    text = residuals_text(Validation(rows=tuple(told), unsupported=(), records=80))
    written = tomllib.loads(text)["kinds"]
    assert list(written) == [*(name for name in KINDS if name in ("option", "fork")), ANY]
    assert written["option"]["sources"] == ["a"]
    assert written[ANY]["measurements"] == 80
    for name, one in kinds(told).items():
        assert one.spread.low - 0.001 < written[name]["low"] <= one.spread.low
        assert one.spread.high + 0.001 > written[name]["high"] >= one.spread.high


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
