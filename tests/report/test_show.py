"""A technique as text and as pictures: nothing wider than the terminal, nothing that the chart does not say."""

import json
import re
from html.parser import HTMLParser

import pytest

import ullage
from ullage.report import perfetto
from ullage.report.console import plain
from ullage.report.gantt_html import page
from ullage.report.gantt_text import chart
from ullage.report.json import dumps, shown
from ullage.report.show import show_report

JOB = {
    "model": "llama-3.1-8b",
    "cluster": "2x8xH100-SXM-80GB",
    "data": {"seq_len": 2048, "micro_batch": 1, "grad_accum": 8},
    "stack": "megatron",
    "engine": {"name": "megatron", "zero_stage": 1},
    "layout": {"pp": 4, "tp": 2},
    "recompute": "selective",
}
DEEP = JOB | {
    "model": {"base": "llama-3.1-8b", "num_hidden_layers": 64},
    "cluster": "8x8xH100-SXM-80GB",
    "data": {"seq_len": 2048, "micro_batch": 1, "grad_accum": 512},
    "layout": {"pp": 64},
}
DEEPER = DEEP | {
    "model": {"base": "llama-3.1-8b", "num_hidden_layers": 128},
    "cluster": "16x8xH100-SXM-80GB",
    "data": {"seq_len": 2048, "micro_batch": 1, "grad_accum": 16},
    "layout": {"pp": 128},
}


def pipeline(job: dict) -> ullage.Shown:
    return ullage.show("pipeline", ullage.read_job(job))


def lines(job: dict, width: int, *, ascii_only: bool = False) -> list[str]:
    found = pipeline(job).gantt
    assert found is not None
    return plain(chart(found, width=width, ascii_only=ascii_only), width).splitlines()


def stages(found: list[str]) -> list[str]:
    return [line for line in found if line.lstrip().startswith("stage ")]


def test_each_pass_is_drawn_with_its_micro_batch() -> None:
    """1F1B of eight micro-batches: four forwards on the first stage before its first backward; the last alternates at once."""
    found = stages(lines(JOB, 150))
    assert len(found) == 4
    order = [re.findall(r"[FB]\d", line) for line in found]
    assert order[0][:6] == ["F0", "F1", "F2", "F3", "B0", "F4"]
    assert order[3] == [f"{kind}{micro_batch}" for micro_batch in range(8) for kind in "FB"]
    assert all(len(passes) == 16 for passes in order)
    assert found[0].rstrip().endswith("%")


@pytest.mark.parametrize("width", [60, 80, 110, 200])
@pytest.mark.parametrize("job", [JOB, DEEP, DEEPER], ids=["4 stages", "64 stages", "128 stages"])
def test_no_line_is_wider_than_the_terminal(job: dict, width: int) -> None:
    found = lines(job, width)
    assert max(map(len, found)) <= width
    assert len(stages(found)) == min(64, job["layout"]["pp"])


def test_what_is_folded_says_so() -> None:
    assert not any("Folded" in line for line in lines(JOB, 150))
    found = lines(DEEP, 110)
    assert any("Folded: a cell is" in line for line in found)
    marks = set("".join(line.partition("%")[0][11:100] for line in stages(found)))
    assert marks <= set("FBxo· 0123456789")
    assert any("64 of 128 stages" in line for line in lines(DEEPER, 110))


def test_a_terminal_of_ascii_gets_ascii() -> None:
    for job in (JOB, DEEP):
        assert all(line.isascii() or "µ" in line for line in lines(job, 110, ascii_only=True))


@pytest.mark.parametrize(
    "technique", ["zero", "tensor-parallel", "pipeline", "checkpointing", "mixed-precision", "collectives"]
)
@pytest.mark.parametrize("width", [80, 110])
def test_a_report_is_plain_text_of_its_width(technique: str, width: int) -> None:
    found = ullage.show(technique, ullage.read_job(JOB))
    text = plain(show_report(found, width=width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    for number, part in enumerate(found.parts, 1):
        assert f"{number}. {part.title}" in text


def test_json_has_every_number_and_the_sums() -> None:
    found = ullage.show("collectives", ullage.read_job(JOB))
    answer = json.loads(dumps(shown(found)))
    assert answer == json.loads(json.dumps(ullage.as_dict(found)))
    sent = answer["steps"][1]
    assert len(sent["rows"]) == len(found.parts[1].rows)
    assert sent["totals"]["wire_bytes"] == sum(row["wire_bytes"] for row in sent["rows"])


class Page(HTMLParser):
    """Tags that a page opens, and whether each is closed; addresses that it points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.paths: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "path":
            self.paths.append(dict(attrs).get("class") or "")
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.paths += [dict(attrs).get("class") or ""] if tag == "path" else []

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_draws_every_pass_and_needs_nothing_else() -> None:
    found = Page(page(pipeline(JOB)))
    assert not found.open
    assert not found.addresses
    assert found.paths.count("forward") == found.paths.count("backward") == 4 * 8
    assert any("backward of micro-batch 7" in text for text in found.text)


def test_the_page_of_many_passes_stays_small() -> None:
    text = page(pipeline(DEEP))
    assert len(text) < 4_000_000
    assert Page(text).paths.count("forward") == 64
    assert "without their numbers" in text


def test_perfetto_has_the_same_seconds() -> None:
    found = pipeline(JOB).gantt
    assert found is not None
    slices = [event for event in perfetto.pipeline(found, title="x")["traceEvents"] if event["ph"] == "X"]  # type: ignore[attr-defined]
    for stage in range(4):
        mine = [event for event in slices if event["tid"] == stage + 1 and event["cat"] != "step"]
        assert len(mine) == 16
        assert sum(event["dur"] for event in mine) / 1e6 == pytest.approx(found.busy_s(stage))
    assert max(event["ts"] + event["dur"] for event in slices) / 1e6 == pytest.approx(found.end_s)
