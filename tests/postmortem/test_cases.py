"""Real reports: the stated cause among the first two, and no wrong one as certain (docs/oom.md)."""

from benchmarks.oom_cases import TARGET, rows


def test_reports() -> None:
    found = list(rows())
    assert not [row.case for row in found if row.wrongly_certain]
    assert sum(row.right for row in found) / len(found) >= TARGET, [row.case for row in found if not row.right]
