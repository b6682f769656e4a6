"""A timeline's page: well-formed, whole in itself, and saying what the timeline says."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from tests.report.test_timeline import JOBS, drawn_job

from ullage.report.timeline import Limit, Timeline, TimelineEvent
from ullage.report.timeline_html import page
from ullage.report.timeline_job import JobTimeline, job_timeline, picture_of
from ullage.report.timeline_picture import draw
from ullage.report.words import in_gib
from ullage.units import GIB, MIB


@pytest.fixture(params=JOBS, scope="module")
def drawn(request: pytest.FixtureRequest) -> JobTimeline:
    return job_timeline(drawn_job(request.param), history=True)


class Page(HTMLParser):
    VOID = ("meta", "br", "line", "path", "circle", "rect", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


def test_a_page_is_well_formed_and_needs_no_network(drawn: JobTimeline) -> None:
    text = draw(picture_of(drawn), "html").decode()
    found = Page(text)
    assert found.open == []
    assert not any("src" in attributes or "href" in attributes for _, attributes in found.tags)
    for word in ("http", "import", "url(", "fetch"):
        assert word not in text
    assert f"{drawn.top.moment}" in "".join(found.text["b"])


def test_a_page_holds_what_the_pointer_finds(drawn: JobTimeline) -> None:
    text = draw(picture_of(drawn), "html").decode()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    length = len(data["x"])
    assert 0 < length <= 1602
    assert data["x"] == sorted(data["x"])
    assert all(len(data[name]) == length for name in ("y", "moment", "total", "rows"))
    assert data["total"][data["y"].index(min(data["y"]))] == in_gib(drawn.top.bytes)
    assert drawn.top.moment in data["moments"]
    assert all(len(row) == len(data["categories"]) for row in data["rows"])


def test_a_limit_far_above_is_named_and_not_drawn() -> None:
    event = TimelineEvent(0, 0, MIB, True, "parameters", "x", "load")
    timeline = Timeline(events=(event,), end=1)
    drawn = page(timeline, title="x", lines=[Limit(2 * MIB, "near")])
    named = page(timeline, title="x", lines=[Limit(GIB, "far")])
    assert 'class="limit"' in drawn
    assert 'class="limit"' not in named
    assert "1.00 GiB far, beyond this picture" in named


def test_text_from_elsewhere_stays_text() -> None:
    evil = '</script><script>alert("x")</script>$peak&'
    event = TimelineEvent(0, 0, MIB, True, evil, evil, evil, 0, evil)
    text = page(Timeline(events=(event,), end=1), title=evil, facts=[evil], lines=[Limit(2 * MIB, evil)])
    found = Page(text)
    assert found.open == []
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert json.loads(text.split('id="data">')[1].split("</script>")[0])["moments"] == [evil]


def test_an_empty_timeline_has_a_page() -> None:
    assert Page(page(Timeline(events=(), end=0), title="nothing")).open == []
