"""A Mamba-2 mixer under Megatron-Core, against what mamba-ssm's autograd function saves and makes again (ssd_combined.py)."""

from __future__ import annotations

import pytest

import ullage
from ullage.engines.base import context_of
from ullage.errors import Infeasible, Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.kernels.stacks import lower
from ullage.kernels.step import Step
from ullage.memory.block import BlockSteps
from ullage.memory.block_replay import BlockReplay
from ullage.timing.ops import block_work

HIDDEN, HEADS, HEAD_DIM, GROUPS, STATE, CHUNK, SEQ = 2688, 64, 64, 8, 128, 128, 8192
INNER = HEADS * HEAD_DIM
CONV = INNER + 2 * GROUPS * STATE
PROJECTED = INNER + CONV + HEADS
MODEL = {
    "model_type": "nemotron_h",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "hybrid_override_pattern": "MM",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 1856,
    "vocab_size": 131072,
    "mamba_num_heads": HEADS,
    "mamba_head_dim": HEAD_DIM,
    "n_groups": GROUPS,
    "ssm_state_size": STATE,
    "chunk_size": CHUNK,
}


def job(
    micro_batch: int = 1, *, head_dim: int = HEAD_DIM, groups: int = GROUPS, heads: int = HEADS, **layout: object
) -> Job:
    return read_job(
        {
            "schema": 1,
            "model": {**MODEL, "mamba_head_dim": head_dim, "n_groups": groups, "mamba_num_heads": heads},
            "cluster": f"{3 if layout.get('cp') == 3 else 8}xH100-SXM-80GB",
            "engine": {"name": "megatron"},
            "precision": "bf16",
            "data": {"seq_len": SEQ, "micro_batch": micro_batch},
            "layout": layout,
        }
    )


def steps_of(one: Job) -> tuple[Step, ...]:
    model = graph_of(one)
    return lower(model.runs[1].block, context_of(one, model))


def kept(one: Job) -> float:
    """Bytes that a layer's forward leaves beyond the stream, for each token of the rank."""
    block = graph_of(one).runs[1].block
    size = context_of(one, graph_of(one)).tensor(block.input).bytes
    steps = BlockSteps(steps=steps_of(one), input="x", input_bytes=size, output="y")
    tokens = one.data.micro_batch * SEQ // one.layout.cp
    return BlockReplay(steps).run().forward.delta_bytes / tokens


def saved(tp: int = 1, sp: int = 1) -> float:
    """Input and norm of the layer, the projection, the scan's output before its gate, and after it, normed, with statistics."""
    stream = 2 * HIDDEN + (2 * HIDDEN + 4)
    return stream / sp + (2 * PROJECTED + 3 * 2 * INNER + 4 * GROUPS) / tp


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_what_a_layer_keeps(micro_batch: int) -> None:
    """Of several sequences the function saves a copy, and the projection itself goes."""
    assert kept(job(micro_batch)) == pytest.approx(saved(), rel=1e-3)


def test_tensor_parallelism_divides_heads_and_groups() -> None:
    assert kept(job(tp=2)) == pytest.approx(saved(tp=2), rel=1e-3)
    assert kept(job(tp=2, sp=True)) == pytest.approx(saved(tp=2, sp=2), rel=1e-3)
    with pytest.raises(Infeasible, match="2 groups of the scan do not divide by 4"):
        job(groups=2, tp=4)


def test_context_parallelism_trades_the_sequence_for_heads() -> None:
    assert kept(job(cp=2)) == pytest.approx(saved(), rel=1e-3)
    exchanges = [step.name for step in steps_of(job(micro_batch=2, cp=2)) if step.name.startswith("exchange.")]
    assert exchanges == ["exchange.projected", "exchange.scanned"]
    with pytest.raises(Infeasible, match="8 groups of the scan on a rank are neither a divisor of 3 nor divide by it"):
        job(heads=24, groups=8, cp=3)


def test_context_parallelism_repeats_groups_of_which_there_are_fewer() -> None:
    """Each of four ranks scans a quarter of the heads with a group of its own: what was projected once for two ranks is there twice."""
    more = 2 * 2 * 2 * STATE  # bf16, both vectors, two groups more
    assert kept(job(groups=2, cp=4)) - kept(job(groups=2)) == pytest.approx(more, abs=1)


def test_what_the_backward_makes_again() -> None:
    """Beside the projection's gradient: states of chunks twice in fp32 and twice in bf16 are the most that is there at once."""
    scan = next(step for step in steps_of(job()) if step.name == "ssm")
    found = sum(buffer.bytes for buffer in scan.backward_scratch) / SEQ
    states = INNER * STATE / CHUNK
    lasting = 2 * 2 * CONV + 2 * INNER + (2 + 4 + 4) * HEADS + 4 * GROUPS * CHUNK
    assert found == pytest.approx(lasting + (2 * 4 + 2 * 2) * states)


def test_with_few_channels_to_a_group_the_scores_weigh_more() -> None:
    scan = next(step for step in steps_of(job(head_dim=8)) if step.name == "ssm")
    assert "scan.scores.sum" in [buffer.name for buffer in scan.backward_scratch]


def test_the_scan_takes_time_and_its_projections_are_matmuls() -> None:
    one = job()
    model = graph_of(one)
    work = {item.name: item for item in block_work(model.runs[1].block, context_of(one, model))}
    assert [item.name for item in work.values() if item.forward.matmuls] == ["in_proj", "out_proj"]
    assert work["in_proj"].forward.matmuls[0].flops == 2 * SEQ * HIDDEN * PROJECTED
    (moved,) = work["ssm"].forward.traffic
    assert moved.bytes > 2 * SEQ * (PROJECTED + 2 * INNER)  # reads the projection, writes two outputs, and more between
    (back,) = work["ssm"].backward.traffic
    assert back.bytes > 2 * moved.bytes


def test_context_parallelism_is_sent() -> None:
    one = job(cp=2)
    model = graph_of(one)
    (work,) = (item for item in block_work(model.runs[1].block, context_of(one, model)) if item.forward.exchanges)
    assert [exchange.payload_bytes for exchange in work.forward.exchanges] == [SEQ * PROJECTED, SEQ * INNER]
    assert work.backward == work.forward


def test_other_layer_code_has_no_scan_and_says_whose_has() -> None:
    elsewhere = {"model": "nemotron-3-nano-30b-a3b", "cluster": "8xH100-SXM-80GB", "engine": {"name": "fsdp2"}}
    with pytest.raises(Unsupported, match=r"has no kernel for op 'ssm' .*; use stack megatron"):
        ullage.estimate(read_job({**elsewhere, "data": {"seq_len": 1024}}))
