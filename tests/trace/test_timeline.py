"""A trace drawn: the pictures say what the trace says, and torch's own viewer reads them."""

import json
import pickle
from pathlib import Path

import pytest
from tests.trace import factories
from tests.trace.test_command import FACTORIES

from ullage.cli.main import main
from ullage.report.timeline import top
from ullage.report.timeline_trace import of_trace
from ullage.trace.run import trace

OPS = {"aten.mm", "aten.addmm", "aten.gelu", "aten.gelu_backward"}


@pytest.fixture(scope="module")
def found():
    return trace(factories.mlp)


def test_the_timeline_rises_and_falls_as_the_trace(found) -> None:
    drawn = of_trace(found)
    live = 0
    curve = [(event.time, live := live + (event.bytes if event.alive else -event.bytes)) for event in drawn.events]
    assert curve == list(found.curve())
    assert top(drawn).bytes == found.peak().bytes


def test_moments_are_the_phases_of_each_step(found) -> None:
    spans = of_trace(found).spans
    assert [span.name for span in spans if not span.depth] == ["load", "step 1", "step 2"]
    step = next(span for span in spans if span.name == "step 2")
    inside = [span for span in spans if span.depth and step.start <= span.start < step.end]
    assert [span.name for span in inside][:2] == ["forward", "backward"]
    assert all(span.end <= step.end for span in inside)


def test_every_block_is_named_by_module_and_op(found) -> None:
    for event in of_trace(found).events:
        assert ": " in event.what or event.moment.startswith("load"), event
    assert any(event.what == "1: aten.gelu_backward" for event in of_trace(found).events)


@pytest.mark.parametrize("form", ["html", "perfetto", "memory-viz"])
def test_the_command_draws(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "drawn"
    assert main(["trace", f"{FACTORIES}:mlp", "--format", form, "--out", str(out)]) == 0
    assert "peak" in capsys.readouterr().out
    data = out.read_bytes()
    if form == "html":
        assert b"</svg>" in data
    elif form == "perfetto":
        assert {entry["ph"] for entry in json.loads(data)["traceEvents"]} >= {"X", "C", "i"}
    else:
        from torch.cuda import _memory_viz

        snapshot = pickle.loads(data)
        names = {frame["name"] for event in snapshot["device_traces"][0] for frame in event["frames"]}
        assert any("aten.gelu_backward" in name for name in names)
        assert "Memory" in _memory_viz.trace_plot(snapshot)
