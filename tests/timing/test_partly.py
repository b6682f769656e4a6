"""Seconds of a model of which a part is trained: what is not asked for is not run."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.calibration.host import host_bytes_per_s
from ullage.engines.base import context_of
from ullage.engines.registry import ranks_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.model.count import flops_per_token
from ullage.timing import states
from ullage.timing.machine import moved_s
from ullage.timing.offload import fetched_s
from ullage.timing.ops import block_work
from ullage.timing.optimizer import optimizer_s
from ullage.timing.partly import Trained
from ullage.timing.states import shard_numels
from ullage.timing.step import stages, step_time
from ullage.timing.work import Exchange

MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TOKENS = 2 * 512
LINEARS = 4 * 1024 * 1024 + 3 * 1024 * 2816


def _job(**keys: Any) -> Job:
    return read_job(
        {
            "schema": 1,
            "model": MODEL,
            "cluster": "1xH100-SXM-80GB",
            "engine": {"name": "single"},
            "precision": "bf16",
            "data": {"seq_len": 512, "micro_batch": 2},
            **keys,
        }
    )


def _matmul_flops(job: Job, layer: int) -> tuple[int, int]:
    """Of one layer, forward and backward."""
    graph = graph_of(job)
    block = [one for one in graph.blocks() if one.role == "layer"][layer]
    work = block_work(block, context_of(job, graph))
    return tuple(
        sum(one.flops for each in work for one in getattr(each, way).matmuls) for way in ("forward", "backward")
    )  # type: ignore[return-value]


def test_a_frozen_linear_has_no_gradient_of_its_weight() -> None:
    job = _job(lora={"rank": 8, "targets": ["q_proj", "v_proj"]})
    adapters = 2 * 2 * 8 * 1024  # weights of two adapters
    forward, backward = _matmul_flops(job, 1)
    assert forward == 2 * TOKENS * (LINEARS + adapters)
    assert backward == 2 * TOKENS * (LINEARS + 2 * adapters)


def test_nothing_before_the_first_adapter_has_a_gradient() -> None:
    """The first layer's input asks for none: what leads from it to the adapters' outputs is not run backwards."""
    job = _job(lora={"rank": 8, "targets": ["q_proj", "v_proj"]})
    adapters = 2 * 2 * 8 * 1024
    into_adapters = 2 * 8 * 1024  # A's own input's gradient
    frozen_inputs = 3 * 1024 * 1024  # q, k and v of the embedding's output
    _, backward = _matmul_flops(job, 0)
    assert backward == 2 * TOKENS * (LINEARS - frozen_inputs + 2 * adapters - into_adapters)


def test_an_adapter_in_fp32_multiplies_in_fp32_and_a_packed_weight_is_unpacked() -> None:
    def seconds(**lora: object) -> float:
        return step_time(_job(lora={"targets": "all-linear", **lora})).step_s

    assert seconds(dtype="fp32") > seconds(dtype="bf16")
    assert seconds(base="nf4", dtype="bf16") > seconds(dtype="bf16")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dora_multiplies_an_identity_through_its_adapters(dropout: float) -> None:
    """peft tuners/lora/dora.py, get_lora_weight: [in, in] through A and B, and with dropout the base once more, forward and dgrad."""
    lora = {"rank": 16, "targets": ["q_proj"], "dropout": dropout}
    without, with_it = (_job(lora={**lora, "dora": dora}) for dora in (False, True))
    hidden, tokens = int(MODEL["hidden_size"]), 512 * 2
    update = 2 * hidden * hidden * 16 + 2 * hidden * 16 * hidden
    base = 2 * tokens * hidden * hidden if dropout else 0
    both = zip(_matmul_flops(with_it, 1), _matmul_flops(without, 1), strict=True)
    forward, backward = (more - less for more, less in both)
    assert forward == update + base
    assert backward == base
    assert step_time(with_it).step_s > step_time(without).step_s


def test_a_trained_whole_takes_longer_and_counts_more() -> None:
    whole, adapted = _job(), _job(lora={"rank": 8, "dtype": "bf16"})
    assert step_time(adapted).step_s < 0.85 * step_time(whole).step_s
    weights = 4 * LINEARS + 8192 * 1024
    adapters = 4 * 2 * 2 * 8 * 1024
    attention = 4 * 6 * 2 * 1024 * 512
    assert flops_per_token(graph_of(whole), 512) == 6 * weights + attention
    assert flops_per_token(graph_of(adapted), 512) == 4 * weights + 6 * adapters + attention


def test_a_frozen_front_is_timed_too() -> None:
    assert step_time(_job(freeze=["model.layers.0.*", "*embed_tokens*"])).step_s < step_time(_job()).step_s


ADAPTERS = 4 * 2 * 8 * 1024 + 3 * 8 * (1024 + 2816)  # of a layer, rank 8 beside each linear
NORMS = 2 * 1024


def _sharded(engine: dict[str, Any], **keys: Any) -> Job:
    lora = {"rank": 8, "targets": "all-linear", **keys.pop("lora", {})}
    return _job(cluster="8xA100-SXM-80GB", layout={"dp": 8}, engine=engine, lora=lora, **keys)


def _layer(job: Job) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What is gathered of a layer, and what is reduced."""
    graph = graph_of(job)
    block = [one for one in graph.blocks() if one.role == "layer"][1]
    return states.gathers(job, graph, block), states.reduced(job, graph, block)


@pytest.mark.parametrize("engine", [{"name": "fsdp1"}, {"name": "fsdp2"}, {"name": "deepspeed", "zero_stage": 3}])
def test_all_is_gathered_and_adapters_alone_are_reduced(engine: dict[str, Any]) -> None:
    """Each parameter is sharded, whether it asks for a gradient or not; one without a gradient has nothing to reduce (torch
    _fsdp_param_group.py, post_backward; DeepSpeed stage3.py, create_reduce_and_remove_grad_hooks)."""
    gathers, reduced = _layer(_sharded(engine))
    assert [one.payload_bytes for one in gathers] == [2 * (LINEARS + NORMS + ADAPTERS)]
    assert [(one.kind, one.payload_bytes) for one in reduced] == [("reduce_scatter", 2 * ADAPTERS)]


def test_a_flat_parameter_has_a_gradient_as_a_whole() -> None:
    """Fabric's FSDP1, litgpt's, joins base and adapters of a layer: autograd makes gradients of all of them, which are reduced
    together, and the optimizer steps adapters (torch _flat_param.py, _use_unsharded_views)."""
    adapters = 2 * 2 * 8 * 1024  # of queries and values
    engine = {"name": "fsdp1", "options": {"use_orig_params": True}}
    job = _sharded(engine, stack="litgpt", lora={"dtype": "bf16", "targets": ["q_proj", "v_proj"]})
    (stage,) = stages(job, graph_of(job))
    layer = next(run.block for run in stage.rank.chunks[0].runs if run.block.role == "layer" and run.block.input.grad)
    (reduction,) = states.reduced(job, graph_of(job), layer)
    assert reduction.payload_bytes == 2 * (LINEARS + NORMS + adapters)
    backward = sum(one.flops for each in block_work(layer, stage.context) for one in each.backward.matmuls)
    assert backward == 2 * 2 * TOKENS * (LINEARS + adapters)
    assert stage.trained.numel(expert=False) == 4 * adapters


def test_replicas_of_shards_add_up_adapters_alone() -> None:
    _, reduced = _layer(_sharded({"name": "fsdp2", "shard_group": 4}))
    assert [(one.kind, one.payload_bytes) for one in reduced] == [
        ("reduce_scatter", 2 * ADAPTERS),
        ("all_reduce", 2 * ADAPTERS // 4),
    ]


def test_what_is_all_frozen_is_gathered_and_never_reduced() -> None:
    job = _sharded({"name": "fsdp2"})
    graph = graph_of(job)
    (head,) = (one for one in graph.blocks() if one.role == "head")
    assert states.gathers(job, graph, head)
    assert states.reduced(job, graph, head) == ()


@pytest.mark.parametrize(
    ("stack", "storage", "a_weight"),
    [
        ("transformers", "bf16", 1 / 2),
        ("transformers", "uint8", 0),  # accelerate leaves bytes out of FSDP2 (utils/fsdp_utils.py, fsdp2_prepare_model)
        (
            "torchtune",
            None,
            1 / 2 + 1 / 64 + 2 / (64 * 256),
        ),  # with the scales (torchao nf4_tensor.py, fsdp_pre_all_gather)
    ],
)
def test_packed_weights_are_gathered_packed(stack: str, storage: str | None, a_weight: float) -> None:
    options = {"bnb_4bit_quant_storage": storage} if storage else {}
    job = _sharded({"name": "fsdp2", "options": options}, stack=stack, lora={"base": "nf4-double"})
    (gather,), (reduction,) = _layer(job)
    assert gather.payload_bytes == a_weight * LINEARS + 2 * (NORMS + ADAPTERS)
    assert reduction.payload_bytes == 2 * ADAPTERS


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_what_they_stepped(stage: int) -> None:
    """The flat groups are made of parameters that ask for gradients (DeepSpeed stage_1_and_2.py, trainable_parameters)."""
    job = _sharded({"name": "deepspeed", "zero_stage": stage})
    (stepped,) = stages(job, graph_of(job))
    sent = [(one.kind, one.payload_bytes) for one, _, _ in stepped.replicas()]
    assert sent == [("reduce_scatter", 2 * 4 * ADAPTERS), ("all_gather", 2 * 4 * ADAPTERS)]


def test_megatron_gathers_and_clears_adapters_alone() -> None:
    """Its buffers hold parameters that ask for gradients (Core distributed/distributed_data_parallel.py)."""
    lora = {"rank": 8, "targets": ["linear_proj", "linear_fc2"]}
    engine = {"name": "megatron", "zero_stage": 1}
    job = _job(cluster="8xA100-SXM-80GB", layout={"dp": 8}, engine=engine, lora=lora)
    (stepped,) = stages(job, graph_of(job))
    gathered = [one.payload_bytes for one, _, _ in stepped.replicas() if one.kind == "all_gather"]
    assert gathered == [2 * 4 * 8 * (2 * 1024 + 1024 + 2816)]


def test_adapters_are_stepped_in_their_own_type() -> None:
    """AdamW in fp32: the gradient read, the weight and both moments read and written."""
    job = _sharded(
        {"name": "fsdp2"}, optimizer={"name": "adamw", "impl": "fused"}, lora={"dtype": "fp32"}, grad_clip=False
    )
    held = Trained(rank=ranks_of(job, graph_of(job))[0])
    moved = 4 * ADAPTERS / 8 * (4 + 2 * 4 + 2 * 2 * 4)
    assert optimizer_s(job, held) == pytest.approx(moved_s(job.cluster.device, moved, "optimizer"))


def test_from_the_host_comes_the_base_as_it_is_kept() -> None:
    offload = {"optimizer": "cpu", "params": "cpu"}
    job = _sharded({"name": "fsdp2"}, lora={"dtype": "fp32"}, offload=offload)
    (stage,) = stages(job, graph_of(job))
    layer = next(one.block for one in stage.elements[0] if one.block.role == "layer")
    numels = {one: stage.graph.numel(one) / 8 for one in layer.params if not one.buffer}
    weights, adapters = (sum(n for one, n in numels.items() if one.trainable is trained) for trained in (False, True))
    assert shard_numels(job, stage.graph, layer) == pytest.approx((adapters, 2 * weights))
    link = host_bytes_per_s(job.cluster.device, "h2d").value
    assert fetched_s(job, adapters, 2 * weights, both=False) == pytest.approx((4 * adapters + 2 * weights) / link)


@pytest.mark.parametrize(
    "engine", [{"name": "fsdp2"}, {"name": "fsdp2", "zero_stage": 2}, {"name": "deepspeed", "zero_stage": 3}]
)
def test_a_sharded_step_of_adapters_is_shorter_than_one_of_all(engine: dict[str, Any]) -> None:
    whole = _job(cluster="8xA100-SXM-80GB", layout={"dp": 8}, engine=engine)
    adapted = _sharded(engine, lora={"targets": ["q_proj", "v_proj"], "dtype": "bf16"})
    assert step_time(adapted).step_s < step_time(whole).step_s


@pytest.mark.parametrize(
    "keys", [{"engine": {"name": "zero1"}, "cluster": "2xH100-SXM-80GB"}, {"lora": {"base": "int8"}}]
)
def test_what_is_not_timed_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="is not timed"):
        step_time(_job(**{"lora": {}, **keys}))
