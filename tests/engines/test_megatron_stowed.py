"""States that wait on the host between updates, by what Megatron-Core's dev branch does (optimizer/cpu_offloading/README.md and
chunked_optimizer_state_offload.py there)."""

from __future__ import annotations

import pytest

from ullage.api import estimate
from ullage.calibration.host import host_bytes_per_s
from ullage.engines.base import pinned
from ullage.engines.registry import account, ranks_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.step import step_time
from ullage.units import MIB

CHUNKED = {"chunked_optimizer_state_offload": True}


def job(*, dp: int = 2, tokens: int = 128, **options: object) -> dict:
    return {
        "model": {"base": "llama-3.1-8b", "num_hidden_layers": 2},
        "cluster": f"{dp}xH100-SXM-80GB",
        "data": {"seq_len": tokens},
        "engine": {"name": "megatron", "zero_stage": 1, "options": options},
        "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
        "loss": "vocab-parallel",
    }


def found(document: dict):
    read = read_job(document)
    graph = graph_of(read)
    (rank,) = ranks_of(read, graph)
    tensors = [local.numel for local in rank.params for _ in range(local.copies)]
    return account(read, graph, rank), tensors


@pytest.mark.parametrize("options", [CHUNKED, {"offload_optimizer_states": True}], ids=["today", "older"])
def test_between_updates_the_gpu_has_none_and_in_one_chunk_all(options: dict) -> None:
    """ "A chunk size of 0 restores all selected tensor state for one update": masters and two moments, 12 bytes an element of a shard."""
    (kept, tensors), (gone, _) = found(job()), found(job(**options))
    states = 12 * sum(tensors) / 2
    assert kept.static_bytes - gone.static_bytes == pytest.approx(states, rel=1e-6)
    assert gone.step.peak_bytes == pytest.approx(states, rel=1e-6)
    assert "optimizer step" in estimate(read_job(job(**options))).peak.moment
    assert gone.loading.peak_bytes == pytest.approx(kept.loading.peak_bytes, rel=0.01)  # masters are made on the GPU


def test_long_forwards_have_their_room() -> None:
    kept, gone = (estimate(read_job(job(tokens=16384, **options))).peak.allocated_bytes for options in ({}, CHUNKED))
    _, tensors = found(job())
    assert kept - gone == pytest.approx(12 * sum(tensors) / 2, rel=1e-3)


def test_chunks_bound_the_moments_and_not_the_masters() -> None:
    """Two windows of a chunk; a tensor that is larger is one by itself: the embedding's, 525 million elements in one rank's hands."""
    size = 8192
    bounded, tensors = found(job(dp=1, optimizer_state_offload_chunk_size_mb=size, **CHUNKED))
    assert 8 * max(tensors) < size * MIB < 8 * sum(tensors) / 2 * 2
    whole, _ = found(job(dp=1, **CHUNKED))
    assert whole.step.peak_bytes - bounded.step.peak_bytes == pytest.approx(
        max(0, 8 * sum(tensors) - 2 * size * MIB), abs=1e6
    )
    atomic, _ = found(job(dp=1, optimizer_state_offload_chunk_size_mb=256, **CHUNKED))
    assert atomic.step.peak_bytes == pytest.approx(4 * sum(tensors) + 2 * 8 * max(tensors), rel=1e-6)


def test_a_fraction_stays() -> None:
    (kept, tensors), (gone, _) = found(job(dp=1)), found(job(dp=1, optimizer_state_offload_fraction=0.25, **CHUNKED))
    assert max(tensors) > 0.25 * sum(tensors)  # the embedding is the first
    assert kept.static_bytes - gone.static_bytes == pytest.approx(12 * tensors[0], rel=1e-6)
    off, _ = found(job(dp=1, optimizer_state_offload_fraction=0.0, **CHUNKED))
    assert off.static_bytes == kept.static_bytes


def test_the_host_has_a_pinned_block_for_each_state() -> None:
    one, tensors = found(job(dp=1, **CHUNKED))
    assert one.host_bytes == 3 * sum(pinned(4 * numel) for numel in tensors)


def test_an_update_waits_for_what_comes() -> None:
    plain, stowed = (step_time(read_job(job(**options))) for options in ({}, CHUNKED))
    _, tensors = found(job())
    rate = host_bytes_per_s(read_job(job()).cluster.device, "h2d").value
    assert stowed.step_s - plain.step_s == pytest.approx(12 * sum(tensors) / 2 / rate, rel=1e-3)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (job(**CHUNKED) | {"offload": {"optimizer": "cpu"}}, "excludes"),
        (
            job(**CHUNKED) | {"engine": {"name": "megatron", "zero_stage": 0, "options": CHUNKED}},
            "distributed optimizer",
        ),
        (job(**CHUNKED) | {"optimizer": "sgd"}, "Adam"),
    ],
    ids=["hybrid", "replicas", "sgd"],
)
def test_what_megatron_asserts(document: dict, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        estimate(read_job(document))
