"""One process whose layers are on several devices, one after the other."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines.registry import account, ranks_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.memory.program import events, net
from ullage.timing.step import step_time

SEQ, VOCAB = 1024, 128256
LORA = {"rank": 8, "targets": ["q_proj", "v_proj"], "base": "nf4"}


def job(devices: int, **keys: Any) -> Any:
    """Eight layers of Llama 3.1 8B over ``devices``."""
    placed = {"layout": {"pp": devices}} if devices > 1 else {}
    return read_job(
        {
            "model": {"base": "llama-3.1-8b", "num_hidden_layers": 8},
            "cluster": f"{devices}xA100-SXM-80GB",
            "engine": {"name": "single", "options": {"device_map": "auto"}},
            "precision": "bf16",
            "data": {"seq_len": SEQ, "grad_accum": 3},
            **placed,
            **keys,
        }
    )


def accounts(devices: int, **keys: Any) -> list[Any]:
    read = job(devices, **keys)
    model = graph_of(read)
    return [account(read, model, rank) for rank in ranks_of(read, model)]


@pytest.mark.parametrize("keys", [{}, {"recompute": "full"}, {"lora": LORA}], ids=["full", "recompute", "adapters"])
def test_a_step_leaves_nothing_on_any_device_and_no_weight_twice(keys: dict[str, Any]) -> None:
    (whole,) = accounts(1, **keys)
    parts = accounts(4, **keys)
    assert not any(net(part.step) for part in parts)

    def parameters(found: Any) -> int:
        return sum(item.bytes * count for item, count in found.static if item.category == "parameters")

    assert sum(map(parameters, parts)) == pytest.approx(parameters(whole), rel=1e-5)


def test_middle_devices_hold_no_loss_and_no_logits() -> None:
    _, *middle, last = accounts(4)
    assert not any("logits" in event.item.what for part in middle for event in events(part.program))
    assert any("log-softmax" in event.item.what for event in events(last.program))


@pytest.mark.parametrize(
    ("version", "precision", "copies"),
    [("4.36", "bf16", [4]), ("4.55", "bf16", [2]), ("4.36", "bf16-mixed", [4]), ("4.55", "bf16-mixed", [2, 4])],
)
def test_what_the_model_returns_is_moved_to_the_first_device(version: str, precision: str, copies: list[int]) -> None:
    """accelerate hooks.py, AlignDevicesHook(io_same_device=True): the logits too, and there they are made fp32 under mixed precision."""
    first, last = accounts(2, stack_version=version, precision=precision)
    returned = {event.item for event in events(first.program) if event.item.what.startswith("logits that the model")}
    assert sorted(item.bytes for item in returned) == [SEQ * VOCAB * size for size in copies]
    assert not any(event.item.what.startswith("logits.output") for event in events(last.program))


def passes_s(devices: int, micro_batches: int) -> float:
    """A step without the optimizer's part."""
    found = step_time(job(devices, data={"seq_len": SEQ, "grad_accum": micro_batches}))
    return found.step_s - dict(found.parts)["optimizer"]


def test_no_two_devices_compute_at_once() -> None:
    """Halves of the layers take as long one after the other as on one device, but for what is sent; each micro-batch again."""
    assert passes_s(1, 3) < passes_s(2, 3) < 1.1 * passes_s(1, 3)
    assert passes_s(2, 4) - passes_s(2, 3) == pytest.approx(passes_s(1, 4) - passes_s(1, 3), rel=0.1)
