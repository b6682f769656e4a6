"""States in files on NVMe: what stays of them on the host and, for a moment, on the device.

Measured with deepspeed 0.19.8 on one process: six linears of 1024 x 1024 under ZeRO-3, sub-groups of 2.5 million elements, two steps. Its
own swappers ran; only libaio beneath them was replaced, by a stub that reads and writes files and counts what is locked.
"""

from __future__ import annotations

from typing import Any

import pytest

import ullage
from ullage.engines.base import pinned
from ullage.engines.deepspeed import offload, stage3
from ullage.engines.deepspeed.options import knobs
from ullage.engines.deepspeed.partition import Flat, Held
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job

LINEAR = 1024 * 1024
HELD = Held(dense=Flat(numels=(LINEAR,) * 6, shards=1), expert=Flat(numels=(), shards=1), frozen_numels=())


def job(*, optimizer: str = "nvme", params: str = "none", layers: int = 1, **options: Any) -> Job:
    return read_job(
        {
            "model": {"base": "llama-3.2-1b", "num_hidden_layers": layers},
            "cluster": "1xA100-SXM-80GB",
            "engine": {"name": "deepspeed", "zero_stage": 3, "options": {"sub_group_size": 2_500_000, **options}},
            "precision": {"params": "bf16", "master": "fp32", "grads": "bf16"},
            "offload": {"optimizer": optimizer, "params": params},
            "data": {"seq_len": 16},
        }
    )


def host_bytes(found: Job) -> int:
    return offload.host_bytes(found, HELD, knobs(found, graph_of(found)))


def test_a_sub_group_ends_with_the_parameter_that_fills_it() -> None:
    found = job()
    assert stage3.stepped_sizes(HELD, knobs(found, graph_of(found))) == [3 * LINEAR, 3 * LINEAR]


def test_an_optimizer_in_files_leaves_four_buffers_and_the_gradients() -> None:
    """Locked: four times 12,582,912 bytes. Pinned: 6,291,456 bf16 elements."""
    assert host_bytes(job()) == 4 * 12_582_912 + pinned(2 * 6_291_456)


def test_parameters_in_files_leave_what_may_stay_and_two_kinds_of_buffers() -> None:
    """Locked besides: 32,006,144 bytes for those on their way in, 6,291,456 for a sub-group on its way out. Pinned: 3,000,000 elements."""
    more = host_bytes(job(params="nvme", buffer_count=8, buffer_size=2_000_000, max_in_cpu=3_000_000)) - host_bytes(
        job()
    )
    assert more == 32_006_144 + 6_291_456 + pinned(2 * 3_000_000)
    # All of them may stay: nothing goes back to a file.
    more = host_bytes(job(params="nvme", buffer_count=8, buffer_size=2_000_000)) - host_bytes(job())
    assert more == 32_006_144 + pinned(2 * 6_291_456)


@pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
def test_parameters_on_the_host_are_there_wherever_the_optimizer_is(optimizer: str) -> None:
    without, with_them = (host_bytes(job(optimizer=optimizer, params=params)) for params in ("none", "cpu"))
    assert with_them - without == pinned(2 * 6_291_456)


def test_gradients_are_cast_on_the_device_before_the_first_is_written() -> None:
    """Four bytes a parameter at the end of a step whose activations are next to nothing; on the way to the host one is cast at a time."""
    in_files, on_the_host = (ullage.estimate(job(optimizer=optimizer, layers=16)) for optimizer in ("nvme", "cpu"))
    parameters = in_files.parameters
    static = in_files.ranks[0].static_bytes
    assert in_files.peak.moment.startswith("gradients written to files")
    assert in_files.peak.allocated_bytes - static == pytest.approx(4 * parameters, rel=0.01)
    assert on_the_host.peak.allocated_bytes < in_files.peak.allocated_bytes
