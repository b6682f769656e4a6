"""Adapters beside Megatron's linears, by what Megatron-Bridge's and Transformer Engine's code keeps (kernels/megatron_adapters.py)."""

from __future__ import annotations

import pytest

import ullage
from ullage.engines.base import context_of
from ullage.errors import InvalidInput, Unsupported
from ullage.job.adapted import graph_of
from ullage.job.bind import local_numel
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.kernels.stacks import lower
from ullage.memory.block import BlockSteps, GradRule
from ullage.memory.block_replay import BlockReplay
from ullage.timing.ops import block_work

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, RANK, SEQ = 2048, 16, 8, 128, 5632, 4, 16, 1024
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
MODEL = {
    "model_type": "gpt",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "shared_expert_intermediate_size": 1024,
}


def job(
    *,
    lora: dict[str, object] | None = None,
    layout: dict[str, object] | None = None,
    model: object = MODEL,
    **options: object,
) -> Job:
    return read_job(
        {
            "schema": 1,
            "model": model,
            "cluster": "8xH100-SXM-80GB",
            "engine": {"name": "megatron", "options": options},
            "precision": "bf16",
            "data": {"seq_len": SEQ},
            "layout": layout or {},
            "lora": {"rank": RANK, "targets": "all-linear", **(lora or {})},
        }
    )


def kept(one: Job) -> int:
    """Bytes that a layer in the middle leaves beyond the stream."""
    model = graph_of(one)
    block = [run.block for run in model.runs if run.block.role == "layer"][-1]
    context = context_of(one, model)
    steps = BlockSteps(
        steps=lower(block, context), input="x", input_bytes=context.tensor(block.input).bytes, output=block.output.name
    )
    return BlockReplay(steps, grad_rule=GradRule(mode="fused")).run().forward.delta_bytes


def test_adapters_of_every_linear() -> None:
    """A, [rank, in], and B, [out, rank], of linear_qkv, linear_proj, linear_fc1 and linear_fc2."""
    sides = (HIDDEN + QKV) + (HEADS * HEAD_DIM + HIDDEN) + (HIDDEN + 2 * FFN) + (FFN + HIDDEN)
    assert graph_of(job()).parameter_count(trainable=True) == LAYERS * RANK * sides
    qkv = graph_of(job(lora={"targets": ["linear_qkv"]}))
    assert qkv.parameter_count(trainable=True) == LAYERS * RANK * (HIDDEN + QKV)


def test_the_experts_of_a_rank_share_one() -> None:
    model = graph_of(job(model=MODEL | EXPERTS, layout={"ep": 4}, lora={"targets": ["linear_fc1"]}))
    adapters = RANK * (HIDDEN + 2 * 768) + RANK * (HIDDEN + 2 * 1024)
    assert model.parameter_count(trainable=True) == LAYERS * adapters


def test_tensor_parallelism_divides_both_sides() -> None:
    one = job(layout={"tp": 4})
    model = graph_of(one)
    params = {param.name: param for param in model.runs[1].block.params if param.trainable}
    found = {name: local_numel(model, param, one.layout) for name, param in params.items()}
    assert found["qkv.lora_A"] == RANK // 4 * HIDDEN
    assert found["qkv.lora_B"] == QKV // 4 * RANK
    assert found["o_proj.lora_A"] == RANK * HEADS * HEAD_DIM // 4
    assert found["o_proj.lora_B"] == HIDDEN // 4 * RANK


def test_a_name_that_is_none_of_megatrons() -> None:
    with pytest.raises(InvalidInput, match="linear_qkv, linear_proj, linear_fc1, linear_fc2, all-linear"):
        graph_of(job(lora={"targets": ["q_proj"]}))


def test_a_frozen_linear_keeps_no_input() -> None:
    """An adapter beside linear_proj keeps the attention's output, which attention keeps too, and its own middle; beside linear_fc1 the
    norm's output, which Transformer Engine then keeps; beside linear_fc2 the activation's output."""
    middle = 2 * SEQ * RANK
    proj, fc1, fc2 = (kept(job(lora={"targets": [f"linear_{name}"]})) for name in ("proj", "fc1", "fc2"))
    assert fc1 - proj == 2 * SEQ * HIDDEN
    assert fc2 - proj == 2 * SEQ * FFN
    both = kept(job(lora={"targets": ["linear_proj", "linear_fc1"]}))
    assert both - proj == 2 * SEQ * HIDDEN + middle


def test_under_sequence_parallelism_the_norms_output_is_kept_twice() -> None:
    """Its part by Transformer Engine (layernorm_linear.py: ln_out_to_save), the gathered whole by A, unless A gathers it again."""
    layout: dict[str, object] = {"tp": 2, "sp": True}
    whole = 2 * SEQ * HIDDEN
    gathered, again = (kept(job(layout=layout, sequence_parallel_input_regather=on)) for on in (False, True))
    assert gathered - again == 2 * whole  # before linear_qkv and before linear_fc1
    graphs = {"cuda_graph_impl": "local", "sequence_parallel_input_regather": True}
    assert kept(job(layout=layout, **graphs)) == gathered


def test_dropout_keeps_its_mask_and_what_it_made() -> None:
    dropped = kept(job(lora={"targets": ["linear_fc2"], "dropout": 0.1}))
    assert (
        dropped - kept(job(lora={"targets": ["linear_fc2"]})) == SEQ * FFN
    )  # the mask; A keeps the dropped input for the other


def test_states_are_those_of_the_adapters() -> None:
    one = job(layout={"dp": 8})
    model = graph_of(one)
    lines = {line.what: line.bytes for line in ullage.estimate(one).ledger}
    trained = model.parameter_count(trainable=True)
    assert lines["frozen parameters (dense)"] == pytest.approx(2 * (model.parameter_count() - trained), rel=1e-3)
    assert lines["main gradients (dense)"] == pytest.approx(2 * trained, rel=1e-3)
    assert lines["exp_avg (dense)"] == pytest.approx(2 * trained, rel=1e-3)
    assert not [what for what in lines if what.startswith("dummy gradient")]


def test_frozen_weights_kept_in_8_bits_are_there_in_no_other_type() -> None:
    document = {
        "schema": 1,
        "model": MODEL,
        "cluster": "8xH100-SXM-80GB",
        "engine": {"name": "megatron"},
        "data": {"seq_len": SEQ},
        "lora": {"rank": RANK, "targets": "all-linear"},
    }
    precision = {"params": "bf16", "compute": "fp8", "grads": "fp32", "master": "fp32"}
    beside, alone = (
        {
            line.what: line.bytes
            for line in ullage.estimate(read_job({**document, "precision": {**precision, "fp8_params": kept}})).ledger
        }
        for kept in (False, True)
    )
    linears = LAYERS * (QKV * HIDDEN + HEADS * HEAD_DIM * HIDDEN + 3 * FFN * HIDDEN)
    rows = "weights in fp8, by rows (dense)"
    assert beside[rows] == alone[rows] == pytest.approx(linears, rel=1e-3)
    less = beside["frozen parameters (dense)"] - alone["frozen parameters (dense)"]
    assert less == pytest.approx(2 * linears, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lora": {"dora": True}}, "lora.dora"),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, "lora"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "lora.modules_to_save"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changes: dict[str, object], key: str) -> None:
    with pytest.raises(Unsupported) as caught:
        ullage.estimate(job(**changes))  # type: ignore[arg-type]
    assert caught.value.key == key


def test_a_frozen_linear_has_no_weights_gradient_to_multiply() -> None:
    one = job()
    model = graph_of(one)
    work = {item.name: item for item in block_work(model.runs[-2].block, context_of(one, model))}
    assert [matmul.direction for matmul in work["qkv"].backward.matmuls] == ["dgrad"]
    assert [matmul.direction for matmul in work["qkv.lora_A"].backward.matmuls] == ["dgrad", "wgrad"]
    assert work["qkv.lora_B"].forward.matmuls[0].flops == 2 * SEQ * RANK * QKV
