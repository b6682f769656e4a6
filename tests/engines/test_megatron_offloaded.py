"""Layers whose activations wait on the host, by the rule that TransformerEngine's cpu_offload.py tells in its DefaultOffloadSynchronizer:
of layers that each save T, (layers - offloaded) x T is on the device at most.
"""

import pytest

from ullage.api import estimate
from ullage.calibration.host import host_bytes_per_s
from ullage.engines.base import context_of, pinned
from ullage.engines.megatron.offloaded import stash
from ullage.engines.registry import account, ranks_of
from ullage.errors import Infeasible, Unsupported
from ullage.hardware.catalogue import device
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.memory.chunk import Element, Replayer
from ullage.timing.offload import left_s

LAYERS = 16
CARD = "GB200-192GB"


def job(count: int, **options: object) -> dict:
    return {
        "model": {"base": "llama-3.1-8b", "num_hidden_layers": LAYERS},
        "cluster": f"4x{CARD}",
        "data": {"seq_len": 8192, "micro_batch": 2},
        "stack": "megatron",
        "engine": {"name": "megatron", "options": {"cpu_offloading_num_layers": count, **options}},
        "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
        "loss": "vocab-parallel-fused",
        "offload": {"activations": "cpu" if count else "none"},
    }


def found(read: Job):
    graph = graph_of(read)
    (rank,) = ranks_of(read, graph)
    (block,) = [run.block for run in graph.runs if run.block.role == "layer"]
    replayer = Replayer(context=context_of(read, graph), recompute=read.recompute, early_stop=False, reentrant=True)
    return account(read, graph, rank), block, replayer


@pytest.mark.parametrize("count", [1, LAYERS // 2, LAYERS - 4])
def test_as_many_layers_stay_as_are_not_offloaded(count: int) -> None:
    away, block, replayer = found(read_job(job(count)))
    layer = sum(item.bytes * many for item, many in stash(block, replayer))
    whole, _, _ = found(read_job(job(0)))
    assert whole.step.peak_bytes - away.step.peak_bytes == count * layer
    assert away.step.delta_bytes == 0


def test_what_goes() -> None:
    """Of a layer of llama in bf16, in units of its input: input, q, k and v after rotary embedding (1 + 2 / 4), attention's output, two
    normed inputs of matmuls and the residual between, gate with up and their product (2 x 3.5 and 3.5); beside them attention's statistics,
    one fp32 number a head and token (half a million; a quarter stays), but no norm's."""
    _, block, replayer = found(read_job(job(1)))
    sizes = {item.what: item.bytes * many for item, many in stash(block, replayer)}
    unit = 2 * 8192 * 4096 * 2
    assert sum(sizes.values()) == (1 + 1 + 2 * 0.25 + 1 + 2 + 1 + 7 + 3.5) * unit + 4 * 32 * 2 * 8192
    assert not any("statistics" in what for what in sizes)


def test_each_tensor_has_a_pinned_block_on_the_host() -> None:
    away, block, replayer = found(read_job(job(5)))
    assert away.host_bytes == 5 * sum(pinned(item.bytes) * many for item, many in stash(block, replayer))
    assert found(read_job(job(0)))[0].host_bytes == 0


def test_copies_have_as_long_as_the_layers_take() -> None:
    read = read_job(job(4))
    _, block, replayer = found(read)
    layer = sum(item.bytes * many for item, many in stash(block, replayer))
    expected = layer * 4 / LAYERS / host_bytes_per_s(device(CARD), "d2h").value
    assert left_s(read, replayer.context, Element(block=block)) == pytest.approx(expected)


@pytest.mark.parametrize("off", ["cpu_offloading", "cpu_offloading_activations"])
def test_a_switch_that_is_off_offloads_nothing(off: str) -> None:
    away, _, _ = found(read_job(job(4, **{off: False})))
    whole, _, _ = found(read_job(job(0)))
    assert away.step.peak_bytes == whole.step.peak_bytes


@pytest.mark.parametrize(
    ("count", "change", "error"),
    [
        (LAYERS, {}, Infeasible),
        (4, {"layout": {"dp": 2, "pp": 2}}, Infeasible),
        (4, {"recompute": "full"}, Infeasible),
    ],
)
def test_what_megatron_refuses(count: int, change: dict, error: type[Exception]) -> None:
    """transformer_config.py: layers less than all, no pipeline, no recomputation."""
    with pytest.raises(error, match="cpu_offloading_num_layers"):
        estimate(read_job(job(count) | change))


def test_weights_on_the_host_are_not_modelled() -> None:
    with pytest.raises(Unsupported, match="cpu_offloading_weights"):
        estimate(read_job(job(4, cpu_offloading_weights=True)))


@pytest.mark.parametrize(("card", "layers"), [("GB200-192GB", 40), ("GB300-288GB", 20)])
def test_recipes_fit_with_it_alone(card: str, layers: int) -> None:
    """NVIDIA-NeMo/Megatron-Bridge@067f987 docs/performance-summary-archive.md: Llama 3 70B in fp8 on 64 of these under Megatron-FSDP, two
    sequences of 8192. Without it a rank needs 323 GiB."""

    def reserved(count: int) -> tuple[int, int]:
        options = {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "gradient_accumulation_fusion": False,
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "te",
        }
        said = job(count, **options) | {"model": "llama-3.1-70b", "cluster": f"16x4x{card}"}
        said["precision"] = {
            **said["precision"],
            "compute": "fp8",
            "grads": "bf16",
            "reduce": "bf16",
            "fp8_params": True,
        }
        answer = estimate(read_job(said))
        return answer.peak.reserved_bytes, answer.capacity_bytes

    used, capacity = reserved(layers)
    assert used < capacity < reserved(0)[0]


@pytest.mark.parametrize(("layout", "in_flight"), [({"dp": 4}, (LAYERS,)), ({"dp": 2, "pp": 2}, (LAYERS, LAYERS // 2))])
def test_fine_grained_buffers_on_the_host(layout: dict, in_flight: tuple[int, ...]) -> None:
    """Of attention: q, k, v and its output, a pinned buffer each, of every layer that is in flight: two micro-batches of half the layers
    on the first rank of a pipeline of two, one on the last."""
    options = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    said = job(0, **options) | {"layout": layout, "data": {"seq_len": 8192, "micro_batch": 1, "grad_accum": 4}}
    read = read_job(said | {"offload": {"activations": "cpu"}})
    graph = graph_of(read)
    each = 2 * 8192 * (4096 + 1024 + 1024 + 4096)
    assert tuple(account(read, graph, rank).host_bytes for rank in ranks_of(read, graph)) == tuple(
        layers * each for layers in in_flight
    )
