"""Steps that the router loads unevenly: how many rows the busiest rank computes, and what that takes."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

import ullage
from ullage.engines import routing
from ullage.engines.base import context_of
from ullage.engines.moments import moments
from ullage.engines.registry import ranks_of
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job


def job(*, layers: int = 4, micro_batch: int = 1, recompute: Any = "none", options: Any = None, **layout: int) -> Job:
    return read_job(
        {
            "model": {"base": "qwen3-30b-a3b", "num_hidden_layers": layers},
            "cluster": "2x8xH100-SXM-80GB",
            "data": {"seq_len": 4096, "micro_batch": micro_batch},
            "layout": {"ep": 8, **layout},
            "engine": {"name": "megatron", "options": options or {}},
            "recompute": recompute,
        }
    )


def load(found: Job, quantile: float, *, bias: bool = False) -> float:
    return routing.load(context_of(found, graph_of(found)), quantile, bias=bias)


@pytest.mark.parametrize(("ep", "quantile"), [(8, 0.9), (8, 0.99), (2, 0.9)])
def test_the_busiest_rank_of_drawn_loads(ep: int, quantile: float) -> None:
    """128 experts with loads that deviate by 0.72 / 2.34 of their mean, which stays 1; 2.34 deviations: the largest of the source's 64."""
    draw = random.Random(7)
    busiest = []
    for _ in range(4000):
        loads = [draw.gauss(1.0, 0.72 / 2.336) for _ in range(128)]
        mean = statistics.fmean(loads)
        share = 128 // ep
        busiest.append(max(statistics.fmean(loads[at : at + share]) / mean for at in range(0, 128, share)))
    drawn = sorted(busiest)[int(quantile * len(busiest))]
    assert load(job(ep=ep), quantile) - 1 == pytest.approx(drawn - 1, rel=0.06)


def test_a_draw_of_few_rows_is_uneven_by_itself() -> None:
    """A bias leaves 0.017 of the mean. Of 4096 x 8 rows from each of 8 ranks an expert of 128 has 2048, 0.022 of which is chance."""
    few, many = load(job(), 0.99, bias=True), load(job(micro_batch=16), 0.99, bias=True)
    assert 1 < many < few < load(job(), 0.99)
    assert (few - 1) / (many - 1) == pytest.approx(((0.0171**2 + 1 / 2048) / (0.0171**2 + 1 / 32768)) ** 0.5, rel=0.01)


def test_a_rank_is_sent_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_router", lambda bias: 100.0)
    assert load(job(), 0.99) == 8  # each of 8 choices falls on one of a rank's 16 experts


def test_more_rows_take_what_they_take() -> None:
    """One layer, kept whole: each byte of a routed row grows by the load. Of four layers half as much: they deviate one by one."""
    for layers, share in ((1, 1.0), (4, 0.5)):
        found = job(layers=layers)
        graph = graph_of(found)
        (rank,) = ranks_of(found, graph)
        peak, _ = routing.located(found, graph, rank)
        routed = sum(item.bytes * count for item, count in peak.live.items() if "routed " in item.formula)
        more = routing.peak_bytes(found, graph, rank, 0.99) - peak.bytes
        assert more == pytest.approx((load(found, 0.99) - 1) * share * routed, rel=0.15)


def test_moments_of_dropless_experts_on_several_ranks() -> None:
    told = {one.name: one for one in moments(ullage.estimate(job()))}
    peak = ullage.estimate(job()).peak.allocated_bytes
    assert peak < told["routing p90"].allocated_bytes < told["routing p99"].allocated_bytes
    assert all("(loads: default)" in told[f"routing p{at}"].what for at in (90, 99))
    for balanced in (
        job(ep=1),
        job(options={"moe_router_force_load_balancing": True}),
        job(options={"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
    ):
        assert not [one for one in moments(ullage.estimate(balanced)) if "routing" in one.name]
