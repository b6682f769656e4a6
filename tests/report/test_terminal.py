"""The bars: as long as what they stand for, against a line that stands where the capacity is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ullage
from ullage.engines.estimate import Estimate
from ullage.report.console import plain
from ullage.report.terminal import estimate_report, stages


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return ullage.estimate(
        ullage.read_job(
            {
                "model": "llama-3.1-8b",
                "cluster": "16xH100-SXM-80GB",
                "layout": {"tp": 2, "pp": 8},
                "data": {"grad_accum": 16},
                "engine": {"name": "megatron", "zero_stage": 1},
            }
        )
    )


def bars(estimate: Estimate, width: int = 110) -> list[str]:
    return plain(stages(estimate, width=width, ascii_only=True), width).splitlines()[2:]


def test_a_bar_for_each_stage(estimate: Estimate) -> None:
    lines = bars(estimate)
    assert len(lines) == 8
    assert [line.split(",")[0].strip() for line in lines] == [f"stage {index}" for index in range(8)]
    assert len({line.index("|") for line in lines}) == 1


def test_a_bar_is_as_long_as_its_memory(estimate: Estimate) -> None:
    for line, one in zip(bars(estimate), estimate.ranks, strict=True):
        before_line = line[: line.index("|")]
        filled = len(before_line.rstrip()) - before_line.index("#")
        empty = len(before_line) - before_line.index("#")
        assert filled / empty == pytest.approx(one.device_bytes / estimate.capacity_bytes, abs=1 / empty)


def test_too_much_crosses_the_load_line(estimate: Estimate) -> None:
    worst = max(one.device_bytes for one in estimate.ranks)
    small = replace(estimate, capacity_bytes=worst // 2, verdict="oom")
    line = next(line for line, one in zip(bars(small), small.ranks, strict=True) if one.device_bytes == worst)
    assert any(mark in line.split("|")[1].split()[0] for mark in "#=-")
    assert plain(estimate_report(small)).split()[:3] == ["OUT", "OF", "MEMORY"]


def test_stages_that_hold_the_same_share_a_bar(estimate: Estimate) -> None:
    first = estimate.ranks[0]
    alike = tuple(replace(first, ranks=one.ranks, stage=one.stage) for one in estimate.ranks)
    (line,) = bars(replace(estimate, ranks=alike))
    assert "stages 0-7, ranks 0-15" in line


def test_the_table_of_the_account_adds_up(estimate: Estimate) -> None:
    text = plain(estimate_report(estimate))
    table = text[text.index("Account at the peak") : text.index("Beside the account")]
    rows = [line for line in table.splitlines()[1:] if line.strip()]
    totals = [float(line.split(" GiB")[0].split()[-1].lstrip("<")) for line in rows if not line.startswith("    ")]
    assert sum(totals[:-1]) == pytest.approx(totals[-1], abs=0.06)
