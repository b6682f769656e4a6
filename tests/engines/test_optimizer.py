"""Optimizers in bytes per parameter, against traces of torch 2.13 and bitsandbytes 0.50.2 on equal tensors (q: bytes of a parameter)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ullage.engines import optimizer as optimizers
from ullage.engines.optimizer import Group, Stepped
from ullage.job.job import Optimizer

NUMEL, COUNT = 512 * 512, 8
P = NUMEL * COUNT


def equal(dtype: str, count: int = COUNT) -> tuple[Group, ...]:
    return (Group(tensors=(Stepped(name="weight", shape=(512, 512), dtype=dtype),), repeat=count),)


def state_bytes(optimizer: Optimizer, dtype: str, *, momentum: bool = True) -> int:
    return sum(item.bytes * count for item, count in optimizers.states(optimizer, equal(dtype), momentum=momentum))


@pytest.mark.parametrize(("dtype", "q"), [("fp32", 4), ("bf16", 2)])
def test_adamw_keeps_two_moments_in_the_type_that_the_job_says(dtype: str, q: int) -> None:
    assert state_bytes(Optimizer(impl="foreach", state=dtype), dtype) == 2 * q * P


def test_fused_adamw_keeps_its_step_counts_on_the_device() -> None:
    assert state_bytes(Optimizer(impl="fused", state="fp32"), "fp32") == 8 * P + COUNT * 512


@pytest.mark.parametrize(
    ("impl", "per_parameter"),
    [("foreach", 4.0), ("fused", 0.0), ("for-loop", 3 * 4 / COUNT)],
)
def test_step_temporaries(impl: str, per_parameter: float) -> None:
    """foreach: one square root of every second moment; for-loop: three tensors where all are equal."""
    optimizer = Optimizer(impl=impl, state="fp32")  # type: ignore[arg-type]
    assert optimizers.step(optimizer, equal("fp32")).peak_bytes == per_parameter * P
    assert optimizers.step(optimizer, equal("fp32")).delta_bytes == 0


def test_a_single_tensor_needs_two_temporaries_in_the_for_loop() -> None:
    step = optimizers.step(Optimizer(impl="for-loop", state="fp32"), equal("fp32", count=1))
    assert step.peak_bytes == 2 * 4 * NUMEL


def test_eight_bit_states_have_a_scale_for_256_elements() -> None:
    """2 + 2 x 4 / 256 bytes."""
    assert state_bytes(Optimizer(state="8bit"), "bf16") == P * (2 + 8 / 256)


def test_small_tensors_keep_fp32_states_in_8_bit_optimizers() -> None:
    small = (Group(tensors=(Stepped(name="norm.weight", shape=(512,), dtype="bf16"),)),)
    assert [item.bytes for item, _ in optimizers.states(Optimizer(state="8bit"), small)] == [2048, 2048]


def test_paged_states_are_managed_memory() -> None:
    assert state_bytes(Optimizer(state="8bit", paged=True), "bf16") == 0


def test_sgd_keeps_nothing_without_momentum() -> None:
    assert state_bytes(Optimizer(name="sgd"), "fp32", momentum=False) == 0
    assert state_bytes(Optimizer(name="sgd"), "fp32") == 4 * P


def test_adafactor_keeps_rows_and_columns() -> None:
    assert state_bytes(Optimizer(name="adafactor"), "fp32") == COUNT * 2 * 512 * 4


def test_muon_keeps_one_moment_of_matrices_and_adamw_s_two_of_vectors() -> None:
    mixed = (
        Group(
            tensors=(
                Stepped(name="weight", shape=(512, 512), dtype="fp32"),
                Stepped(name="bias", shape=(512,), dtype="fp32"),
            )
        ),
    )
    found = {item.what: item.bytes for item, _ in optimizers.states(Optimizer(name="muon", state="fp32"), mixed)}
    assert found == {"momentum_buffer": 4 * NUMEL, "exp_avg": 2048, "exp_avg_sq": 2048}


@pytest.mark.parametrize(
    ("optimizer", "tensors"),
    [
        (Optimizer(impl="fused"), 1),
        (Optimizer(name="sgd"), 1),
        (Optimizer(impl="for-loop"), 2),
        (Optimizer(impl="foreach"), 2),
    ],
)
def test_a_whole_gradient_is_cut_for_each_op_that_reads_it(optimizer: Optimizer, tensors: int) -> None:
    """As DTensor does; the square root and the denominator, of 1 B here, come when that is gone."""
    embedding = Stepped(name="embed_tokens.weight", shape=(512, 512), dtype="fp32", gradient_parts=4)
    step = optimizers.step(replace(optimizer, state="fp8"), (Group(tensors=(embedding,)),))
    assert step.peak_bytes == tensors * 4 * NUMEL
    assert step.delta_bytes == 0


def test_sgd_s_momentum_is_a_copy_of_a_whole_gradient() -> None:
    embedding = Stepped(name="embed_tokens.weight", shape=(512, 512), dtype="fp32", gradient_parts=4)
    (states,) = optimizers.states(Optimizer(name="sgd", state="fp32"), (Group(tensors=(embedding,)),))
    assert states[0].bytes == 4 * 4 * NUMEL


def test_clipping_needs_a_scalar_a_gradient() -> None:
    assert optimizers.clip(COUNT).peak_bytes == (COUNT + 2) * 512 + 512
