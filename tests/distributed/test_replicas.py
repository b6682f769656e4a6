"""Gradients that are reduced where they are made: DDP's, bit by bit, and none of them before they are made."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.training import job_of
from tests.distributed.world import run

pytestmark = pytest.mark.xdist_group("replicas")  # one worker, so that its processes are started once

IN_PLACE = {"reduce_in_place": True}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {},
    "one micro-batch": {"data": {"grad_accum": 1}},
    "tied, in bf16": {"model": {"tie_word_embeddings": True}, "precision": "bf16"},
    "large ones by themselves": {"model": {"vocab_size": 5000}},  # its embedding and head have 1.2 MiB
    "recomputed": {"recompute": "full"},
}
STEPS = 3


def _trained(jobs: dict[str, Any]) -> dict[str, Any]:
    """After some steps with other tokens on each rank: weights by name, and the last losses."""
    import torch
    from torch import distributed

    from ullage.train.composed import run_of

    found = {}
    for name, job in jobs.items():
        made = run_of(job, lr=1e-2)
        drawn = torch.Generator().manual_seed(distributed.get_rank())
        shape = (job.data.micro_batch, job.data.seq_len)
        for _ in range(STEPS):
            ids = [torch.randint(0, 384, shape, generator=drawn) for _ in range(job.data.grad_accum)]
            stepped = made.step(ids)
        assert all(param.grad is None for param in made.parameters.values())
        found[name] = ({key: weight.float().numpy() for key, weight in made.weights().items()}, float(stepped.loss))
    return found


def _of_an_unused_weight() -> str:
    import torch
    from torch import nn

    from ullage.errors import Unsupported
    from ullage.trace.replicas import Replica

    replica = Replica(nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)}), ())
    try:
        with replica.reduced():
            replica.module["used"](torch.ones(1, 2)).sum().backward()
    except Unsupported as error:
        return str(error)
    return ""


def _first_weights() -> list[float]:
    """Of a model that is drawn from another seed on each rank."""
    import torch
    from torch import distributed, nn

    from ullage.trace.replicas import Replica

    torch.manual_seed(distributed.get_rank())
    model = nn.BatchNorm1d(2)
    model.weight.data.normal_()
    model.running_mean.normal_()  # type: ignore[union-attr]
    Replica(model, ())
    return [*model.weight.tolist(), *model.running_mean.tolist()]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """By rank. Two ranks' sums have one order."""
    jobs = {name: job_of("ddp", 2, options=IN_PLACE, **keys) for name, keys in CASES.items()}
    jobs |= {f"DDP, {name}": job_of("ddp", 2, **keys) for name, keys in CASES.items()}
    return run(_trained, (jobs,), ranks=2, timeout_s=300)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_ddp_bit_by_bit(name: str, trained: list[dict[str, Any]]) -> None:
    for of_rank in trained:
        weights, loss = of_rank[name]
        of_ddp, loss_of_ddp = of_rank[f"DDP, {name}"]
        assert loss == loss_of_ddp
        assert weights.keys() == of_ddp.keys()
        assert all((weights[key] == of_ddp[key]).all() for key in weights)


def test_ranks_begin_with_the_first_ones_weights() -> None:
    first, second = run(_first_weights, (), ranks=2, timeout_s=100)
    assert first == second


def test_a_weight_without_a_gradient_is_named() -> None:
    """DDP says so in the next forward (find_unused_parameters is off)."""
    for said in run(_of_an_unused_weight, (), ranks=2, timeout_s=100):
        assert "engine.options.reduce_in_place = true" in said
        assert "2 had none in this step, idle.bias among them" in said
