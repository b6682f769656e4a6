"""An estimate at a glance: the verdict, three numbers, a bar for each pipeline stage against the GPU's load line, the account."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.engines.estimate import Estimate, RankEstimate
from ullage.engines.moments import moments
from ullage.memory.ledger import Line, by_category
from ullage.report import words
from ullage.report.console import PLAIN_WIDTH, heading, indented
from ullage.report.words import in_gib, share
from ullage.timing.parts import PARTS
from ullage.timing.step import StepTime, time_or_why

STYLES = {"fits": "bold white on green", "tight": "bold black on yellow", "oom": "bold white on red"}
MOST_LINES = 4  # of one category
LEAST_SHARE = 0.005  # of the whole account
FEWEST_CELLS, MOST_CELLS = 8, 48  # of a bar
BAR_SHARE = 0.3  # of the width
BESIDE_BAR = 27  # columns of the indent, the size, the percentage and the gaps
LEAST_MOMENT = 12


def estimate_report(
    estimate: Estimate, *, width: int = PLAIN_WIDTH, ascii_only: bool = False
) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    yield from head(estimate, width)
    yield from stages(estimate, width=width, ascii_only=ascii_only)
    yield from _account(estimate)
    yield from other_moments(estimate)
    yield from step(estimate)
    yield from foot(estimate, width)


_READ_ON_A_GPU = "torch.cuda.max_memory_allocated()", "torch.cuda.max_memory_reserved()", "nvidia-smi"
_READ_ON_A_CPU = (
    "the storages of all tensors",
    "with what an allocator like CUDA's would keep",
    "the process's resident size",
)


def head(estimate: Estimate, width: int) -> Iterator[RenderableType]:
    job = estimate.job
    line = Text(f" {words.VERDICTS[estimate.verdict]} ", style=STYLES[estimate.verdict])
    line.append(f"  {job.model.name} on {words.cluster(job)}", style="bold not white not black default on default")
    yield line
    facts = words.whole([words.size_of_model(estimate), *words.settings(job)], width - 2)
    yield indented(Text(facts, style="dim"))
    yield indented(Text(words.verdict(estimate)))
    peak = estimate.peak
    stage = words.worst(estimate)
    where = f" (stage {stage.stage} of {len(estimate.ranks)})" if len(estimate.ranks) > 1 else ""
    yield heading("Peak", f"{peak.moment}, on {words.ranks([stage.ranks])}{where}")
    table = _table("name", "number", "text")
    allocated, reserved, shown = _READ_ON_A_CPU if job.cluster.device.vendor == "cpu" else _READ_ON_A_GPU
    rows = [
        ("allocated", peak.allocated_bytes, allocated),
        ("reserved", peak.reserved_bytes, reserved),
        ("device", peak.device_bytes, f"{shown}; between {in_gib(peak.low_bytes)} and {in_gib(peak.high_bytes)}"),
        ("capacity", estimate.capacity_bytes, job.cluster.device.name),
    ]
    for name, size, note in rows:
        style = "bold" if name == "device" else ""
        table.add_row(Text(name, style=style), Text(in_gib(size), style=style), Text(note, style="dim"))
    yield indented(table)


def stages(estimate: Estimate, *, width: int, ascii_only: bool) -> Iterator[RenderableType]:
    """One bar a stage, neighbours that hold the same in one; all on the scale of the largest, the load line at the capacity."""
    full, middle, light, line = "#=-|" if ascii_only else "█▓░│"
    capacity = estimate.capacity_bytes
    scale = max(capacity * 1.1, *(one.device_bytes for one in estimate.ranks), estimate.peak.high_bytes)
    marks = f"{full} states  {middle} the rest of the peak  {light} cached or outside  {line} capacity"
    yield heading("Device memory of each stage", marks)
    groups = _alike(estimate.ranks)
    labels = [_label(group, len(estimate.ranks)) for group in groups]
    room = width - max(map(len, labels)) - BESIDE_BAR
    cells = max(FEWEST_CELLS, min(MOST_CELLS, room, int(BAR_SHARE * width)))
    table = _table("name", "bar", "number", "number", "name")
    for label, group in zip(labels, groups, strict=True):
        one = group[0]
        ends = [one.static_bytes, one.allocated_bytes, one.device_bytes]
        bar = _bar(ends, scale, capacity, cells, (full, middle, light, line))
        size = Text(in_gib(one.device_bytes), style="red" if one.device_bytes > capacity else "")
        moment = Text(_cut(one.moment, room - cells), style="dim")
        table.add_row(Text(label), bar, size, Text(share(one.device_bytes, capacity)), moment)
    yield indented(table)


def _label(group: Sequence[RankEstimate], of: int) -> str:
    name = words.ranks([one.ranks for one in group])
    if of == 1:
        return name
    first, last = group[0].stage, group[-1].stage
    return f"stage {first}, {name}" if first == last else f"stages {first}-{last}, {name}"


def _cut(text: str, width: int) -> str:
    """A text that is cut where it is too long, and left out where next to nothing would remain."""
    if len(text) <= width:
        return text
    return f"{text[: width - 3]}..." if width >= LEAST_MOMENT else ""


def _alike(ranks: Sequence[RankEstimate]) -> list[list[RankEstimate]]:
    groups: list[list[RankEstimate]] = []
    for one in ranks:
        last = groups[-1][-1] if groups else None
        if last is not None and (last.device_bytes, last.allocated_bytes, last.moment) == (
            one.device_bytes,
            one.allocated_bytes,
            one.moment,
        ):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _bar(ends: Sequence[int], scale: float, capacity: int, cells: int, marks: tuple[str, str, str, str]) -> Text:
    line_at = round(cells * capacity / scale)
    bar = Text()
    for cell in range(cells):
        if cell == line_at:
            bar.append(marks[3], style="bold")
            continue
        kind = next((index for index, end in enumerate(ends) if (cell + 0.5) / cells * scale < end), None)
        colour = ("blue", "cyan", "magenta")[kind] if kind is not None else ""
        bar.append(
            marks[kind] if kind is not None else " ", style="red" if kind is not None and cell > line_at else colour
        )
    return bar


def _account(estimate: Estimate) -> Iterator[RenderableType]:
    whole = estimate.peak.allocated_bytes
    yield heading(
        "Account at the peak", f"{words.plural(len(estimate.ledger), 'line')}; --explain shows each with its formula"
    )
    table = _table("text", "number", "number")
    for category, total in sorted(by_category(estimate.ledger).items(), key=lambda pair: -pair[1]):
        table.add_row(
            Text(category, style="bold"), Text(in_gib(total), style="bold"), Text(share(total, whole), style="bold")
        )
        lines = sorted((line for line in estimate.ledger if line.category == category), key=lambda line: -line.bytes)
        for line in _shown(lines, whole):
            table.add_row(Text(f"  {words.named(line)}"), Text(in_gib(line.bytes)), Text(share(line.bytes, whole)))
        rest = lines[len(_shown(lines, whole)) :]
        if rest:
            size = sum(line.bytes for line in rest)
            left = Text(f"  {words.plural(len(rest), 'other line')}", style="dim")
            table.add_row(left, Text(in_gib(size), style="dim"), Text(share(size, whole), style="dim"))
    table.add_section()
    table.add_row(Text("allocated", style="bold"), Text(in_gib(whole), style="bold"), Text("100 %", style="bold"))
    yield indented(table)
    yield from outside(estimate)


def _shown(lines: Sequence[Line], whole: int) -> Sequence[Line]:
    large = [line for line in lines if line.bytes >= LEAST_SHARE * whole]
    return (large or lines[:1])[:MOST_LINES]


def outside(estimate: Estimate) -> Iterator[RenderableType]:
    """From allocated to device."""
    yield heading("Beside the account")
    table = _table("name", "number", "text")
    peak = estimate.peak
    cached = peak.reserved_bytes - peak.allocated_bytes
    table.add_row(Text("cached or fragmented in the allocator"), Text(in_gib(cached)), Text("simulated", style="dim"))
    for what, size, provenance in words.outside(estimate):
        table.add_row(Text(what), Text(in_gib(size)), Text(provenance, style="dim"))
    yield indented(table)


def other_moments(estimate: Estimate) -> Iterator[RenderableType]:
    """Loading, evaluation and saving, each on a rank and on a node's host."""
    found = moments(estimate)
    if not found:
        return
    yield heading("Beside training", "allocated on the rank that holds most, and on a node's host")
    table = _table("name", "number", "number", "text")
    for one in found:
        host = in_gib(one.host_bytes) if one.host_bytes else ""
        what = one.what
        if one.most_batches is not None:
            what += f": {in_gib(one.kept_bytes)} each, room for {one.most_batches}"
        style = "" if one.verdict == "fits" else STYLES[one.verdict]
        table.add_row(
            Text(one.name, style=style), Text(in_gib(one.allocated_bytes)), Text(host), Text(what, style="dim")
        )
    yield indented(table)


def step(estimate: Estimate) -> Iterator[RenderableType]:
    """A step's time by part, or why it is not known."""
    found = time_or_why(estimate.job)
    if not isinstance(found, StepTime):
        yield heading("Time of a step", f"not predicted: {found}")
        return
    yield heading("Time of a step", f"{found.step_s:.3f} s, {words.rate(found)}; data loading left out")
    table = _table("name", "number", "number")
    for name, seconds in sorted(found.parts, key=lambda part: -part[1]):
        table.add_row(Text(PARTS[name]), Text(f"{seconds:.3f} s"), Text(share(seconds, found.step_s)))
    yield indented(table)


def foot(estimate: Estimate, width: int) -> Iterator[RenderableType]:
    if estimate.host_bytes:
        there = estimate.job.cluster.host_memory_bytes
        of = f" of {in_gib(there)}" if there else ""
        yield heading("Host memory", f"{in_gib(estimate.host_bytes)}{of} of each node")
    if estimate.defaults:
        yield heading("Defaults taken", "set any of them in the job file or with --set KEY=VALUE")
        yield indented(Text(words.whole(estimate.defaults, width - 2), style="dim"))
    if estimate.warnings:
        yield heading("Warnings")
        for warning in estimate.warnings:
            yield indented(Text(f"- {warning}", style="yellow"))


def _table(*columns: str) -> Table:
    """Columns: name and number are never broken over lines, text may be; bar is as wide as it is."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for kind in columns:
        table.add_column(justify="right" if kind == "number" else "left", no_wrap=kind != "text", overflow="ellipsis")
    return table
