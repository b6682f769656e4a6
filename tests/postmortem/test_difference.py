"""Two snapshots, and a snapshot and a job: what one holds and the other does not."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.postmortem.test_snapshot import FORWARD, LOADED, block, frames, segment
from tests.report.test_timeline import drawn_job

import ullage
from ullage.errors import InvalidInput
from ullage.report import memory_viz
from ullage.report.console import plain
from ullage.report.timeline_job import job_timeline
from ullage.report.why import why_report
from ullage.units import GIB, MIB

LOSS = frames(("/env/torch/nn/functional.py", "cross_entropy"), ("/code/loss_utils.py", "fixed_cross_entropy"))


def written(path: Path, *segments: dict[str, Any], trace: list[dict[str, Any]] | None = None) -> str:
    path.write_bytes(pickle.dumps({"segments": list(segments), "device_traces": [trace or []]}))
    return str(path)


def test_what_is_kept_from_step_to_step(tmp_path: Path) -> None:
    before = written(tmp_path / "a.pickle", segment(MIB, block(40 * MIB, stack=LOADED)))
    kept = [segment((100 + 10 * n) * MIB, block(8 * MIB, stack=FORWARD)) for n in range(5)]
    after = written(tmp_path / "b.pickle", segment(MIB, block(40 * MIB, stack=LOADED)), *kept)
    found = ullage.why(after, against=before)
    difference = found.answer.difference
    assert difference is not None
    assert difference.more_bytes == 40 * MIB
    assert [(one.category, one.what, one.more_bytes) for one in difference.lines] == [
        ("activations", "model.py:7 forward", 40 * MIB)
    ]
    leak = next(one for one in found.causes if one.kind == "leak")
    assert "model.py:7 forward" in leak.why
    assert "leak" not in {one.kind for one in ullage.why(before, against=after).causes}
    same = ullage.why(after, against=after).answer.difference
    assert same is not None
    assert same.lines == ()


def without_frames(taken: Any) -> Any:
    for one in taken["segments"]:
        for found in one["blocks"]:
            found["frames"] = []
    for event in taken["device_traces"][0]:
        event.pop("frames", None)
    return taken


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("history", [True, False])
def test_a_jobs_own_snapshot_is_its_account(tmp_path: Path, named: bool, history: bool) -> None:
    """Every block has its twin, by its frames or by its size alone; at the peak, or between steps."""
    drawn = job_timeline(drawn_job("fsdp2"))
    taken: Any = memory_viz.snapshot(drawn.timeline)
    taken = taken if named else without_frames(taken)
    if not history:
        taken["device_traces"] = []
    path = tmp_path / "own.pickle"
    path.write_bytes(memory_viz.dumps(taken))
    difference = ullage.why(str(path), drawn.estimate.job).answer.difference
    assert difference is not None
    assert difference.moment == ("at the peak" if history else "between two steps")
    assert (difference.lines, difference.more_bytes, difference.by_size) == ((), 0, not named)


def test_a_snapshot_of_another_job_says_what_differs(tmp_path: Path) -> None:
    """Twice as many tokens: activations and what is made of them, and no state."""
    job = drawn_job("fsdp2")
    longer = replace(job, data=replace(job.data, seq_len=2 * job.data.seq_len))
    drawn = job_timeline(longer)
    path = tmp_path / "longer.pickle"
    path.write_bytes(memory_viz.dumps(memory_viz.snapshot(drawn.timeline)))
    found = ullage.why(str(path), job)
    difference = found.answer.difference
    assert difference is not None
    more = {one.category: one.more_bytes for one in difference.categories}
    assert more["activations"] > 0
    assert more["parameters"] == more["optimizer"] == 0
    assert difference.more_bytes == drawn.estimate.peak.allocated_bytes - ullage.estimate(job).peak.allocated_bytes
    text = plain(why_report(found))
    assert "What differs" in text
    assert ullage.as_dict(found)["difference"] is not None


def test_a_history_that_ends_in_a_failure_is_a_message(tmp_path: Path) -> None:
    failed = {"action": "oom", "size": 3 * GIB - 100, "device_free": GIB, "stream": 0, "frames": LOSS}
    held = segment(MIB, block(40 * GIB, stack=LOSS))
    found = ullage.why(written(tmp_path / "oom.pickle", held, trace=[failed]))
    assert found.evidence.ran_out
    assert found.evidence.numbers.tried_bytes == 3 * GIB
    assert found.evidence.numbers.free_bytes == GIB
    assert (found.causes[0].kind, found.causes[0].certainty) == ("logits", "likely")
    assert "loss_utils.py" in found.causes[0].why


def test_only_snapshots_are_held_against_each_other(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pickle", segment(MIB, block(40 * MIB)))
    with pytest.raises(InvalidInput, match=r"--against = .*is no snapshot"):
        ullage.why(path, against="CUDA out of memory.")
    with pytest.raises(InvalidInput, match=r"INPUT = .*is no snapshot"):
        ullage.why("CUDA out of memory.", against=path)
