"""What Python calls for a mixture, against what torch 2.13 dispatched when these functions of Megatron-LM@d98e8a64 were traced (views and
empty tensors left out)."""

import pytest

from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels.step import Context
from ullage.model.graph import Block
from ullage.timing.issued import issuing
from ullage.timing.mixture import Calls, calls, waits
from ullage.timing.ops import block_work
from ullage.timing.step import stages

MIXTURE = {
    "model": {
        "model_type": "gpt", "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2048, "vocab_size": 50304, "max_position_embeddings": 1024, "position": "learned",
        "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True, "tie_word_embeddings": True,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    },
    "cluster": "8xH100-SXM-80GB",
    "data": {"seq_len": 1024, "micro_batch": 4, "grad_accum": 2},
    "layout": {"dp": 8, "ep": 4},
    "engine": {"name": "megatron", "options": {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}},
    "stack": "megatron",
    "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
    "recompute": "none",
    "attention": "flash",
}  # fmt: skip

FP32 = {"moe_router_dtype": "fp32"}


def job(layout: dict | None = None, version: str | None = None, **options: object) -> dict:
    engine = MIXTURE["engine"] | {"options": MIXTURE["engine"]["options"] | options}
    changed = MIXTURE | {"engine": engine, "layout": layout or MIXTURE["layout"]}
    return changed | {"stack_version": version} if version else changed


def sparse(told: dict) -> tuple[Block, Context]:
    read = read_job(told)
    (stage, *_) = stages(read, graph_of(read))
    return next(block for block, _, _ in stage.runs[0] if any(op.kind == "router" for op in block.ops)), stage.context


def called(name: str, **options: object) -> Calls:
    layout, version = options.pop("layout", None), options.pop("version", None)
    return calls(*sparse(job(layout, version, **options)))[name]


@pytest.mark.parametrize(
    ("options", "torch"),
    [
        ({}, 10),  # topk, softmax of a copy, a copy down, two of zeros and scattered, int, bool
        (FP32, 8),
        ({"moe_router_score_function": "sigmoid"}, 13),
        (FP32 | {"moe_router_score_function": "sigmoid"}, 11),
        ({"deterministic_mode": True}, 11),
        ({"moe_router_enable_expert_bias": True}, 15 + 2),  # the trace; the bias' counts, a sum and a sum in place
        (
            {"moe_router_enable_expert_bias": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
             "moe_router_topk_scaling_factor": 2.0},
            25 + 2,
        ),
        ({"moe_expert_capacity_factor": 1.0}, 10 + 6),
        ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, 10 + 5),
    ],
)  # fmt: skip
def test_choice_of_experts(options: dict, torch: int) -> None:
    assert called("router", **options) == Calls(torch=torch)


def test_a_fused_router_is_one_function() -> None:
    assert called("router", moe_router_fusion=True) == Calls(functions=1)


def test_losses() -> None:
    """Scores anew 7, counts 1 and a function that reduces them, the loss 4, its log 2 and the function that attaches it."""
    loss = {"moe_aux_loss_coeff": 0.01}
    assert called("router", **loss) == Calls(torch=10 + 7 + 1 + 4 + 2, functions=2)
    assert called("router", moe_router_load_balancing_type="seq_aux_loss", **loss).torch == 10 + 7 + 1 + 4 + 1 + 2
    sigmoid = called("router", moe_router_score_function="sigmoid", **FP32 | loss)
    assert sigmoid == Calls(torch=11 + 9 + 1 + 4 + 2, functions=2)
    assert called("router", moe_router_fusion=True, **loss) == Calls(torch=1 + 2, functions=1 + 2 + 2)
    assert called("router", moe_z_loss_coeff=0.001) == Calls(torch=10 + 4 + 2, functions=1)


def test_counts_and_maps() -> None:
    """preprocess 6 beside its gather, four counts copied to the host; permute and sort 5 and 1 beside the rows themselves, whose splits
    come to the host as well; unpermute's zeros."""
    assert called("permute", moe_permute_fusion=True) == Calls(torch=6 + 4)
    assert called("permute") == Calls(torch=6 + 4 + 1 + 5 + 1)
    assert called("permute", version="0.12.0") == Calls(torch=6 + 4 + 1 + 3)
    assert called("permute", layout={"dp": 8}) == Calls(torch=1 + 1 + 1 + 5)
    assert called("combine") == Calls(torch=1)
    assert called("combine", version="0.12.0") == Calls(torch=5)
    assert called("combine", moe_permute_fusion=True) == Calls()


def test_dispatchers_that_send_once() -> None:
    """DeepEP: topk, a cast, 11 for a map of its indices. HybridEP: a cast, and its counts cast and summed."""
    flex = {"moe_token_dispatcher_type": "flex", "moe_permute_fusion": True}
    assert called("permute", **flex, moe_flex_dispatcher_backend="deepep") == Calls(torch=13)
    assert called("permute", **flex, moe_flex_dispatcher_backend="hybridep") == Calls(torch=3)


def test_experts_are_issued_one_by_one() -> None:
    """8 experts over 4 ranks, two linears, each with one matmul forward and two backward."""
    block, context = sparse(job())
    work = [one for one in block_work(block, context) if one.name.startswith("experts") and one.forward.matmuls]
    host = issuing(context, read_job(job()).cluster.device)
    assert host is not None
    assert host.of(work) == pytest.approx(2 * (115e-6 + 13.5e-6))
    assert host.of(work, backward=True) == pytest.approx(4 * (229.4e-6 + 13.5e-6))
    alone = issuing(sparse(job(moe_grouped_gemm=False))[1], read_job(job()).cluster.device)
    assert alone is not None
    assert alone.of(work) == pytest.approx(4 * 115e-6)


def test_the_host_waits_for_counts_but_of_capacities() -> None:
    assert waits(*sparse(job()))
    assert not waits(*sparse(job(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)))
