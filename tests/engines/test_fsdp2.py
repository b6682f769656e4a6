"""FSDP2 against a traced reference: four blocks of P = 131,072 elements, a root of P / 4, eight ranks, fp32 shards, bf16 compute.

The figures were measured by tracing storage lifetimes of torch 2.13's fully_shard under its fake process group, in units of P bytes; the
tokens were few, so activations are the fraction by which a figure may differ.
"""

from __future__ import annotations

from collections import Counter

import pytest

import ullage
from ullage.engines.base import Account
from ullage.engines.estimate import Estimate
from ullage.engines.fsdp2.accounting import account
from ullage.engines.fsdp2.units import Shape
from ullage.errors import Unsupported
from ullage.frozen import FrozenMap
from ullage.hardware.catalogue import device
from ullage.hardware.cluster import Cluster
from ullage.job.adapted import graph_of
from ullage.job.job import Data, Engine, Job, Layout, Optimizer, Precision
from ullage.memory.program import Sequence, events, locate_peak
from ullage.memory.rank import ranks
from ullage.model.config import ModelConfig
from ullage.model.graph import BATCH, SEQ, STREAM, Block, Graph, Op, Param, Run, Tensor

P = 131_072
HIDDEN, FFN, BLOCKS, SHARDS = 128, 512, 4, 8
ACTIVATIONS = 0.35  # of P bytes: what the reference's own activations and temporaries came to
BF16_MIXED = Precision(params="fp32", compute="bf16", grads="bf16", master="fp32", reduce="fp32")
OLD_TITAN = "2025-01-01"  # embedding and head in the root, as in the reference


def _linear(name: str, source: str, result: Tensor, out: str, inner: str) -> Op:
    return Op(
        name=name,
        kind="linear",
        inputs=(source,),
        outputs=(result,),
        params=(Param(name=f"{name}.weight", dims=(out, inner)),),
        attrs=FrozenMap(
            {"parallel": "replicated", "group": "", "fused": False, "bias": False, "out": (out,), "in": (inner,)}
        ),
    )


def reference() -> Graph:
    ids = Tensor(name="ids", dims=(BATCH, SEQ), elements="int64")
    x, y = Tensor(name="x", dims=STREAM), Tensor(name="y", dims=STREAM)
    up, act = Tensor(name="up", dims=(BATCH, SEQ, "ffn")), Tensor(name="act", dims=(BATCH, SEQ, "ffn"))
    embed = Op(
        name="embed",
        kind="embedding",
        inputs=(),
        outputs=(x,),
        params=(Param(name="embed.weight", dims=("vocab", "hidden")),),
        attrs=FrozenMap({"positions": False, "token_types": False}),
    )
    activation = Op(
        name="act",
        kind="activation",
        inputs=("up",),
        outputs=(act,),
        attrs=FrozenMap({"act": "relu", "form": "relu", "glu": False, "bias": False}),
    )
    block = (_linear("w1", "x", up, "ffn", "hidden"), activation, _linear("w2", "act", y, "hidden", "ffn"))
    logits = Tensor(name="logits", dims=(BATCH, SEQ, "vocab"))
    loss = Tensor(name="loss", dims=(1,), elements="fp32")
    head = (
        _linear("lm_head", "x", logits, "vocab", "hidden"),
        Op(name="loss", kind="loss", inputs=("logits",), outputs=(loss,), attrs=FrozenMap({"softcap": False})),
    )
    sizes = {"hidden": HIDDEN, "ffn": FFN, "vocab": HIDDEN, "heads": 1, "kv_heads": 1}
    return Graph(
        name="reference",
        runs=(
            Run(block=Block(name="embedding", ops=(embed,), input=ids, output=x, role="embedding")),
            Run(block=Block(name="layer", ops=block, input=x, output=y), repeat=BLOCKS),
            Run(block=Block(name="head", ops=head, input=x, output=loss, role="head")),
        ),
        sizes=FrozenMap(sizes),
    )


def run(
    *,
    reshard: object = "always",
    precision: Precision = BF16_MIXED,
    shard_group: int | None = None,
    grad_accum: int = 1,
    stack: str = "torchtitan",
    impl: str = "fused",
    options: dict[str, object] | None = None,
    engine: str = "fsdp2",
) -> Account:
    graph = reference()
    layout = Layout(dp=SHARDS)
    job = Job(
        model=ModelConfig(name="reference", keys=FrozenMap({})),
        cluster=Cluster(device=device("H100-SXM-80GB"), gpus_per_node=8),
        data=Data(seq_len=8, grad_accum=grad_accum),
        layout=layout,
        engine=Engine(
            name=engine,  # type: ignore[arg-type]
            zero_stage=3,
            shard_group=shard_group,
            options=FrozenMap({"reshard_after_forward": reshard, **(options or {})}),
        ),
        precision=precision,
        stack=stack,
        stack_version=OLD_TITAN if stack == "torchtitan" else None,
        optimizer=Optimizer(impl=impl, state=precision.params),  # type: ignore[arg-type]
        grad_clip=False,
    )
    return account(job, graph, ranks(graph, layout)[0])


def _units(n_bytes: float) -> float:
    return n_bytes / P


def _without_workspace(answer: Account) -> int:
    """Bytes of the static items that the reference has too: parameters and moments."""
    return sum(item.bytes * count for item, count in answer.static if item.category in ("parameters", "optimizer"))


def peak(answer: Account) -> float:
    return _units(_without_workspace(answer) + answer.step.peak_bytes)


def live(answer: Account) -> Counter[str]:
    """Units of P bytes at the peak, by category."""
    totals: Counter[str] = Counter()
    for item, count in locate_peak(answer.program).live.items():
        totals[item.category] += item.bytes * count
    return Counter({category: _units(total) for category, total in totals.items()})


def test_states_are_shards_and_two_moments() -> None:
    step_counters = 0.04  # 512 B for each parameter: fused AdamW keeps them on the device
    assert _units(_without_workspace(run())) == pytest.approx(2.125 + 4.25 + step_counters, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ({}, 18.31),
        ({"reshard": "never"}, 19.88),
        ({"reshard": 2}, 19.88),
        ({"precision": Precision(params="fp32", compute="bf16", grads="bf16", master="fp32", reduce="bf16")}, 16.31),
        ({"precision": Precision(params="bf16", compute="bf16", grads="bf16", master=None, reduce="bf16")}, 12.63),
        ({"precision": Precision(params="bf16", compute="bf16", grads="bf16", master=None, reduce="fp32")}, 14.63),
        ({"shard_group": 4}, 25.69),
        ({"grad_accum": 2}, 19.50),
        ({"grad_accum": 3, "stack": "transformers"}, 30.88),
    ],
)
def test_peak_of_a_step(settings: dict[str, object], measured: float) -> None:
    if settings.get("stack") == "transformers":
        pytest.importorskip("ullage.kernels.transformers")
    assert peak(run(**settings)) == pytest.approx(measured, abs=ACTIVATIONS)  # type: ignore[arg-type]


def test_what_is_live_at_the_peak() -> None:
    found = live(run())
    assert found["communication"] == pytest.approx(4.0)  # the reduce-scatter input of the block behind
    assert found["gathered"] == pytest.approx(0.5 + 2.0 + 2.0)  # root, this block, the next one's all-gather
    assert found["gradients"] == pytest.approx(1.0 + 2.0 + 0.25)  # two sharded blocks, this one's, the head's


def test_optimizer_temporaries() -> None:
    static = _units(_without_workspace(run()))
    step = run(impl="foreach").step
    assert isinstance(step, Sequence)
    optimizer = step.children[1]
    assert static + 2.125 + _units(optimizer.peak_bytes) == pytest.approx(10.63, abs=0.05)
    step = run(impl="for-loop").step
    assert isinstance(step, Sequence)
    assert _units(step.children[1].peak_bytes) == pytest.approx(0.75, abs=0.01)


def test_a_step_leaves_nothing_behind() -> None:
    for settings in ({}, {"reshard": "never"}, {"reshard": 2}, {"grad_accum": 3}, {"shard_group": 2}):
        assert run(**settings).step.delta_bytes == 0


def test_each_parameter_is_padded_for_itself() -> None:
    """10 x 256 over 8 ranks: two rows on every rank; 1 x 4096: a whole row on every rank."""
    assert Shape(name="w", rows=10, columns=256, shards=8).padded == 512
    assert Shape(name="b", rows=1, columns=4096, shards=8).padded == 4096


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ({}, 16.72),
        ({"reshard": "never"}, 19.84),
        ({"precision": Precision(params="fp32", compute="fp32", grads="fp32", master="fp32", reduce="fp32")}, 25.06),
        ({"grad_accum": 2, "stack": "transformers"}, 24.34),
    ],
)
def test_fsdp1(settings: dict[str, object], measured: float) -> None:
    """One flat parameter a unit: gathered in place, its gradient joined from those of its parts, cast, reduced."""
    assert peak(run(engine="fsdp1", **settings)) == pytest.approx(measured, abs=2 * ACTIVATIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_tied_weight_is_one_part_of_fsdp1s_flat_gradient(strategy: str) -> None:
    """Both of its uses' gradients go into the root's flat one: with the head's own weight the root has as much more of everything."""
    job = {"model": "gpt2", "cluster": "4xA100-SXM-40GB", "data": {"seq_len": 256}}
    engine = {"name": "fsdp1", "options": {"sharding_strategy": strategy}}
    tied = ullage.estimate(ullage.read_job({**job, "engine": engine}))
    apart = ullage.estimate(
        ullage.read_job({**job, "model": {"base": "gpt2", "tie_word_embeddings": False}, "engine": engine})
    )
    assert tied.peak.allocated_bytes < apart.peak.allocated_bytes


ALL_POWERS = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(("precision", "bytes_per_parameter"), [("bf16-mixed", 4 + 4 + 8), ("bf16", 2 + 2 + 4)])
def test_host_memory_under_offload(precision: str, bytes_per_parameter: int) -> None:
    """Shards, their gradients and the two moments; a pinned block is a power of two, as every shard of this model is."""

    def of(**changed: int) -> tuple[int, int]:
        found = ullage.estimate(
            ullage.read_job(
                {
                    "model": {**ALL_POWERS, **changed},
                    "cluster": "4xA100-SXM-80GB",
                    "engine": {"name": "fsdp2"},
                    "precision": precision,
                    "offload": {"optimizer": "cpu", "params": "cpu"},
                    "data": {"seq_len": 512},
                }
            )
        )
        return found.host_bytes, found.parameters

    host, parameters = of()
    assert host == pytest.approx(bytes_per_parameter * parameters, rel=1e-3)
    wider, more = of(
        intermediate_size=4096 + 4
    )  # three matrices of each layer just above a power of two: twice as much, pinned
    pinned = bytes_per_parameter // 2 * 2 * 3 * 4096 * 1024
    assert wider == pytest.approx(host + bytes_per_parameter * (more - parameters) + pinned, rel=1e-2)


def on_host(**keys: object) -> Estimate:
    job = {
        "model": ALL_POWERS,
        "cluster": "4xA100-SXM-80GB",
        "engine": {"name": "fsdp2"},
        "precision": "bf16-mixed",
        "data": {"seq_len": 512, "grad_accum": 2},
        "recompute": "full",
        **keys,
    }
    return ullage.estimate(ullage.read_job(job))


def test_gradients_of_shards_on_the_host_go_there_one_group_after_the_other() -> None:
    """_fsdp_collectives.py, foreach_reduce: nothing on the device names them once they are copied."""
    job = ullage.read_job(
        {
            "model": ALL_POWERS,
            "cluster": "4xA100-SXM-80GB",
            "engine": {"name": "fsdp2", "options": {"sync_each_batch": True}},
            "precision": "bf16-mixed",
            "data": {"seq_len": 512, "grad_accum": 2},
            "offload": {"optimizer": "cpu", "params": "cpu"},
        }
    )
    model = graph_of(job)
    (rank,) = ranks(model, job.layout)
    live, most, largest = 0, 0, 0
    for event in events(account(job, model, rank).program):
        if event.item.what.startswith("sharded gradients"):
            live += event.item.bytes if event.alive else -event.item.bytes
            most, largest = max(most, live), max(largest, event.item.bytes)
    assert (live, most) == (0, largest)


@pytest.mark.parametrize(("version", "each"), [("4.55", True), ("4.56", True), ("4.57", False), (None, False)])
def test_accelerate_once_reduced_each_micro_batch(version: str | None, each: bool) -> None:
    """no_sync did nothing under FSDP2 before accelerate 1.11."""
    default = on_host(stack_version=version).peak.allocated_bytes
    synced = on_host(stack_version=version, engine={"name": "fsdp2", "options": {"sync_each_batch": True}})
    assert (default == synced.peak.allocated_bytes) is each


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_inputs_of_checkpoints_wait_on_the_host(engine: str) -> None:
    deep: dict[str, object] = {
        "model": {**ALL_POWERS, "num_hidden_layers": 16},
        "engine": {"name": engine},
        "data": {"seq_len": 4096},
        "precision": "bf16",
    }
    kept, gone = on_host(**deep), on_host(**deep, offload={"activations": "cpu"})
    stream = 4096 * 1024 * 2
    assert gone.host_bytes - kept.host_bytes == 16 * stream * 4  # of each rank of the node
    freed = kept.peak.allocated_bytes - gone.peak.allocated_bytes
    assert 12 * stream <= freed <= 16 * stream


def test_inputs_that_a_pipeline_keeps_are_not_taken_for_gone() -> None:
    with pytest.raises(Unsupported, match="not modelled in a pipeline"):
        on_host(layout={"dp": 2, "pp": 2}, offload={"activations": "cpu"})


def test_a_frozen_base_on_the_host_has_its_own_type() -> None:
    """Adapters in another type are all that differs: each shard and its gradient pinned, both moments not (16 and 8 KiB each)."""
    model = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 1,
        "vocab_size": 8192,
    }

    def host_bytes(dtype: str) -> int:
        job = {
            "schema": 1,
            "model": model,
            "cluster": "2xH100-SXM-80GB",
            "engine": {"name": "fsdp2"},
            "data": {"seq_len": 64},
            "precision": "bf16",
            "offload": {"optimizer": "cpu", "params": "cpu"},
            "lora": {"rank": 8, "targets": ["q_proj", "v_proj"], "dtype": dtype},
        }
        return ullage.estimate(ullage.read_job(job)).host_bytes

    shards, ranks_of_a_node = 4, 2
    assert host_bytes("fp32") - host_bytes("bf16") == ranks_of_a_node * shards * (2 + 2) * (16 - 8) * 1024


def test_fsdp1_on_the_host_has_its_reduced_gradients_until_the_backward_ends() -> None:
    """CPUOffload copies each reduced gradient to the host and keeps it, for another backward to add to (_runtime_utils.py,
    _accumulate_sharded_grad; deleted in _flat_param.py, prepare_gradient_for_optim); FSDP2 does not. Neither has weights or states here."""
    offload = {"params": "cpu", "optimizer": "cpu"}
    job = {"model": "llama-2-7b", "cluster": "4xA100-SXM-40GB", "offload": offload, "recompute": "full"}
    first, second = (
        ullage.estimate(
            ullage.read_job(
                {**job, "engine": {"name": name, "options": {"reduce_dtype": "fp32"}}, "data": {"seq_len": 2048}}
            )
        )
        for name in ("fsdp1", "fsdp2")
    )
    for found in (first, second):
        assert {line.category for line in found.ledger}.isdisjoint({"parameters", "optimizer"})
    layers = 31 * 202_383_360 * 4 / 4  # of 32, in fp32, over 4 ranks: the first is not reduced yet
    kept = [line for line in first.ledger if line.what.startswith("sharded gradients")]
    assert sum(line.bytes for line in kept) == pytest.approx(layers, rel=0.01)
    assert not [line for line in second.ledger if line.what.startswith("sharded gradients")]
    assert first.host_bytes == pytest.approx(16 * first.parameters, rel=0.2)  # pinned blocks are powers of two
