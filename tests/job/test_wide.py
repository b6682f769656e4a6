"""Layers that a job leaves in 16 bits."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels.narrow import narrow_type

JOB = {"model": "llama-3-8b", "cluster": "8xB200-SXM-180GB", "data": {"seq_len": 2048, "micro_batch": 1}}
TITAN = {"stack": "torchtitan", "precision": "fp8-mixed"}
MEGATRON = {"stack": "megatron", "precision": {"params": "bf16", "compute": "fp4"}}


def _narrow(job: dict[str, object], engine: str, options: dict[str, object]) -> list[bool]:
    """Of each layer, whether its first linear multiplies in fewer bits."""
    read = read_job(
        JOB | job | {"engine": {"name": engine, "zero_stage": 1 if engine == "megatron" else 3, "options": options}}
    )
    graph = graph_of(read)
    context = context_of(read, graph)
    layers = (block for block in graph.blocks() if block.role == "layer")
    firsts = (next(op for op in block.ops if op.kind == "linear") for block in layers)
    return [narrow_type(op, context) is not None for op in firsts]


def test_the_last_of_torchtitans_layers() -> None:
    """Of 32 layers 0 to 26 are NVFP4 (torchtitan components/quantization/nvfp4.md)."""
    options = {"float8_recipe": "nvfp4", "float8_layers": "first 85% of the blocks"}
    assert _narrow(TITAN, "fsdp2", options) == [True] * 27 + [False] * 5


@pytest.mark.parametrize(
    ("counts", "start", "end"),
    [({}, 1, 1), ({"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 4}, 0, 4)],
)
def test_the_ends_of_megatrons_layers(counts: dict[str, object], start: int, end: int) -> None:
    found = _narrow(MEGATRON, "megatron", {"first_last_layers_bf16": True, **counts})
    assert found == [False] * start + [True] * (32 - start - end) + [False] * end


def test_a_job_in_16_bits_has_one_kind_of_layer() -> None:
    options = {"first_last_layers_bf16": True}
    read = read_job(JOB | {"stack": "megatron", "engine": {"name": "megatron", "zero_stage": 1, "options": options}})
    assert [run.repeat for run in graph_of(read).runs if run.block.role == "layer"] == [32]


def test_other_words_are_not_read() -> None:
    with pytest.raises(Unsupported, match="first N% of the blocks"):
        _narrow(TITAN, "fsdp2", {"float8_recipe": "nvfp4", "float8_layers": "all but the odd ones"})
