"""A trace takes the path of a run: on fake tensors and on real ones every allocation is the same, in size, order, place and life.

And the record of a run is what the allocator did: the profiler's own events of the C++ allocator say the same at the ends of phases.
"""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.trace import factories
from tests.trace.helpers import language_model, lives
from torch.profiler import ProfilerActivity, profile, record_function

from ullage.memory.program import round_up
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
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "phi3", "gemma2", "mixtral", "qwen3_moe")


def chosen():
    """llama in every mode; of the others two each, so that each mode meets several families."""
    modes = itertools.cycle(MODES)
    for family in FAMILIES:
        for mode in MODES if family == "llama" else [next(modes) for _ in range(2)]:
            settings = MODES[mode] | ({"attention": "eager"} if family == "gemma2" else {})
            yield pytest.param(family, settings, id=f"{family}, {mode}")


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


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_record_is_what_the_allocator_did(family: str, tmp_path: Path) -> None:
    """What a forward leaves, and what the backward after it leaves, allocation by allocation."""
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
    saved, left = _left_by_the_allocator(profiled, tmp_path / "trace.json")
    traced = trace(factory, like="cpu")
    (start, turn), (_, end) = traced.span(2, "forward"), traced.span(2, "backward")
    born = [one for one in traced.allocations if start <= one.birth < end]
    assert saved == Counter(one.bytes for one in born if one.birth < turn and one.alive(turn - 1))
    assert left == Counter(one.bytes for one in born if one.alive(end - 1))


def _left_by_the_allocator(profiled: profile, path: Path) -> tuple[Counter[int], Counter[int]]:
    """Sizes of what was allocated since the first mark and lives at the second, and at the third."""
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    marks = {event["name"]: event["ts"] for event in events if str(event.get("name", "")).startswith("MARK ")}
    live: dict[int, int] = {}
    found = []
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    for event in [*memory, None]:
        for name in ("MARK backward", "MARK end")[len(found) :]:
            if event is None or event["ts"] > marks[name]:
                found.append(Counter(live.values()))
        if event is None or event["ts"] < marks["MARK forward"]:
            continue
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0 and size not in NO_OP:
            live[address] = round_up(size)
        else:
            live.pop(address, None)
    return found[0], found[1]
