"""What it takes to make 8-bit operands, by the kernels that Transformer Engine calls (pytorch/csrc/quantizer.cpp, normalization.cpp)."""

from __future__ import annotations

import pytest
from tests.timing.layers import MIXTRAL, layer_works

from ullage.engines.base import context_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.ops import block_work
from ullage.timing.step import step_time
from ullage.timing.work import OpWork

TOKENS, HIDDEN, HEADS, KV, FFN = 1024, 2048, 2048, 512, 8192  # Llama 3.2 1B
JOB = {
    "model": "llama-3.2-1b",
    "stack": "megatron",
    "data": {"seq_len": TOKENS, "micro_batch": 1},
    "precision": {"params": "bf16", "compute": "fp8"},
}


def _works(cluster: str, recipe: str, layout: dict[str, object], **job: object) -> dict[str, OpWork]:
    engine = {"name": "megatron", "zero_stage": 1, "options": {"fp8_recipe": recipe} if recipe else {}}
    return layer_works(read_job(JOB | {"cluster": cluster, "engine": engine, "layout": layout} | job))


def _moved(work: OpWork) -> tuple[int, int]:
    each = (
        [one.bytes for one in direction.traffic if one.kind == "quantize"]
        for direction in (work.forward, work.backward)
    )
    forward, backward = (sum(moved) for moved in each)
    return forward, backward


EACH = 2 + 2 * (1 + 1 / 32)
"""Bytes of an element that MXFP8 moves: read in 16 bits, written in two orders with scales."""
HOPPER, BLACKWELL = "8xH100-SXM-80GB", "8xB200-SXM-180GB"


@pytest.mark.parametrize(
    ("cluster", "recipe", "normed", "other"),
    [
        (HOPPER, "delayed", 0, 4),  # the norm writes 8 bits; read in 16, written by rows and by columns
        (HOPPER, "tensorwise", 4, 6),  # its maximum comes with a norm, and is a pass of its own elsewhere
        (BLACKWELL, "tensorwise", 3, 5),  # no columns
        (BLACKWELL, "mxfp8", 4 + 2 / 32, 4 + 2 / 32),  # a scale for 32 elements
    ],
)
def test_bytes_of_an_element(cluster: str, recipe: str, normed: int, other: int) -> None:
    works = _works(cluster, recipe, {"dp": 8})
    assert _moved(works["qkv"]) == (TOKENS * HIDDEN * normed, TOKENS * (HEADS + 2 * KV) * other)
    assert _moved(works["o_proj"]) == (TOKENS * HEADS * other, TOKENS * HIDDEN * other)


def test_four_bits_are_read_twice_and_have_a_scale_for_16() -> None:
    works = _works(BLACKWELL, "", {"dp": 8}, precision={"params": "bf16", "compute": "fp4"})
    each = 2 + 2 + 2 * (0.5 + 1 / 16)
    assert works["qkv"].forward.matmuls[0].dtype == "fp4"
    assert _moved(works["qkv"]) == (TOKENS * HIDDEN * each, TOKENS * (HEADS + 2 * KV) * each)
    assert _moved(works["o_proj"]) == (TOKENS * HEADS * each, TOKENS * HIDDEN * each)


def test_four_bits_need_a_gpu_that_multiplies_them() -> None:
    engine = {"name": "megatron", "zero_stage": 1, "options": {}}
    job = read_job(
        JOB | {"cluster": "8xMI300X-192GB", "engine": engine, "precision": {"params": "bf16", "compute": "fp4"}}
    )
    with pytest.raises(Unsupported, match="is not multiplied by MI300X-192GB; take fp8 or bf16, or a Blackwell GPU"):
        step_time(job)


def test_torchaos_four_bits_are_cast_with_their_weight() -> None:
    engine = {"name": "fsdp2", "zero_stage": 3, "options": {"float8_recipe": "nvfp4"}}
    read = read_job(JOB | {"cluster": BLACKWELL, "stack": "torchtitan", "engine": engine, "precision": "fp8-mixed"})
    work = layer_works(read)["o_proj"]
    assert work.forward.matmuls[0].dtype == "fp4"
    each = 2 + 2 + 2 * (0.5 + 1 / 16)
    moved = [[one.bytes for one in direction.traffic] for direction in (work.forward, work.backward)]
    assert moved == [[(TOKENS + HIDDEN) * HEADS * each], [TOKENS * HIDDEN * each]]


def test_experts_cast_the_rows_that_come_to_them() -> None:
    works = _works(BLACKWELL, "mxfp8", {"dp": 8, "ep": 8}, model=MIXTRAL)
    rows = 2 * TOKENS
    assert _moved(works["experts.gate_proj"]) == (rows * HIDDEN * EACH, rows * 2 * 1024 * EACH)
    assert _moved(works["experts.down_proj"]) == (rows * 1024 * EACH, rows * HIDDEN * EACH)


def test_fused_experts_cast_what_comes_and_the_gradient_that_comes_back() -> None:
    """Transformer Engine pytorch/ops/fused/grouped_mlp.py: the activation is part of the matmuls around it."""
    engine = {"name": "megatron", "zero_stage": 1, "options": {"fp8_recipe": "mxfp8", "moe_paged_stash": True}}
    layout = {"dp": 8, "ep": 8}
    read = read_job(JOB | {"cluster": BLACKWELL, "engine": engine, "layout": layout, "model": MIXTRAL})
    graph = graph_of(read)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    works = {work.name: work for work in block_work(layer, context_of(read, graph))}
    rows = 2 * TOKENS
    assert _moved(works["experts.gate_proj"]) == (rows * HIDDEN * EACH, 0)
    assert _moved(works["experts.down_proj"]) == (0, rows * HIDDEN * EACH)
    assert "experts.act" not in works


def test_what_is_gathered_is_cast_before_it_is_sent() -> None:
    """Each rank casts its part of the sequence, and sends a byte an element; a gradient in both orders."""
    works = _works(BLACKWELL, "mxfp8", {"dp": 4, "tp": 2, "sp": True})
    assert _moved(works["qkv"])[0] == TOKENS // 2 * HIDDEN * EACH
    assert _moved(works["o_proj"])[1] == TOKENS // 2 * HIDDEN * EACH
    (gather,) = works["qkv"].forward.exchanges
    assert gather.payload_bytes == TOKENS * HIDDEN * (1 + 1 / 32)
    (gradient,) = works["o_proj"].backward.exchanges
    assert gradient.payload_bytes == 2 * TOKENS * HIDDEN * (1 + 1 / 32)


def test_ranks_agree_on_one_scale_before_they_cast() -> None:
    works = _works(BLACKWELL, "tensorwise", {"dp": 4, "tp": 2, "sp": True})
    assert [one.payload_bytes for one in works["qkv"].forward.exchanges] == [4, TOKENS * HIDDEN]
    assert [one.kind for one in works["qkv"].backward.exchanges] == [
        "all_gather",
        "reduce_scatter",
    ]  # of what was cast before
    assert [one.kind for one in works["o_proj"].forward.exchanges] == ["reduce_scatter"]
    assert [one.payload_bytes for one in works["o_proj"].backward.exchanges] == [4, TOKENS * HIDDEN]


def test_the_head_is_multiplied_and_gathered_in_16_bits() -> None:
    engine = {"name": "megatron", "zero_stage": 1, "options": {"fp8_recipe": "mxfp8"}}
    read = read_job(JOB | {"cluster": BLACKWELL, "engine": engine, "layout": {"dp": 4, "tp": 2, "sp": True}})
    graph = graph_of(read)
    head = next(block for block in graph.blocks() if block.role == "head")
    work = next(work for work in block_work(head, context_of(read, graph)) if work.name == "lm_head")
    (gather,) = work.forward.exchanges
    assert gather.payload_bytes == TOKENS * HIDDEN * 2
    assert _moved(work) == (0, 0)
