"""Experts one after the other, of one parameter, as transformers ran gpt_oss before 5.0; the installed class still can."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import ullage
from ullage.engines.registry import account
from ullage.job.adapted import graph_of
from ullage.memory.program import events
from ullage.memory.rank import ranks

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 32, 64, 64, 16, 2
GATE_UP, DOWN = (2 * EXPERTS * HIDDEN * width for width in (2 * FFN, FFN))  # bytes in bf16


def _live() -> tuple[int, int]:
    """Bytes of weights' gradients at the highest point of a forward and backward, and at its end."""
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    experts = GptOssExperts(config).to(torch.bfloat16)
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.02)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    indices = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        experts(hidden, indices, weights).sum().backward()
    live = highest = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]" and abs(event.nbytes()) in (GATE_UP, DOWN):
            live += event.nbytes()
            highest = max(highest, live)
    return highest, live


def test_one_experts_gradient_is_as_large_as_that_of_all() -> None:
    highest, left = _live()
    assert left == GATE_UP + DOWN
    assert highest == left + GATE_UP


@pytest.mark.parametrize(("version", "made"), [("4.57", {GATE_UP, DOWN}), ("5.0", set())])
def test_the_account_holds_it(version: str, made: set[int]) -> None:
    model = {"base": "gpt-oss-20b", "num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": FFN}
    job = ullage.read_job(
        {
            "model": {**model, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K},
            "cluster": "1xA100-SXM-80GB",
            "engine": {"name": "single"},
            "precision": "bf16",
            "data": {"seq_len": TOKENS},
            "stack_version": version,
        }
    )
    graph = graph_of(job)
    (rank,) = ranks(graph, job.layout)
    items = {event.item for event in events(account(job, graph, rank).program)}
    assert {item.bytes for item in items if item.what == "gradient of one expert"} == made
