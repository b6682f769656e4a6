"""What is trained where a job names adapters, against what PEFT prints for the same (print_trainable_parameters)."""

from __future__ import annotations

import pytest

import ullage
from ullage.errors import InvalidInput
from ullage.job.read import read_job

JOB = {
    "schema": 1,
    "cluster": "1xA100-SXM-80GB",
    "engine": {"name": "single"},
    "data": {"seq_len": 512},
    "precision": "bf16",
}


def _of(keys: dict[str, object]) -> ullage.Estimate:
    return ullage.estimate(read_job(keys))


def _estimate(model: str, **lora: object) -> ullage.Estimate:
    return _of({**JOB, "model": model, "lora": {"rank": 8, **lora}})


@pytest.mark.parametrize(
    ("model", "targets", "trained"),
    [
        # 32 layers x 2 x rank 8 x (4096 + 4096)
        ("llama-2-7b", ["q_proj", "v_proj"], 4_194_304),
        # PEFT's quicktour of gpt2: 12 layers x rank 8 x (768 + 2304)
        ("gpt2", ["c_attn"], 294_912),
    ],
)
def test_trained_parameters_are_peft_s(model: str, targets: list[str], trained: int) -> None:
    found = _estimate(model, targets=targets)
    assert found.trainable_parameters == trained
    assert found.parameters == _of({**JOB, "model": model}).parameters + trained


def test_every_linear_of_the_layers_and_none_else() -> None:
    widths = [(4096, 4096)] * 4 + [(4096, 11008)] * 3
    assert _estimate("llama-2-7b", targets="all-linear").trainable_parameters == 32 * 8 * sum(map(sum, widths))


def test_a_target_that_is_no_linear_is_said() -> None:
    with pytest.raises(InvalidInput, match="q_proj") as raised:
        _estimate("llama-2-7b", targets=["Wqkv"])
    assert raised.value.key == "lora.targets"


def test_a_frozen_base_has_no_gradients_and_no_states() -> None:
    found = _estimate("llama-2-7b", targets=["q_proj"])
    lines = dict.fromkeys(("gradients", "optimizer"), 0)
    for line in found.ledger:
        if line.category in lines:
            lines[line.category] += line.bytes
    adapters = 32 * 8 * 2 * 4096
    assert lines["optimizer"] == pytest.approx(2 * 4 * adapters, rel=0.01)  # and a count of steps for each
    assert lines["gradients"] <= 4 * adapters
