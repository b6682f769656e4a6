"""A trace takes the path of a run: on fake tensors and on real ones every allocation is the same, in size, order, place and life.

And the record of a run is what the allocator did: the profiler's own events of the C++ allocator say the same at the ends of phases.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.trace import factories
from tests.trace.helpers import language_model, lives
from torch.profiler import ProfilerActivity, profile, record_function

from ullage.job.recurrent import FAMILIES as RECURRENT
from ullage.memory.program import round_up
from ullage.trace.events import Trace
from ullage.trace.families import EAGER_ONLY, FAMILIES
from ullage.trace.run import real, trace

NO_OP = {
    5056: "the state of torch's CPU random generator",
    8: "a Python number as a tensor, on the host whatever the device",
}
"""Sizes that the allocator sees and no op makes."""

MODES = {
    "bf16": {},
    "fp32, for-loop": {"precision": "fp32", "optimizer": {"foreach": False}},
    "autocast, fused": {"precision": "autocast", "optimizer": {"fused": True}},
    "recompute": {"recompute": "non-reentrant"},
    "eager, reentrant": {"attention": "eager", "recompute": "reentrant"},
    "padded": {"mask": True},
    "autocast, eager, recompute": {"precision": "autocast", "attention": "eager", "recompute": "non-reentrant"},
}


STRIDES = """torch's fake softplus_backward is contiguous, where the real one has the strides of its gradient (torch/_refs): in a run the
gradients of the rates are copied before their projection reads them as a matrix"""
APART = dict.fromkeys(RECURRENT, STRIDES)
"""Families of which a run allocates what a trace does not."""


def chosen():
    """llama in every mode; each other family in one, so that each mode meets several families."""
    modes = itertools.cycle(MODES)
    for family in FAMILIES:
        for mode in MODES if family == "llama" else [next(modes)]:
            settings = MODES[mode] | ({"attention": "eager"} if family in EAGER_ONLY else {})
            marks = [pytest.mark.xfail(strict=True, reason=APART[family])] if family in APART else []
            yield pytest.param(family, settings, id=f"{family}, {mode}", marks=marks)


@pytest.mark.parametrize(("family", "settings"), list(chosen()))
def test_a_trace_is_a_run(family: str, settings: dict[str, object]) -> None:
    factory = language_model(family, **settings)
    faked, run = trace(factory, like="cpu"), real(factory)
    assert faked.steady.bytes == run.steady.bytes
    assert lives(faked) == lives(run)


@pytest.mark.parametrize("name", ["mlp", "cast", "convolutional", "accumulating"])
def test_other_modules(name: str) -> None:
    factory = getattr(factories, name)
    assert lives(trace(factory, like="cpu")) == lives(real(factory))


class Stretch(NamedTuple):
    """Of a forward or a backward: sizes of all that was allocated in it, of what lived at its end, and how high it rose."""

    made: Counter[int]
    left: Counter[int]
    peak: int


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "qwen2_moe"])
def test_a_record_is_what_the_allocator_did(family: str, tmp_path: Path) -> None:
    """What a forward leaves, and what the backward after it leaves, allocation by allocation; and how high each rises.

    The profiler is no dispatch mode: under it autograd adds gradients in place, as in a run (trace/in_place.py). CPU kernels make
    tensors of their own inside, which no op returns: the allocator sees more than was traced, and never less.
    """
    factory = language_model(family)
    model, _, step = factory()
    for _ in range(2):
        step()
    ids = torch.randint(1, model.config.vocab_size, (2, 40))
    labels = ids.clone()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with record_function("MARK forward"):
            pass
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        with record_function("MARK backward"):
            pass
        loss.backward()
        with record_function("MARK end"):
            pass
    real_stretches = _of_the_allocator(profiled, tmp_path / "trace.json")
    for run, traced in zip(real_stretches, _of_the_trace(trace(factory, like="cpu")), strict=True):
        assert not traced.made - run.made
        assert traced.left == run.left
        assert traced.peak == run.peak


def _of_the_trace(traced: Trace) -> Iterator[Stretch]:
    (start, turn), (_, end) = traced.span(2, "forward"), traced.span(2, "backward")
    before = traced.live_bytes(start - 1)
    for begin, stop in ((start, turn), (turn, end)):
        yield Stretch(
            made=Counter(one.bytes for one in traced.allocations if begin <= one.birth < stop),
            left=Counter(one.bytes for one in traced.allocations if start <= one.birth < stop and one.alive(stop - 1)),
            peak=traced.peak(begin, stop).bytes - before,
        )


def _of_the_allocator(profiled: profile, path: Path) -> Iterator[Stretch]:
    """Between the marks, of what was allocated since the first."""
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    marks = {event["name"]: event["ts"] for event in events if str(event.get("name", "")).startswith("MARK ")}
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    live: dict[int, int] = {}
    for begin, stop in pairwise((marks["MARK forward"], marks["MARK backward"], marks["MARK end"])):
        made: Counter[int] = Counter()
        peak = 0
        for size, address in (
            (one["args"]["Bytes"], one["args"]["Addr"]) for one in memory if begin < one["ts"] <= stop
        ):
            if size > 0 and size not in NO_OP:
                live[address] = round_up(size)
                made[live[address]] += 1
            else:
                live.pop(address, None)
            peak = max(peak, sum(live.values()))
        yield Stretch(made, Counter(live.values()), peak)
