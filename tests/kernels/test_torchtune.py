"""torchtune's linears on a base in four bits, as torchao packs it."""

from __future__ import annotations

from typing import Any

import pytest

import ullage
from ullage.engines.base import Account
from ullage.engines.registry import account
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.memory.program import events, net
from ullage.memory.rank import ranks

LAYER = 2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096
LAYERS, VOCAB = 4, 32768
ENDS = 2 * VOCAB * 1024 + (2 * LAYERS + 1) * 1024  # embedding, head and norms


def qlora(**keys: Any) -> Account:
    model = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    job = ullage.read_job(
        {
            "model": {
                "base": "llama-3.1-8b",
                **model,
                "num_hidden_layers": LAYERS,
                "vocab_size": VOCAB,
                "head_dim": 64,
            },
            "cluster": "1xA100-SXM-40GB",
            "engine": {"name": "single"},
            "stack": "torchtune",
            "precision": "bf16",
            "data": {"seq_len": 512},
            "lora": {"rank": 8, "targets": ["q_proj", "v_proj"], "base": "nf4-double"},
            **keys,
        }
    )
    graph = graph_of(job)
    (rank,) = ranks(graph, job.layout)
    return account(job, graph, rank)


def test_a_packed_weight_is_its_levels_and_two_kinds_of_scales() -> None:
    """Half a byte each, a byte for 64, two bytes for 64 x 256 (torchao nf4_tensor.py); adapters and ends in bf16."""
    found = qlora()
    numel = LAYERS * LAYER
    adapters = LAYERS * 8 * (1024 + 1024 + 1024 + 256)
    held = {item.what: item.bytes * count for item, count in found.static if item.category == "parameters"}
    assert held["4-bit weights"] == numel // 2
    assert held["scales of 4-bit weights"] == numel // 64
    assert held["adapters"] == 2 * adapters
    assert held["frozen parameters"] == pytest.approx(2 * ENDS, rel=1e-3)
    assert not net(found.step)


def test_an_eager_weight_passes_by_fourteen_bytes_an_element() -> None:
    """Two halves of 64-bit indices, their levels, those scaled, and the weight; compiled the weight alone. Forward and backward."""

    def made(found: Account) -> int:
        items = {event.item for event in events(found.program) if event.item.what.startswith("up_proj ")}
        temporaries = ("dequantised", "indices", "levels", "scales")
        return sum(item.bytes for item in items if any(word in item.what for word in temporaries))

    assert made(qlora()) == 2 * 14 * 1024 * 4096
    assert made(qlora(compile=True)) == 2 * 2 * 1024 * 4096


def test_torchao_quantises_the_scales_always() -> None:
    with pytest.raises(Unsupported, match=r"lora\.base = nf4: .*; allowed: bf16, nf4-double"):
        qlora(lora={"rank": 8, "targets": ["q_proj"], "base": "nf4"})
