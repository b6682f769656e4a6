"""What ops do: the FLOPs are those that the graph counts, and a layout divides them."""

from dataclasses import replace

import pytest

from ullage.engines.base import context_of
from ullage.job.read import read_job
from ullage.model.build import graph as build
from ullage.model.count import flops_per_token
from ullage.timing.machine import attention_s, matmul_s
from ullage.timing.ops import block_work
from ullage.timing.work import Matmul

BASE = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "megatron",
    "engine": {"name": "megatron"},
    "layout": {"dp": 8},
    "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
    "data": {"seq_len": 2048, "micro_batch": 2},
}


def works(**changes):
    job = read_job(BASE | changes)
    graph = build(job.model)
    context = context_of(job, graph)
    return job, graph, [work for block in graph.blocks() for work in block_work(block, context)]


def matmul_flops(found) -> int:
    return sum(one.flops for work in found for part in (work.forward, work.backward) for one in part.matmuls)


@pytest.mark.parametrize("stack", ["megatron", "transformers", "torchtitan"])
def test_flops_are_those_of_the_graph(stack: str) -> None:
    engine = {"name": "megatron"} if stack == "megatron" else {"name": "fsdp2"}
    precision = BASE["precision"] if stack == "megatron" else "bf16-mixed"
    job, graph, found = works(stack=stack, engine=engine, precision=precision, attention="flash")
    tokens = job.data.seq_len * job.data.micro_batch
    attention = sum(work.forward.attention.flops for work in found if work.forward.attention)
    # 6 a weight; the graph counts the whole square of the attention, thrice, a causal kernel half of it
    assert matmul_flops(found) + 6 * attention == flops_per_token(graph, job.data.seq_len) * tokens


def test_tensor_parallel_ranks_share_the_work() -> None:
    whole = matmul_flops(works()[2])
    part = matmul_flops(works(layout={"tp": 8, "sp": True})[2])
    assert 8 * part == whole


def test_a_layer_exchanges_what_the_paper_says() -> None:
    """Two all-gathers and two reduce-scatters forward, and the gathers of the inputs again in the backward (arXiv 2205.05198)."""
    job, graph, _ = works(layout={"tp": 8, "sp": True})
    layer = next(block for block in graph.blocks() if block.role == "layer")
    found = block_work(layer, context_of(job, graph))
    forward = [one.kind for work in found for one in work.forward.exchanges]
    backward = [(one.kind, one.behind) for work in found for one in work.backward.exchanges]
    assert sorted(forward) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert sorted(backward) == sorted([("all_gather", "dgrad"), ("reduce_scatter", "wgrad"), ("all_gather", "")] * 2)
    stream = job.data.seq_len * job.data.micro_batch * 4096 * 2
    assert {one.payload_bytes for work in found for one in work.forward.exchanges} == {stream}


def test_user_buffers_cut_what_is_sent_into_a_piece_for_each_rank() -> None:
    options = {"name": "megatron", "options": {"tp_comm_overlap": True}}
    job, graph, _ = works(layout={"tp": 8, "sp": True}, engine=options)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    found = block_work(layer, context_of(job, graph))
    assert {(one.behind, one.pieces) for work in found for one in work.forward.exchanges} == {("forward", 8)}
    backward = sorted((one.behind, one.pieces) for work in found for one in work.backward.exchanges)
    assert backward == sorted(
        [("dgrad", 8), ("dgrad", 1), ("wgrad", 1)] * 2
    )  # a row-parallel one's gather, a column-parallel one in bulk


def test_experts_run_the_rows_that_the_router_sends() -> None:
    job, _, found = works(model="mixtral-8x7b", layout={"dp": 8, "ep": 8})
    experts = next(work for work in found if work.name.startswith("experts"))
    (matmul,) = experts.forward.matmuls
    assert matmul.groups * matmul.m == 2 * job.data.seq_len * job.data.micro_batch
    assert any(one.axis == "ep" and one.kind == "all_to_all" for work in found for one in work.forward.exchanges)


def test_a_matmul_and_its_gradients_do_the_same() -> None:
    matmul = Matmul(m=3, n=5, k=7, dtype="bf16")
    assert [one.flops for one in matmul.transposes(accumulate=True)] == [matmul.flops] * 2


def test_torchtitan_gathers_an_input_once_for_the_projections_that_share_it() -> None:
    options = {"name": "fsdp2"}
    job, graph, _ = works(
        layout={"dp": 1, "tp": 8, "sp": True}, stack="torchtitan", engine=options, precision="bf16-mixed"
    )
    layer = next(block for block in graph.blocks() if block.role == "layer")
    found = block_work(layer, context_of(job, graph))
    sent = [one for work in found for one in work.forward.exchanges]
    assert sorted(one.kind for one in sent) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    copies = [part for work in found if work.forward.matmuls for part in work.forward.traffic]
    assert [part.bytes for part in copies] == [2 * one.payload_bytes for one in sent]  # of two sequences all are copied


def test_an_8_bit_matmul_has_its_operands_made() -> None:
    """torchao: the input once for the projections that share it, each weight, each output's gradient; of whole tensors 5, 5 and 7 bytes
    an element, and 3 of input and weight again."""
    eight_bit = {"precision": "fp8-mixed", "stack": "torchtitan", "engine": {"name": "fsdp2"}}
    job, graph, _ = works(**eight_bit)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    found = [work for work in block_work(layer, context_of(job, graph)) if work.forward.matmuls]
    matmuls = [work.forward.matmuls[0] for work in found]
    tokens = job.data.seq_len * job.data.micro_batch
    weights = sum(one.n * one.k for one in matmuls)
    inputs = tokens * (4096 + 4096 + 4096 + 14336)  # of q, k and v; of o; of gate and up; of down
    gradients = sum(one.m * one.n for one in matmuls)
    assert sum(part.bytes for work in found for part in work.forward.traffic) == 5 * (inputs + weights)
    assert sum(part.bytes for work in found for part in work.backward.traffic) == 3 * (inputs + weights) + 7 * gradients


def test_one_scale_lets_8_bits_be_gathered() -> None:
    def gathered(recipe: str) -> set[int]:
        engine = {"name": "fsdp2", "options": {"float8_recipe": recipe}}
        layout = {"dp": 1, "tp": 8, "sp": True}
        job, graph, _ = works(precision="fp8-mixed", stack="torchtitan", engine=engine, layout=layout)
        layer = next(block for block in graph.blocks() if block.role == "layer")
        found = block_work(layer, context_of(job, graph))
        return {one.payload_bytes for work in found for one in work.forward.exchanges if one.kind == "all_gather"}

    assert {2 * size for size in gathered("tensorwise")} == gathered("rowwise")


def test_what_an_eager_op_makes_in_passing_is_written_and_read() -> None:
    """The rotary embedding of torchtitan: to fp32 (6 bytes an element), a complex product (8), back (6); compiled, one kernel (4)."""

    def rope(compiles: bool) -> int:
        job, graph, _ = works(stack="torchtitan", engine={"name": "fsdp2"}, precision="bf16-mixed", compile=compiles)
        layer = next(block for block in graph.blocks() if block.role == "layer")
        (work,) = (one for one in block_work(layer, context_of(job, graph)) if one.name == "rope.q")
        return work.forward.traffic[0].bytes

    elements = 2048 * 2 * 4096
    assert rope(compiles=False) == 20 * elements
    assert rope(compiles=True) == 4 * elements


DEEPSPEED_OF_2022 = {"engine": {"name": "deepspeed", "zero_stage": 1, "options": {"checkpoint_activations": False}}}


@pytest.mark.parametrize(
    ("head_dim", "dtype", "engine", "kept"),
    [
        (144, "fp16", {}, 1.0), (140, "fp16", {}, 0.648), (150, "bf16", {}, 0.647),
        (144, "bf16", DEEPSPEED_OF_2022, 1.0), (140, "fp16", DEEPSPEED_OF_2022, 0.407), (150, "bf16", DEEPSPEED_OF_2022, 0.092),
    ],
)  # fmt: skip
def test_heads_of_no_multiple_of_16_bytes_are_multiplied_slowly(
    head_dim: int, dtype: str, engine: dict, kept: float
) -> None:
    """pytorch/pytorch#83272: torch.bmm with CUDA 11.7, 85.82 of 132.46 TFLOP/s in fp16, 85.55 of 132.32 in bf16; with 11.6, 53.89 and
    12.21."""
    sizes = {"hidden_size": 32 * head_dim, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 50304}
    model = {"model_type": "gpt", "max_position_embeddings": 2048, **sizes}
    precision = {**BASE["precision"], "params": dtype, "compute": dtype, "grads": dtype if engine else "fp32"}
    job, _, found = works(model=model, attention="eager", precision=precision, **engine)
    (attention,) = {work for work in found if len(work.forward.matmuls) == 2}
    for one in (*attention.forward.matmuls, *attention.backward.matmuls):
        aligned = replace(one, aligned=True)
        assert matmul_s(job.cluster.device, one) * kept == pytest.approx(matmul_s(job.cluster.device, aligned))


@pytest.mark.parametrize(
    ("model_type", "scores", "softmax"),
    [("gpt", (0, 2), (1.5, 2)), ("gpt_alibi", (2, 2), (1.5, 2)), ("megatron_bert", (0, 2), (2, 3))],
)
def test_unfused_attention_moves_what_its_matmuls_do_not(
    model_type: str, scores: tuple[int, int], softmax: tuple[float, float]
) -> None:
    """In squares of scores, of 16 bits: baddbmm reads no first argument but ALiBi's (beta is 0), which it copies first; a causal softmax
    reads half of the square. What is as large as q or the output is a product with the scale, and a copy among the heads."""
    shape = {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "vocab_size": 50304,
        "intermediate_size": 4096,
    }
    position = {"position": "alibi"} if model_type == "gpt_alibi" else {}
    model = {"model_type": model_type.removesuffix("_alibi"), "max_position_embeddings": 2048, **shape, **position}
    *_, found = works(model=model, attention="eager", data={"seq_len": 2048, "micro_batch": 2})
    square, stream = 2 * 8 * 2048 * 2048 * 2, 2 * 2048 * 1024 * 2

    def moved(name: str) -> tuple[int, int]:
        (one,) = (one for one in found if one.name == name and one.forward.traffic)
        return one.forward.traffic[0].bytes, sum(part.bytes for part in one.backward.traffic)

    assert moved("attention_scores") == (scores[0] * square, scores[1] * 2 * stream)
    assert moved("softmax") == (softmax[0] * square, softmax[1] * square)
    assert moved("attention") == (2 * stream, 2 * stream)


@pytest.mark.parametrize(("version", "heads"), [("2024-12-26", 32), ("2026-03-01", 8)])
def test_torchs_ring(version: str, heads: int) -> None:
    """Keys and values gathered once, with as many heads as attention is given; their gradients handed on in fp32 (_attention.py)."""
    changes = {"stack": "torchtitan", "stack_version": version, "engine": {"name": "fsdp2"}, "precision": "bf16-mixed"}
    *_, found = works(**changes, layout={"dp": 2, "cp": 4}, data={"seq_len": 8192, "micro_batch": 1})
    (core,) = {one for one in found if one.name == "attention"}
    whole = 2 * 8192 * heads * 128 * 2
    (sent,), (again, gradients) = core.forward.exchanges, core.backward.exchanges
    assert (sent.payload_bytes, again.payload_bytes, gradients.payload_bytes) == (whole, whole, 2 * whole)
    assert gradients.pieces == 4
    # a part's output is cast up, merged in fp32 (38 bytes an element with the cast) but for the first, and cast down; k and v are joined
    out, kv = 2048 * 32 * 128, 2 * 2048 * heads * 128
    assert core.forward.traffic[0].bytes == out * (6 + 3 * 38 + 6) + 4 * kv
    *_, whole_sequence = works(**changes, layout={"dp": 8})
    assert not {one.forward.traffic for one in whole_sequence if one.name == "attention"} - {()}


def test_transformer_engines_ring() -> None:
    """A kernel for each rank's keys; the parts' outputs and gradients are put together in 16 bits (context_parallel.py)."""
    job, _, found = works(layout={"dp": 2, "cp": 4}, data={"seq_len": 32768, "micro_batch": 1})
    (core,) = {one for one in found if one.name == "attention"}
    q, kv = 8192 * 32 * 128, 2 * 8192 * 8 * 128
    assert core.forward.traffic[0].bytes == q * (4 + 3 * 6)
    assert core.backward.traffic[0].bytes == q * (4 + 3 * 6) + kv * (4 + 3 * 3)
    attention, device = core.forward.attention, job.cluster.device
    assert attention is not None
    assert (attention.keys, attention.parts) == (32768, 4)
    alone = replace(attention, keys=8192, parts=1)
    assert attention_s(device, attention, "cudnn", backward=False) == pytest.approx(
        4 * attention_s(device, alone, "cudnn", backward=False)
    )
    for kind in ("ulysses", "allgather"):
        *_, found = works(layout={"dp": 2, "cp": 4, "cp_kind": kind}, data={"seq_len": 32768, "micro_batch": 1})
        assert {one.forward.attention.parts for one in found if one.forward.attention} == {1}


@pytest.mark.parametrize(("compile", "behind", "pieces"), [(False, "attention", 4), (True, "", 1)])
def test_a_compiled_ring_waits_where_it_sends(compile: bool, behind: str, pieces: int) -> None:
    """_functional_collectives.py, _maybe_wrap_tensor: while torch traces, the wait follows the collective."""
    changes = {"stack": "torchtitan", "engine": {"name": "fsdp2"}, "precision": "bf16-mixed", "compile": compile}
    *_, found = works(**changes, layout={"dp": 2, "cp": 4}, data={"seq_len": 8192, "micro_batch": 1})
    (core,) = {one for one in found if one.name == "attention"}
    assert {one.behind for one in (*core.forward.exchanges, *core.backward.exchanges)} == {behind}
    assert core.backward.exchanges[-1].pieces == pieces


@pytest.mark.parametrize(
    ("compile", "batch", "gathered", "scattered"),
    [(False, 1, 0, 2), (False, 2, 2, 2), (True, 1, 0, 0), (True, 2, 2, 2)],
)
def test_a_second_dimension_is_gathered_and_scattered_in_copies(
    compile: bool, batch: int, gathered: int, scattered: int
) -> None:
    """Payloads read or written: NCCL's pieces follow one another, those of several sequences do not (_functional_collectives.py)."""
    changes = {"stack": "torchtitan", "engine": {"name": "fsdp2"}, "precision": "bf16-mixed", "compile": compile}
    layout, data = {"dp": 2, "tp": 4, "sp": True}, {"seq_len": 2048, "micro_batch": batch}
    *_, found = works(**changes, layout=layout, data=data)
    payload = batch * 2048 * 4096 * 2
    gate = next(one for one in found if one.name == "gate_proj").forward
    down = next(one for one in found if one.name == "down_proj").forward
    assert sum(one.bytes for one in gate.traffic) == gathered * payload
    assert sum(one.bytes for one in down.traffic) == scattered * payload
    wires = [one for one in found if one.name.endswith((".gather", ".reduce"))]
    assert not wires  # what is on a wire is no kernel


def test_heads_that_are_traded_are_copied_before_and_after() -> None:
    *_, found = works(layout={"dp": 2, "cp": 4, "cp_kind": "ulysses"}, data={"seq_len": 8192, "micro_batch": 1})
    (core,) = {one for one in found if one.name == "attention"}
    sent = sum(one.payload_bytes for one in core.forward.exchanges)
    assert sent == 2048 * (32 + 8 + 8 + 32) * 128 * 2
    assert [one.bytes for one in (*core.forward.traffic, *core.backward.traffic)] == [4 * sent, 4 * sent]


def test_deepep_sends_a_token_once_to_a_rank() -> None:
    """Qwen3 235B: eight of 128 experts on eight ranks are on 5.25 ranks."""

    def sent(**options) -> int:
        engine = {"name": "megatron", "options": options}
        _, _, found = works(model="qwen3-235b-a22b", layout={"dp": 8, "ep": 8}, engine=engine)
        return max(one.payload_bytes for work in found for one in work.forward.exchanges if one.axis == "ep")

    every, once = sent(), sent(moe_token_dispatcher_type="flex")
    assert once / every == pytest.approx((1 - (7 / 8) ** 8), rel=1e-6)
    assert sent(moe_dispatch="deepep") == once
    assert sent(moe_token_dispatcher_type="alltoall") == every
