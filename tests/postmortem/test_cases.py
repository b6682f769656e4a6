"""Real reports: the stated cause among the first two, no wrong one as certain, and the thread's fix among the advice (docs/oom.md)."""

import pytest
from benchmarks.oom_cases import FIXES, MISSING, TARGET, rows


@pytest.mark.parametrize("reports", ["cases.toml", "fresh.toml"])
def test_reports(reports: str) -> None:
    found = list(rows(reports))
    assert not [row.case for row in found if row.wrongly_certain]
    assert sum(row.right for row in found) / len(found) >= TARGET, [row.case for row in found if not row.right]
    assert not [row.case for row in found if row.failed_advised]
    told = [row for row in found if row.fix]
    missing = [row.case for row in told if row.fix.startswith(MISSING)]
    assert 1 - len(missing) / len(told) >= FIXES, missing
