"""DeepSpeed against traced runs: eight square linears of 256 x 256 elements on two ranks, activations next to nothing.

The figures were measured by following every storage of deepspeed 0.19.8 and torch 2.13 on two CPU processes (the third step), in bytes per
parameter. gloo's reduce-scatter keeps one more copy of the bucket, which NCCL does not: it is taken off where stage 3 reduces (0.5).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ullage.engines.base import Account
from ullage.engines.deepspeed import split
from ullage.engines.deepspeed.accounting import account
from ullage.engines.deepspeed.partition import Flat
from ullage.engines.estimate import estimate
from ullage.engines.registry import ranks_of
from ullage.frozen import FrozenMap
from ullage.hardware.catalogue import device
from ullage.hardware.cluster import Cluster
from ullage.job.job import Data, Engine, Job, Layout, Offload, Optimizer, Precision
from ullage.job.read import read_job
from ullage.memory.program import Repeat, events, locate_peak
from ullage.memory.rank import ranks
from ullage.model.config import ModelConfig
from ullage.model.graph import BATCH, SEQ, STREAM, Block, Graph, Op, Param, Run, Tensor

HIDDEN, LAYERS = 256, 8
B = HIDDEN * HIDDEN  # elements of one linear
P = LAYERS * B
GLOO = 0.5
NOWHERE = Offload()
AFTER_THE_PASSES = {
    "overflow check",
    "gradient norm",
    "own gradients into fp32",
    "gradients into fp32",
    "optimizer step",
}


def net() -> Graph:
    ids = Tensor(name="ids", dims=(BATCH, SEQ), elements="int64")
    x, y = Tensor(name="x", dims=STREAM), Tensor(name="y", dims=STREAM)
    loss = Tensor(name="loss", dims=(1,), elements="fp32")
    embed = Op(
        name="embed",
        kind="embedding",
        inputs=(),
        outputs=(x,),
        attrs=FrozenMap({"positions": False, "token_types": False}),
    )
    linear = Op(
        name="w",
        kind="linear",
        inputs=("x",),
        outputs=(y,),
        params=(Param(name="w.weight", dims=("hidden", "hidden")),),
        attrs=FrozenMap(
            {
                "parallel": "replicated",
                "group": "",
                "fused": False,
                "bias": False,
                "out": ("hidden",),
                "in": ("hidden",),
            }
        ),
    )
    head = Op(name="loss", kind="loss", inputs=("x",), outputs=(loss,), attrs=FrozenMap({"softcap": False}))
    return Graph(
        name="net",
        runs=(
            Run(block=Block(name="embedding", ops=(embed,), input=ids, output=x, role="embedding")),
            Run(block=Block(name="layer", ops=(linear,), input=x, output=y), repeat=LAYERS),
            Run(block=Block(name="head", ops=(head,), input=x, output=loss, role="head")),
        ),
        sizes=FrozenMap({"hidden": HIDDEN, "vocab": 1, "heads": 1, "kv_heads": 1}),
    )


def make_job(
    stage: int,
    *,
    dp: int = 2,
    grad_accum: int = 1,
    impl: str = "foreach",
    params: str = "bf16",
    grads: str | None = None,
    offload: Offload = NOWHERE,
    **options: object,
) -> Job:
    reduce = str(options.get("communication_data_type", params))
    return Job(
        model=ModelConfig(name="net", keys=FrozenMap({})),
        cluster=Cluster(device=device("H100-SXM-80GB"), gpus_per_node=8),
        data=Data(seq_len=1, grad_accum=grad_accum),
        layout=Layout(dp=dp),
        engine=Engine(name="deepspeed", zero_stage=stage, options=FrozenMap(options)),
        precision=Precision(params=params, compute=params, grads=grads or params, master="fp32", reduce=reduce),
        stack="torchtitan",
        optimizer=Optimizer(impl=impl),  # type: ignore[arg-type]
        offload=offload,
    )


def run(stage: int, **how: object) -> Account:
    job = make_job(stage, **how)  # type: ignore[arg-type]
    (rank,) = ranks(net(), job.layout)
    return account(job, net(), rank)


def beside(found: Account) -> int:
    return sum(item.bytes * count for item, count in found.static if item.category in ("workspace", "input"))


def steady(found: Account) -> float:
    return (found.static_bytes - beside(found)) / P


def peak(found: Account) -> float:
    return (locate_peak(found.program).bytes - beside(found)) / P


def passes(found: Account) -> float:
    """The highest point of the forwards, backwards and reductions."""
    at = highest = found.static_bytes - beside(found)
    for child in found.step.children:  # type: ignore[attr-defined]
        if isinstance(child, Repeat) or getattr(child, "moment", None) in AFTER_THE_PASSES:
            break
        highest = max(highest, at + child.peak_bytes)
        at += child.delta_bytes
    return highest / P


SMALL = {"reduce_bucket_size": 2 * B}
THREE = {**SMALL, "stage3_param_persistence_threshold": 0}
AHEAD = {**THREE, "stage3_prefetch_bucket_size": 1}
RELEASED = {**AHEAD, "stage3_max_reuse_distance": 0}


@pytest.mark.parametrize(
    ("stage", "how", "between", "during", "highest"),
    [
        (0, {}, 14.0, 18.0, 24.0),
        (0, {"params": "fp32"}, 12.0, 20.0, 20.0),
        (1, SMALL, 8.0, 11.0, 12.0),
        (1, {**SMALL, "grad_accum": 2}, 8.0, 11.0, 12.0),
        (1, {**SMALL, "overlap_comm": True}, 8.0, 10.26, 12.0),
        (1, {"grads": "fp32"}, 12.0, 16.0, 16.0),
        (1, {"grads": "fp32", "impl": "fused", "grad_accum": 2, "immediate_grad_update": True}, 12.0, 14.0, 14.0),
        (2, SMALL, 8.0, 9.76, 12.0),
        (2, {**SMALL, "impl": "fused"}, 8.0, 9.76, 12.0),
        (2, {**SMALL, "impl": "for-loop"}, 8.0, 9.76, 14.0),
        (2, {**SMALL, "params": "fp16"}, 8.0, 9.76, 12.0),
        (2, {**SMALL, "grad_accum": 2}, 8.0, 10.76, 12.0),
        (2, {**SMALL, "round_robin_gradients": True}, 8.0, 10.26, 12.0),
        (2, {**SMALL, "communication_data_type": "fp32"}, 8.0, 10.76, 12.0),
        (2, {**SMALL, "grads": "fp32", "grad_accum": 2}, 8.0, 11.76, 12.0),
        (2, {"reduce_bucket_size": 6 * B}, 8.0, 11.26, 12.0),
        (2, {"reduce_bucket_size": 64 * B}, 8.0, 26.0, 26.0),
        (2, {"reduce_bucket_size": B // 2}, 8.0, 9.64, 12.0),
        (3, RELEASED, 8.5, 10.76 - GLOO, 12.5),
        (3, {**RELEASED, "impl": "fused"}, 8.5, 10.76 - GLOO, 11.5),
        (3, {**RELEASED, "sub_group_size": B}, 8.5, 10.76 - GLOO, 10.76 - GLOO),
        (3, {**RELEASED, "grads": "fp32", "grad_accum": 2}, 9.5, 11.76 - GLOO, 13.5),
        (3, {**RELEASED, "params": "fp32"}, 11.0, 15.52 - 2 * GLOO, 15.0),
        (3, AHEAD, 8.5, 11.26 - GLOO, 12.5),
        (3, {**THREE, "stage3_prefetch_bucket_size": 50_000_000}, 8.5, 12.52, 12.52),
        (3, SMALL, 10.5, 11.76 - GLOO, 12.5),
        (
            3,
            {
                **THREE,
                "stage3_prefetch_bucket_size": 2 * B,
                "stage3_max_live_parameters": 4 * B,
                "stage3_max_reuse_distance": 0,
            },
            8.5,
            10.76 - GLOO,
            12.5,
        ),
    ],
)
def test_bytes_per_parameter(stage: int, how: dict[str, object], between: float, during: float, highest: float) -> None:
    found = run(stage, **how)
    assert steady(found) == pytest.approx(between, abs=0.002)
    assert passes(found) == pytest.approx(during, rel=0.005)
    assert peak(found) == pytest.approx(highest, rel=0.005)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("grad_accum", [1, 2, 3])
def test_a_step_leaves_nothing_behind_and_replays_to_the_byte(stage: int, grad_accum: int) -> None:
    found = run(stage, grad_accum=grad_accum, reduce_bucket_size=3 * B)
    assert found.step.delta_bytes == 0
    live = highest = 0
    for event in events(found.program):
        live += event.item.bytes if event.alive else -event.item.bytes
        highest = max(highest, live)
    assert highest == locate_peak(found.program).bytes


def test_a_straddling_parameter_counts_whole_on_both_ranks() -> None:
    flat = Flat(numels=(100, 300, 100), shards=2)
    assert [flat.own(index).whole for index in range(2)] == [400, 400]
    assert flat.own(0).largest_slice == 150  # of partitions of 250
    padded = Flat(numels=(7,), shards=3)  # to 12: the third rank owns padding alone
    assert [padded.own(index).whole for index in range(3)] == [7, 7, 0]


def test_16_bit_masters_and_states_take_10_bytes_of_16() -> None:
    """DeepSpeed's own example (bf16_master_weights_and_grads, bf16_optimizer_states): 2 + 2 + 2 + 2 x 2 against 2 + 2 + 4 + 8."""
    job = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 0, "impl": "fused"}
    low = run(3, bf16_master_weights_and_grads=True, bf16_optimizer_states=True, **job)
    assert steady(run(3, **job)) * 2 == pytest.approx(16, abs=0.01)
    assert steady(low) * 2 == pytest.approx(10, abs=0.01)


@pytest.mark.parametrize(
    ("stage", "params", "bytes_per_parameter"), [(2, "none", 9.25), (3, "none", 9.0), (3, "cpu", 10.0)]
)
def test_host_memory_under_offload(stage: int, params: str, bytes_per_parameter: float) -> None:
    """18 P / N, and twice the largest parameter in stage 2; 20 P / N with parameters offloaded (pinned blocks being powers of two here)."""
    offload = Offload(optimizer="cpu", params=params)  # type: ignore[arg-type]
    found = run(stage, offload=offload, **THREE)
    assert found.host_bytes / P == pytest.approx(bytes_per_parameter, abs=0.01)
    assert steady(found) < 3  # weights or shards, and a bucket


@pytest.mark.parametrize(
    ("stage", "grads", "bytes_per_parameter"),
    [(1, "bf16", 2), (2, "bf16", 2), (3, "bf16", 2), (1, "fp32", 0)],
    ids=["stage 1", "stage 2", "stage 3", "BF16_Optimizer"],
)
def test_until_0_13_1_moments_were_made_by_a_step_on_zeros_before_the_first_forward(
    stage: int, grads: str, bytes_per_parameter: float
) -> None:
    """Its fp32 gradients are the partition's, P / 2 x 4 B, gone with it; BF16_Optimizer has them anyway."""

    def found(version: str) -> Account:
        return run(stage, grads=grads, impl="fused", deepspeed_version=version)

    old, new = found("0.13.1"), found("0.13.2")
    assert not old.late
    assert old.loading.delta_bytes == old.static_bytes
    assert (old.loading.peak_bytes - old.static_bytes) / P == pytest.approx(bytes_per_parameter, abs=0.001)
    assert {item.what for item in new.late} >= {"exp_avg", "exp_avg_sq"}
    assert new.loading.delta_bytes == new.static_bytes - sum(item.bytes for item in new.late)
    assert old.program.peak_bytes == new.program.peak_bytes


@pytest.mark.parametrize(("impl", "bytes_per_parameter"), [("fused", 4), ("foreach", 10)])
def test_without_zero_moments_are_made_by_a_step_on_zeros_still(impl: str, bytes_per_parameter: float) -> None:
    """FP16_Optimizer on fp32 gradients; FP16_UnfusedOptimizer on 16-bit ones beside, with what a foreach step makes (4 B)."""
    found = run(0, impl=impl)
    assert not found.late
    assert found.loading.delta_bytes == found.static_bytes
    assert (found.loading.peak_bytes - found.static_bytes) / P == pytest.approx(bytes_per_parameter, abs=0.001)


def test_the_modules_own_parameters_are_gone_once_they_are_flat() -> None:
    found = run(1, grads="fp32")  # BF16_Optimizer
    assert found.loading.peak_bytes == found.loading.delta_bytes
    loads = [child.delta_bytes / P for child in run(0).loading.children]  # type: ignore[attr-defined]
    assert loads[:5] == pytest.approx([2, 2, 2, -2, -2])  # FP16_Optimizer flattens copies of them


def test_more_ranks_never_hold_more() -> None:
    for stage in (1, 2, 3):
        sizes = [steady(run(stage, dp=dp, **THREE)) for dp in (1, 2, 4, 8)]
        assert sizes == sorted(sizes, reverse=True)


def test_stages_are_filled_from_the_front() -> None:
    """78 layers on 12 stages: the last has one (the remark of the run that did it)."""
    assert split.balanced(78, 12) == [7] * 11 + [1]
    assert split.balanced(72, 12) == [6] * 12


def test_embedding_and_head_count_as_layers_where_the_method_says_so() -> None:
    job = replace(make_job(1, partition_method="type:transformer|embedding"), layout=Layout(dp=1, pp=5))
    assert [rank.chunks[0].layers for rank in ranks_of(job, net())] == [1, 2, 2, 2, 1]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_of_a_tied_embedding_only_the_shared_weight_is_added_to(stage: int, overlap: bool) -> None:
    """Learned positions beside it have a gradient of their own: what is freed in a step was allocated in it."""
    job = read_job(
        {
            "schema": 1,
            "model": {
                "model_type": "gpt2",
                "n_embd": 64,
                "n_layer": 2,
                "n_head": 4,
                "vocab_size": 512,
                "n_positions": 4096,
            },
            "cluster": "2xH100-SXM-80GB",
            "engine": {"name": "deepspeed", "zero_stage": stage, "options": {"overlap_comm": overlap}},
            "data": {"seq_len": 32, "grad_accum": 2},
            "precision": "fp16-mixed",
        }
    )
    peak = estimate(job).peak  # plays the step on an allocator, which refuses to free what is not there
    assert peak.reserved_bytes >= peak.allocated_bytes > 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_tied_embedding_beside_adapters_is_frozen_and_has_no_gradient(stage: int) -> None:
    """What a weight that is not tied has more is that weight, whole on every rank."""
    vocab, hidden = 512, 64

    def allocated(tied: bool) -> int:
        model = {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
        }
        job = {
            "schema": 1,
            "model": model,
            "cluster": "2xH100-SXM-80GB",
            "engine": {"name": "deepspeed", "zero_stage": stage},
            "data": {"seq_len": 32},
            "precision": "bf16-mixed",
            "lora": {"rank": 4},
        }
        return estimate(read_job(job)).peak.allocated_bytes

    assert allocated(tied=False) - allocated(tied=True) == 2 * vocab * hidden
