"""Precision and optimizer by engine and stack: the tables of precision.py and optimizer.py, held against the engines' docs."""

from __future__ import annotations

import pytest

from ullage.job.optimizer import default_impl
from ullage.job.precision import SHORT_NAMES, resolve
from ullage.job.read import read_job


@pytest.mark.parametrize(
    ("name", "engine", "options", "expected"),
    [
        # params, compute, grads, master, reduce, autocast
        ("bf16-mixed", "ddp", {}, ("fp32", "bf16", "fp32", "fp32", "fp32", True)),
        ("bf16-mixed", "fsdp2", {}, ("fp32", "bf16", "fp32", "fp32", "fp32", False)),
        ("bf16-mixed", "fsdp2", {"reduce_dtype": "bf16"}, ("fp32", "bf16", "fp32", "fp32", "bf16", False)),
        ("bf16-mixed", "deepspeed", {}, ("bf16", "bf16", "bf16", "fp32", "bf16", False)),
        ("bf16-mixed", "deepspeed", {"grad_accum_dtype": "fp32"}, ("bf16", "bf16", "fp32", "fp32", "bf16", False)),
        ("bf16-mixed", "deepspeed", {"bf16_optimizer": True}, ("bf16", "bf16", "fp32", "fp32", "bf16", False)),
        ("bf16-mixed", "deepspeed", {"torch_autocast": True}, ("fp32", "bf16", "fp32", "fp32", "fp32", True)),
        ("bf16-mixed", "megatron", {}, ("bf16", "bf16", "fp32", "fp32", "fp32", False)),
        ("bf16-mixed", "megatron", {"grad_reduce_in_bf16": True}, ("bf16", "bf16", "bf16", "fp32", "bf16", False)),
        ("fp16-mixed", "megatron", {}, ("fp16", "fp16", "fp16", "fp32", "fp16", False)),
        (
            "fp16-mixed",
            "megatron",
            {"accumulate_allreduce_grads_in_fp32": True},
            ("fp16", "fp16", "fp32", "fp32", "fp32", False),
        ),
        ("fp8-mixed", "fsdp2", {}, ("fp32", "fp8", "fp32", "fp32", "fp32", False)),
        ("bf16", "single", {}, ("bf16", "bf16", "bf16", None, "bf16", False)),
        ("fp32", "single", {}, ("fp32", "fp32", "fp32", "fp32", "fp32", False)),
    ],
)
def test_short_names_by_engine(name: str, engine: str, options: dict[str, object], expected: tuple[object, ...]):
    found = resolve(name, engine, options, "torchtitan")
    assert (found.params, found.compute, found.grads, found.master, found.reduce, found.autocast) == expected


@pytest.mark.parametrize("engine", ["single", "ddp", "zero1", "fsdp1", "fsdp2", "deepspeed", "megatron"])
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_mixed_means_an_fp32_master(name: str, engine: str):
    assert resolve(name, engine, {}, "torchtitan").master == (None if name == "bf16" else "fp32")


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("stack", "name", "options", "reduce"),
    [
        ("transformers", "bf16-mixed", {}, "bf16"),
        ("liger", "fp16-mixed", {}, "fp16"),
        ("unsloth", "bf16-mixed", {"reduce_dtype": "fp32"}, "fp32"),
        ("transformers", "bf16-mixed", {"mixed_precision": "DEFAULT"}, "fp32"),  # Composer
        ("torchtitan", "bf16-mixed", {}, "fp32"),
    ],
)
def test_accelerate_reduces_in_the_type_that_it_computes_in(
    engine: str, stack: str, name: str, options: dict[str, object], reduce: str
):
    """accelerate utils/dataclasses.py, set_mixed_precision: one type for parameters and reductions, under FSDP1 and FSDP2; Composer's
    DEFAULT reduces in fp32 (composer/distributed/mosaic_parallelism.py)."""
    assert resolve(name, engine, options, stack).reduce == reduce


def test_a_master_of_the_parameters_type_is_one_copy_in_torch_and_two_in_deepspeed(minimal):
    same = {"params": "bf16", "compute": "bf16", "grads": "bf16", "master": "bf16", "reduce": "bf16"}
    assert read_job(minimal(precision=same)).precision.master is None
    assert read_job(minimal(precision=same, engine={"name": "deepspeed"})).precision.master == "bf16"


@pytest.mark.parametrize(
    ("engine", "stack", "version", "impl"),
    [
        ("megatron", "megatron", None, "fused"),
        ("deepspeed", "transformers", "4.36", "fused"),
        ("fsdp2", "torchtitan", None, "fused"),
        ("fsdp2", "torchtitan", "2025-02-24", "fused"),
        ("fsdp2", "torchtitan", "2024-12-18", "foreach"),
        ("ddp", "transformers", None, "fused"),
        ("ddp", "transformers", "4.57", "fused"),
        ("ddp", "transformers", "4.56.2", "foreach"),
        ("single", "torchtune", None, "foreach"),
        ("single", "litgpt", None, "foreach"),
    ],
)
def test_who_brings_which_optimizer(engine: str, stack: str, version: str | None, impl: str):
    assert default_impl(engine, stack, version) == impl


@pytest.mark.parametrize(
    ("written", "name", "state", "paged"),
    [
        ("adamw", "adamw", "fp32", False),
        ("adamw-8bit", "adamw", "8bit", False),
        ("paged-adamw-8bit", "adamw", "8bit", True),
        ("adamw-bf16", "adamw", "bf16", False),
        ({"name": "muon", "state": "bf16"}, "muon", "bf16", False),
        ({"name": "paged-adamw", "paged": True}, "adamw", "fp32", True),
    ],
)
def test_an_optimizers_name_says_its_state(minimal, written: object, name: str, state: str, paged: bool):
    found = read_job(minimal(optimizer=written)).optimizer
    assert (found.name, found.state, found.paged) == (name, state, paged)


def test_pure_bf16_keeps_bf16_moments(minimal):
    assert read_job(minimal(precision="bf16")).optimizer.state == "bf16"


def test_megatron_brings_its_layers(minimal):
    job = read_job(minimal(engine={"name": "megatron"}))
    assert job.stack == "megatron"
    assert "stack = megatron (engine megatron brings its own layers)" in job.defaults
