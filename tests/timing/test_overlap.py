"""Gathers and reductions beside computing, against what can be written down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.calibration.collectives import curve
from ullage.calibration.overlap import beside_s, contention
from ullage.comm.cost import seconds as transfer_s
from ullage.comm.group import Group
from ullage.hardware.catalogue import device
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.machine import called, exchange_cost
from ullage.timing.overlap import Wrapped, backward_s, forward_s
from ullage.timing.step import stages


def test_gathers_hide_behind_computing() -> None:
    blocks = [Wrapped(compute_s=2.0, gather_s=1.0, reduce_s=0.5)] * 4
    assert forward_s(blocks) == 1.0 + 4 * 2.0  # the first is waited for
    assert backward_s(blocks) == 1.0 + 4 * 2.0 + 0.5  # and the last reduction


def test_gathers_that_take_longer_are_waited_for() -> None:
    blocks = [Wrapped(compute_s=1.0, gather_s=2.0)] * 4
    assert forward_s(blocks) == 4 * 2.0 + 1.0


def test_nothing_to_gather() -> None:
    blocks = [Wrapped(compute_s=1.0)] * 3
    assert forward_s(blocks) == backward_s(blocks) == 3.0
    assert backward_s([]) == 0.0


def test_a_busy_wire_slows_computing_down() -> None:
    block = Wrapped(compute_s=2.0, hindered_s=2.0)  # half as fast
    assert block.end(1.0, []) == 3.0
    assert block.end(1.0, [(0.0, 2.0)]) == 3.5  # half a second's work in the first second
    assert block.end(1.0, [(0.0, 9.0)]) == 5.0
    assert block.end(1.0, [(1.5, 2.5), (4.0, 9.0)]) == 3.5


def test_reductions_slow_down_the_block_after() -> None:
    blocks = [Wrapped(compute_s=2.0, reduce_s=1.0, hindered_s=2.0)] * 2
    assert backward_s(blocks) == 2.0 + 2.5 + 1.0


@given(compute=st.floats(0.1, 10), gather=st.floats(0, 10), reduce=st.floats(0, 10), hindered=st.floats(0, 10))
def test_contention_only_costs(compute: float, gather: float, reduce: float, hindered: float) -> None:
    free = [Wrapped(compute_s=compute, gather_s=gather, reduce_s=reduce)] * 5
    slowed = [Wrapped(compute_s=compute, gather_s=gather, reduce_s=reduce, hindered_s=hindered)] * 5
    for seconds in (forward_s, backward_s):
        assert seconds(free) <= seconds(slowed) * (1 + 1e-9)
        assert seconds(slowed) <= seconds(free) + 5 * hindered + 1e-9


@pytest.mark.parametrize(("matmul", "wire", "seconds"), [(4.0, 1.0, 5.0), (2.0, 2.0, 4.0), (1.0, 9.0, 9.0)])
def test_displaced_blocks_of_a_persistent_matmul_make_a_second_wave(matmul: float, wire: float, seconds: float) -> None:
    """As long as the wire is busy, twice the time (pytorch/pytorch#143988); a shorter collective delays by its own length."""
    assert beside_s(contention(device("H100-SXM-80GB")), matmul, wire) == seconds


def test_ampere_loses_the_sms_that_nccl_keeps() -> None:
    assert beside_s(contention(device("A100-SXM-80GB")), 4.0, 1.0) == pytest.approx(4.0 + 16 / 108)


def test_other_kernels_run_on_the_sms_that_nccl_leaves() -> None:
    """16 of them are NCCL's, and a block has an SM to itself (NVIDIA/nccl#689); a matmul takes twice as long on Hopper."""
    assert contention(device("H100-SXM-80GB")).hindered_s(3.0, 2.0, 9.0) == pytest.approx(3.0 + 2.0 * 16 / (132 - 16))
    assert contention(device("A100-SXM-80GB")).hindered_s(3.0, 2.0, 9.0) == pytest.approx(5.0 * 16 / (108 - 16))


@pytest.mark.parametrize(("name", "sms", "most"), [("H100-SXM-80GB", 132, 1 / 2), ("A100-SXM-80GB", 108, 16 / 108)])
def test_a_hidden_all_reduce_slows_the_backward_down(name: str, sms: int, most: float) -> None:
    """By 16 SMs of all, on Hopper by half of it at most, were everything a matmul (pytorch/pytorch#143988)."""
    job = read_job(
        {"model": "llama-3.1-8b", "cluster": f"8x{name}", "data": {"seq_len": 8192}, "engine": {"name": "ddp"}}
    )
    (stage,) = stages(job, graph_of(job))
    ((reduced, times, wait_s),) = stage.replicas()
    sent_s = exchange_cost(job, reduced).seconds
    assert (times, reduced.kind) == (1, "all_reduce")
    assert sent_s < stage.computed[0].last_backward_s
    assert 16 / sms * sent_s <= wait_s * 1.001 <= most * sent_s * 1.002


def test_torch_takes_time_to_call_a_collective() -> None:
    """An all-gather of 64 MiB on 8 B200 takes 177 us in a training process (MooreThreads/SimuMax@4dcaae5), 137 in nccl-tests."""
    job = read_job({"model": "llama-3.1-8b", "cluster": "8xB200-SXM-180GB", "engine": {"name": "ddp"}})
    alone = transfer_s("all_gather", 1 << 26, Group(ranks=8, domain_ranks=8), curve(job.cluster)).seconds
    in_training = called("all_gather", 1 << 26, Group(ranks=8, domain_ranks=8), job.cluster).seconds
    assert alone < in_training < 178e-6
    assert called("all_gather", 1 << 26, Group(ranks=1, domain_ranks=1), job.cluster).seconds == 0
