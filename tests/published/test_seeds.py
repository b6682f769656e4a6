"""The seeds of the field, computed from the engines' own accounts.

7e9 parameters, mixed precision, Adam: 112 GB whole, 38.5 GB under ZeRO-1 on 8 GPUs, 14 GB under ZeRO-3 on 8: states alone, gradients
in 16 bits (Rajbhandari et al., arXiv 1910.02054, section 3.1 and figure 1). 6e9 in fp32: 22.35 GiB of parameters, as much of
gradients, twice that of Adam states. Each account is of a model of about so many parameters, and is scaled to the round number.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ullage.engines.registry import account
from ullage.job.read import read_job
from ullage.memory.program import Change, Item, Node, Repeat, Sequence
from ullage.memory.rank import ranks
from ullage.model.build import graph
from ullage.units import gb, gib

STATES = ("parameters", "gradients", "optimizer")


def model_of(parameters: float) -> dict[str, Any]:
    """A decoder of about so many parameters: 12 layers' worth of hidden^2 each, and a small vocabulary."""
    hidden = 4096
    layers = round(parameters / (12 * hidden**2))
    return {
        "model_type": "gpt",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "intermediate_size": 4 * hidden,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "position": "none",
        "norm": "rmsnorm",
        "mlp": "gelu",
        "bias": False,
        "qkv_bias": False,
        "tie_word_embeddings": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def states(parameters: float, **changes: Any) -> dict[str, float]:
    """Bytes of each kind of state for exactly ``parameters``: what stays, and the gradients that a backward leaves."""
    read = read_job(
        {
            "schema": 1,
            "model": model_of(parameters),
            "data": {"seq_len": 128, "micro_batch": 1},
            "grad_clip": False,
            "optimizer": {"name": "adamw", "impl": "foreach"},
            **changes,
        }
    )
    model = graph(read.model)
    (rank,) = ranks(model, read.layout)
    found = account(read, model, rank)
    totals: Counter[str] = Counter()
    for item, count in found.static:
        totals[item.category] += item.bytes * count
    if not totals["gradients"]:
        totals["gradients"] = _left_by_backward(found.step)
    scale = parameters / model.parameter_count()
    return {category: totals[category] * scale for category in STATES}


def _left_by_backward(step: Node) -> int:
    """The most that gradients of parameters reach at once during a step, buffers that engines copy them into left out."""
    live = peak = 0
    for item, count in _changes(step):
        if item.category == "gradients" and item.what.startswith("gradient of"):
            live += item.bytes * count
            peak = max(peak, live)
    return peak


def _changes(node: Node) -> list[tuple[Item, int]]:
    if isinstance(node, Change):
        return [(node.item, node.count)]
    if isinstance(node, Repeat):
        return _changes(node.child) * node.times
    assert isinstance(node, Sequence)
    return [change for child in node.children for change in _changes(child)]


def test_6e9_in_fp32() -> None:
    found = states(6e9, cluster="1xB200-SXM-180GB", engine={"name": "single"}, precision="fp32")
    assert gib(found["parameters"]) == pytest.approx(22.35, rel=0.001)
    assert gib(found["gradients"]) == pytest.approx(22.35, rel=0.002)
    assert gib(found["optimizer"]) == pytest.approx(2 * 22.35, rel=0.001)


def test_7e9_whole() -> None:
    """2 + 2 + 12 bytes a parameter: fp32 master, momentum and variance beside 16-bit parameters and gradients."""
    mixed = {"params": "bf16", "compute": "bf16", "grads": "bf16", "master": "fp32", "reduce": "bf16"}
    found = states(
        7e9,
        cluster="1xB200-SXM-180GB",
        engine={"name": "single"},
        precision=mixed,
        optimizer={"name": "adamw", "impl": "foreach", "state": "fp32"},
    )
    assert gb(sum(found.values())) == pytest.approx(112, rel=0.002)


def zero(stage: int) -> dict[str, float]:
    return states(
        7e9,
        cluster="8xB200-SXM-180GB",
        layout={"dp": 8},
        engine={"name": "deepspeed", "zero_stage": stage, "options": {"stage3_param_persistence_threshold": 0}},
        precision="bf16-mixed",
        optimizer="adamw",
    )


def test_7e9_under_zero_1_on_8() -> None:
    """2 + 2 + 12 / 8 bytes a parameter."""
    assert gb(sum(zero(1).values())) == pytest.approx(38.5, rel=0.005)


def test_7e9_under_zero_3_on_8() -> None:
    """(2 + 2 + 12) / 8 bytes a parameter."""
    assert gb(sum(zero(3).values())) == pytest.approx(14, rel=0.005)


def test_7e9_under_megatron_s_distributed_optimizer_on_8() -> None:
    """The same sum from another engine: 16-bit main gradients, whole; main parameters and moments over 8."""
    found = states(
        7e9,
        cluster="8xB200-SXM-180GB",
        layout={"dp": 8},
        engine={
            "name": "megatron",
            "zero_stage": 1,
            "options": {"main_grads_dtype": "bf16", "gradient_accumulation_fusion": False},
        },
        precision="bf16-mixed",
        stack="megatron",
    )
    assert gb(sum(found.values())) == pytest.approx(38.5, rel=0.002)


def test_7e9_under_fsdp2_on_8() -> None:
    """fp32 shards are the master copy: 4 + 4 + 8 bytes over 8, the same 14 GB in other parts."""
    found = states(
        7e9,
        cluster="8xB200-SXM-180GB",
        layout={"dp": 8},
        engine={"name": "fsdp2", "zero_stage": 3},
        precision="fp32",
        stack="torchtitan",
    )
    assert gb(found["parameters"] + found["optimizer"]) == pytest.approx(14 * 12 / 16, rel=0.002)
