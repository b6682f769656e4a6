"""What a snapshot holds, told from files shaped as torch writes them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.report.test_timeline import drawn_job

from ullage.engines.estimate import estimate
from ullage.errors import InvalidInput
from ullage.postmortem.snapshot import devices, read_snapshot, summarise
from ullage.postmortem.snapshot_compare import compare
from ullage.postmortem.snapshot_frames import Frame, category_of, words
from ullage.report import memory_viz
from ullage.report.console import plain
from ullage.report.timeline_job import job_timeline
from ullage.report.timeline_snapshot import comparison_report, snapshot_report
from ullage.units import MIB

TORCH = "/site-packages/torch/"


def frames(*stack: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": 7, "name": function} for file, function in stack]


LOADED = frames(
    (f"{TORCH}nn/modules/module.py", "convert"), (f"{TORCH}nn/modules/module.py", "_apply"), ("train.py", "main")
)
FORWARD = frames(("/code/model.py", "forward"), (f"{TORCH}nn/modules/module.py", "_call_impl"), ("train.py", "main"))


def block(
    size: int, state: str = "active_allocated", stack: Any = None, requested: int | None = None
) -> dict[str, Any]:
    return {
        "size": size,
        "requested_size": size if requested is None else requested,
        "state": state,
        "frames": stack or [],
    }


def segment(address: int, *blocks: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": sum(one["size"] for one in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": list(blocks),
        **keys,
    }


def snapshot() -> dict[str, Any]:
    """40 MiB loaded, 20 MiB of a forward with 20 MiB free beside them, 10 MiB wholly free, a private pool, another GPU."""
    return {
        "segments": [
            segment(100 * MIB, block(40 * MIB, stack=LOADED)),
            segment(200 * MIB, block(20 * MIB, stack=FORWARD, requested=20 * MIB - 100), block(20 * MIB, "inactive")),
            segment(300 * MIB, block(10 * MIB, "inactive"), stream=5),
            segment(400 * MIB, block(2 * MIB, "active_pending_free"), segment_pool_id=(3, 0), segment_type="small"),
            segment(100 * MIB, block(MIB), device=1),
        ],
        "device_traces": [
            [
                {"action": "alloc", "addr": 220 * MIB, "size": 20 * MIB, "stream": 0, "frames": FORWARD},
                {"action": "alloc", "addr": 300 * MIB, "size": 10 * MIB, "stream": 5},
                {"action": "free_requested", "addr": 300 * MIB, "size": 10 * MIB, "stream": 5},
                {"action": "free_completed", "addr": 300 * MIB, "size": 10 * MIB, "stream": 5},
                {"action": "free_requested", "addr": 220 * MIB, "size": 20 * MIB, "stream": 0},
                {"action": "free_completed", "addr": 220 * MIB, "size": 20 * MIB, "stream": 0},
                {"action": "oom", "device_free": 5, "size": 80 * MIB, "stream": 0},
            ],
            [],
        ],
        "allocator_settings": {"expandable_segments": False},
    }


def test_pools_blocks_and_fragmentation() -> None:
    found = summarise(snapshot())
    assert [
        (pool.name, pool.segments, pool.reserved_bytes, pool.allocated_bytes, pool.largest_free_bytes)
        for pool in found.pools
    ] == [
        ("large", 2, 80 * MIB, 60 * MIB, 20 * MIB),
        ("large, stream 5", 1, 10 * MIB, 0, 10 * MIB),
        ("small, private pool 3", 1, 2 * MIB, 2 * MIB, 0),
    ]
    assert found.allocated_bytes == 62 * MIB
    assert found.reserved_bytes == 92 * MIB
    assert found.split_bytes == 20 * MIB
    assert found.fragmentation == 20 / 92
    assert [(one.bytes // MIB, one.category, one.what) for one in found.held] == [
        (40, "parameters", "train.py:7 main"),
        (20, "activations", "model.py:7 forward"),
        (2, "unknown", ""),
    ]
    assert found.by_category == {"parameters": 40 * MIB, "activations": 20 * MIB, "unknown": 2 * MIB}


def test_history_is_walked_back_to_its_highest_point() -> None:
    found = summarise(snapshot())
    assert found.peak_bytes == 92 * MIB
    assert found.at_peak is not None
    assert [(one.bytes // MIB, one.category) for one in found.at_peak] == [
        (40, "parameters"),
        (20, "activations"),
        (20, "activations"),
        (10, "unknown"),
        (2, "unknown"),
    ]


def test_no_history_is_said_and_not_taken_for_a_peak() -> None:
    found = summarise({**snapshot(), "device_traces": []})
    assert found.at_peak is None
    assert found.peak_bytes is None


def test_devices() -> None:
    assert devices(snapshot()) == (0, 1)
    assert summarise(snapshot(), device=1).allocated_bytes == MIB
    with pytest.raises(InvalidInput, match="--device = 2: is no device of this snapshot; allowed: 0, 1"):
        summarise(snapshot(), device=2)
    assert summarise({"segments": []}).reserved_bytes == 0


def test_frames_of_the_history_stand_in_for_those_of_a_block() -> None:
    taken = snapshot()
    taken["segments"][0]["blocks"][0]["frames"] = []
    taken["device_traces"][0].append(
        {"action": "alloc", "addr": 100 * MIB, "size": 40 * MIB, "stream": 0, "frames": LOADED}
    )
    assert summarise(taken).held[0].category == "parameters"


def test_odd_fields_of_a_frame_are_left_out() -> None:
    taken = snapshot()
    taken["segments"][0]["blocks"][0]["frames"] = [{"filename": ["x"], "name": 3, "line": [[]]}, *LOADED]
    taken["segments"][1]["blocks"][0]["frames"] = [{"filename": "x" * 10**7, "name": "y" * 10**7, "line": 10**18}] * 200
    found = summarise(taken)
    assert (found.held[0].category, found.held[0].what) == ("parameters", "train.py:7 main")
    assert len(found.held[1].what) <= 96


def test_older_forms_are_read(tmp_path: Path) -> None:
    """Before torch 2.1 a block's frames stood in its history; torch.cuda.memory_snapshot() is a bare list."""
    old = {"size": 1024, "state": "active_allocated", "history": [{"addr": 0, "real_size": 1000, "frames": LOADED}]}
    file = tmp_path / "old.pickle"
    file.write_bytes(pickle.dumps([segment(4096, old)]))
    (held,) = summarise(read_snapshot(file)).held
    assert (held.bytes, held.requested_bytes, held.category) == (1024, 1000, "parameters")


@pytest.mark.parametrize(
    ("stack", "category"),
    [
        ([(f"{TORCH}optim/adamw.py", "_init_group"), (f"{TORCH}optim/adamw.py", "step")], "optimizer"),
        ([(f"{TORCH}optim/adam.py", "_multi_tensor_adam")], "transient"),
        ([("??", "at::native::empty_cuda"), (f"{TORCH}optim/adam.py", "_multi_tensor_adam")], "transient"),
        ([(f"{TORCH}distributed/fsdp/_fully_shard/_fsdp_param.py", "init_unsharded_param")], "gathered"),
        ([(f"{TORCH}distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce")], "gradients"),
        ([("/x/deepspeed/runtime/zero/partition_parameters.py", "_all_gather_dtype")], "gathered"),
        ([("/x/deepspeed/runtime/zero/stage_1_and_2.py", "backward_prologue")], "communication"),
        ([("??", "torch::autograd::Engine::evaluate_function(std::shared_ptr<...>)")], "gradients"),
        ([(f"{TORCH}nn/functional.py", "linear"), (f"{TORCH}_tensor.py", "backward")], "activations"),  # recomputed
        ([("train.py", "main")], "unknown"),
        ([], "unknown"),
    ],
)
def test_categories_from_call_stacks(stack: list[tuple[str, str]], category: str) -> None:
    assert category_of(tuple(Frame(file, function, 1) for file, function in stack)) == category


def test_words_from_a_file_are_printable() -> None:
    assert words((Frame("/a/evil.py", "\x1b[2J" + "x" * 500, 3),)).startswith("evil.py:3 \\x1b[2Jxxx")
    assert len(words((Frame("/a/evil.py", "x" * 500, 3),))) <= 96
    assert (
        words((Frame("a.cpp", "malloc", 0), Frame(f"{TORCH}_ops.py", "call", 2), Frame("m.py", "f", 9))) == "m.py:9 f"
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: one.update(segments=[3]), "entry in segments that is no dict"),
        (lambda one: one["segments"][0].update(address="x"), "no whole number as address"),
        (lambda one: one["segments"][0].update(total_size=True), "no whole number as total_size"),
        (lambda one: one["segments"][0].update(total_size=5), "blocks do not fill it"),
        (lambda one: one["segments"][0].update(blocks=None), "no list of blocks"),
        (lambda one: one["segments"][0]["blocks"][0].update(size=-1), "negative size"),
        (lambda one: one["segments"][0]["blocks"][0].update(state="free"), "unknown state"),
        (lambda one: one["segments"][0]["blocks"][0].update(state=["free"]), "unknown state"),
        (lambda one: one["segments"][0]["blocks"][0].update(frames=7), "no list of frames"),
        (lambda one: one["segments"][0]["blocks"][0].update(frames=[7]), "entry in frames that is no dict"),
        (lambda one: one.update(device_traces=7), "no list of device_traces"),
        (lambda one: one.update(device_traces=[7]), "no list of device_traces"),
        (lambda one: one["device_traces"][0][0].pop("addr"), "no whole number as addr"),
    ],
)
def test_what_is_no_snapshot_is_refused(change: Any, why: str) -> None:
    taken = snapshot()
    change(taken)
    with pytest.raises(InvalidInput, match=why):
        summarise(taken)


def test_other_pickles_are_no_snapshots(tmp_path: Path) -> None:
    file = tmp_path / "other.pickle"
    for value in ({"model": 1}, 3, None, {"segments": {}}):
        file.write_bytes(pickle.dumps(value))
        with pytest.raises(InvalidInput, match="is no memory snapshot"):
            read_snapshot(file)


def test_blocks_that_no_stack_names_are_matched_by_size() -> None:
    """A job's own snapshot without its frames: sizes alone give each block a category, never more than the account has."""
    drawn = job_timeline(drawn_job("fsdp2"))
    taken: Any = memory_viz.snapshot(drawn.timeline)
    for one in taken["segments"]:
        for found in one["blocks"]:
            found["frames"] = []
    taken["device_traces"] = []
    found = compare(taken, estimate(drawn.estimate.job))
    assert all(line.held_by_size_bytes == line.held_bytes for line in found.lines if line.category != "unknown")
    assert sum(line.held_bytes for line in found.lines) == found.summary.allocated_bytes == drawn.stage.static_bytes
    assert all(line.held_bytes <= line.peak_bytes for line in found.lines if line.category != "unknown")
    text = plain(comparison_report(found))
    assert "* in part told by its size alone" in text
    assert "no history in the snapshot" in text


def test_reports() -> None:
    text = plain(snapshot_report(summarise(snapshot())))
    assert "Held, by category" in text
    assert "small, private pool 3" in text
    assert "model.py:7 forward" in text
    drawn = job_timeline(drawn_job("megatron-pipeline"), stage=1)
    found = compare(memory_viz.snapshot(drawn.timeline), drawn.estimate, stage=1)
    text = plain(comparison_report(found))
    assert "stage 1 of 2" in text
    assert "+0.0 %" in text
