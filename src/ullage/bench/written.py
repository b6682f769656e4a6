"""A calibration file's text. hardware/machine.py reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ullage.bench.machine import Facts
from ullage.hardware.machine import SCHEMA
from ullage.hardware.measured import Measured

_HEAD = """\
# Written by `ullage bench`: what this machine did while as many processes of one job ran on it (docs/calibration.md).
# Every figure is the least of its repeats, of the rank that is slowest in it.
"""


def text(facts: Facts, runs: Sequence[Measured]) -> str:
    """TOML. runs: one for each number of processes."""
    return "\n".join([_HEAD, *_lines(facts, runs)]) + "\n"


def _lines(facts: Facts, runs: Sequence[Measured]) -> Iterator[str]:
    first = runs[0]
    yield f"schema = {SCHEMA}"
    yield f"date = {_quoted(first.date)}"
    yield f"source = {_quoted(f'{first.source} on {facts.processor}, {facts.cores} cores')}"
    yield 'provenance = "measured"'
    yield "\n[device]"
    yield f"name = {_quoted(facts.name)}"
    yield f"vendor = {_quoted(facts.vendor)}"
    yield f"processor = {_quoted(facts.processor)}"
    yield f"cores = {facts.cores}"
    yield f"memory_bytes = {facts.memory_bytes}"
    yield f"process_bytes = {max(run.process_bytes for run in runs)}  # of one process, torch loaded"
    for run in runs:
        yield from _run(run)


def _run(run: Measured) -> Iterator[str]:
    yield "\n[[run]]"
    yield f"processes = {run.processes}"
    yield f"threads = {run.threads}  # of each process"
    yield f"spread = {run.spread:.4f}  # how much longer the median repeat took than the least: the median of the table where it is most"
    yield f"overlap = {run.overlap:.4f}  # the share of a collective that computing of the same length hides"
    if run.collectives:
        yield f"sharded_layer_s = {run.sharded_layer_s:.3e}  # of FSDP2's own Python, a layer and step"
        yield f"split_layer_s = {run.split_layer_s:.3e}  # of tensor parallelism's"
    if run.host_bytes_per_s is not None:
        there, back = run.host_bytes_per_s
        yield f"host = {{ to_device_bytes_per_s = {there:.4g}, to_host_bytes_per_s = {back:.4g} }}"
    for grid in run.matmuls:
        yield "\n[[run.matmul]]"
        yield f"dtype = {_quoted(grid.dtype)}"
        yield f"direction = {_quoted(grid.direction)}"
        for axis, sizes in (("m", grid.m), ("n", grid.n), ("k", grid.k)):
            yield f"{axis} = {_whole(sizes)}"
        yield f"flops_per_s = {_figures(grid.flops_per_s)}"
    for moved in run.traffic:
        yield "\n[[run.memory]]"
        yield f"kind = {_quoted(moved.kind)}"
        yield f"dtype = {_quoted(moved.dtype)}"
        yield f"backward = {json.dumps(moved.backward)}"
        yield f"bytes = {_whole(moved.bytes)}"
        yield f"seconds = {_figures(moved.seconds)}"
    for one in run.attention:
        yield "\n[[run.attention]]"
        yield f"dtype = {_quoted(one.dtype)}"
        yield f"head_dim = {one.head_dim}"
        yield f"causal = {json.dumps(one.causal)}"
        yield f"backward = {json.dumps(one.backward)}"
        yield f"seq = {_whole(one.seq)}"
        yield f"flops_per_s = {_figures(one.flops_per_s)}"
    for sent in run.collectives:
        yield "\n[[run.collective]]"
        yield f"kind = {_quoted(sent.kind)}"
        yield f"ranks = {sent.ranks}"
        yield f"payload_bytes = {_whole(sent.payload_bytes)}"
        yield f"seconds = {_figures(sent.seconds)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _whole(numbers: Sequence[float]) -> str:
    return f"[{', '.join(str(round(one)) for one in numbers)}]"


def _figures(numbers: Sequence[float]) -> str:
    """Four figures: more is noise."""
    return f"[{', '.join(f'{one:.3e}' for one in numbers)}]"
