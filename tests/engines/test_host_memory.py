"""A node's own memory has a verdict of its own: 8 billion parameters under ZeRO-3 are 18 bytes each there (docs of tests/engines/
test_deepspeed.py), 144 GB and what page-locked blocks are rounded up by."""

from __future__ import annotations

from pathlib import Path

import pytest

import ullage
from ullage.engines.estimate import over_host
from ullage.errors import Infeasible
from ullage.job.job import Job
from ullage.report import words
from ullage.train.run import train
from ullage.train.settings import Training

STATES = 18 * 8.03e9


def job(host: str | None = None, *, nodes: int = 1, **keys: object) -> dict[str, object]:
    cluster = {"device": "A100-SXM-40GB", "gpus_per_node": 2, "nodes": nodes} | ({"host_memory": host} if host else {})
    return {
        "model": "llama-3.1-8b",
        "cluster": cluster,
        "data": {"seq_len": 1024},
        "engine": {"name": "deepspeed", "zero_stage": 3},
        "recompute": "full",
        "offload": {"optimizer": "cpu"},
        **keys,
    }


def read(host: str | None = None, *, nodes: int = 1, **keys: object) -> Job:
    return ullage.read_job(job(host, nodes=nodes, **keys))


def test_what_a_host_has_no_room_for_does_not_fit() -> None:
    rich, poor = (ullage.estimate(read(host)) for host in ("1TB", "128GB"))
    assert (rich.verdict, poor.verdict) == ("fits", "oom")
    assert STATES < poor.host_bytes == rich.host_bytes < 2 * STATES
    assert poor.peak == rich.peak
    assert not rich.is_over_host
    assert "own memory" in words.verdict(poor)


def test_of_a_host_whose_memory_nobody_knows_nothing_is_said() -> None:
    found = ullage.read_job(job() | {"cluster": "2xRTX-4090-24GB"})
    assert found.cluster.host_memory_bytes is None
    assert not over_host(found, 10**15)
    assert read().cluster.host_memory_bytes == 2 * 10**12  # a DGX's


def test_nodes_share_the_states() -> None:
    one, two = (ullage.estimate(read("1TB", nodes=nodes)).host_bytes for nodes in (1, 2))
    assert two < one


def test_a_check_says_it_of_the_host_alone(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true}}'
    )
    said = [
        "model=llama-3.1-8b",
        "cluster.device=A100-SXM-40GB",
        "cluster.gpus_per_node=2",
        "cluster.host_memory=128GB",
    ]
    found = ullage.check(path, overrides=[*said, "recompute=full", "data.seq_len=1024"])
    errors = [one for one in found.findings if one.severity == "error"]
    assert [("host memory" in one.what) for one in errors] == [True]


def test_no_plan_leaves_more_on_a_host_than_it_has() -> None:
    free = {key: value for key, value in job("128GB").items() if key not in ("offload", "recompute", "engine")}
    free["data"] = {"seq_len": 1024, "global_batch": 2}
    rich = {**free, "cluster": {**free["cluster"], "host_memory": "1TB"}}  # type: ignore[dict-item]
    assert ullage.plan(rich, engines=("deepspeed",), top=1).plans[0].job.offload.optimizer == "cpu"
    found = ullage.plan(free, engines=("deepspeed",), top=1)
    assert not found.plans
    assert found.nothing_fits is not None
    assert "own memory" in found.nothing_fits.why


def test_a_training_is_not_started(tmp_path: Path) -> None:
    small = read("1GB", model={"base": "llama-3.2-1b", "num_hidden_layers": 2})
    with pytest.raises(Infeasible, match="bytes of a node"):
        train(small, Training(data=(tmp_path,), out=tmp_path))
