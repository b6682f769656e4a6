"""--optimizer-cpu-offload, by what Megatron-Core's optimizer/cpu_offloading/hybrid_optimizer.py does, and against Megatron-Bridge's ladder.

The ladder: NVIDIA-NeMo/Megatron-Bridge@067f987 skills/nemo-mbridge-perf-cpu-offloading/card.yaml, Qwen3-30B-A3B on two nodes of 8 H100.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ullage.api import estimate
from ullage.calibration.host import host_bytes_per_s, thread_elements_per_s
from ullage.engines.base import pinned
from ullage.engines.megatron.hybrid import going
from ullage.engines.registry import account, ranks_of
from ullage.errors import Unsupported
from ullage.formats.convert import read_whole, write_job
from ullage.formats.registry import format_named
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.step import step_time

RECORD = json.loads((Path(__file__).parent / "data" / "qwen3_cpu_offload.json").read_text())
LADDER = ((0.0, 47.2, 0.996), (0.25, 43.4, 1.871), (0.5, 39.6, 2.484), (0.75, 35.6, 3.187), (1.0, 32.0, 4.189))
"""Fraction offloaded, GB allocated, seconds a step."""
STEPPED = 1.9074e9
"""Elements of a rank's shards: 29.0e9 of experts over 16 GPUs (pp 2, ep 4, two replicas) and 0.38e9 of the rest over its 4."""


def ladder(fraction: float, **options: object) -> dict:
    engine = RECORD["engine"]
    own = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction} if fraction else {}
    return RECORD | {
        "engine": engine | {"options": engine["options"] | own | options},
        "offload": {"optimizer": "cpu" if fraction else "none"},
    }


def job(
    fraction: float | None = 1.0, *, dp: int = 2, grads: str = "fp32", state: str = "fp32", **options: object
) -> dict:
    """Of two layers of a llama, with a distributed optimizer."""
    said = {} if fraction is None else {"optimizer_offload_fraction": fraction}
    return {
        "model": {"base": "llama-3.1-8b", "num_hidden_layers": 2},
        "cluster": f"{dp}xH100-SXM-80GB",
        "data": {"seq_len": 1024},
        "engine": {"name": "megatron", "zero_stage": 1, "options": {**said, **options}},
        "precision": {"params": "bf16", "compute": "bf16", "grads": grads, "master": "fp32", "reduce": grads},
        "optimizer": {"name": "adamw", "state": state},
        "loss": "vocab-parallel",
        "offload": {"optimizer": "cpu"},
    }


def on_the_gpu(document: dict) -> dict[str, int]:
    """Bytes of its optimizer's and its gradients' lines."""
    read = read_job(document)
    graph = graph_of(read)
    (rank,) = ranks_of(read, graph)
    static = account(read, graph, rank).static
    return {item.what: item.bytes * count for item, count in static if item.category in ("optimizer", "gradients")}


def host_bytes(document: dict) -> int:
    """Of one rank."""
    read = read_job(document)
    return estimate(read).host_bytes // read.cluster.gpus_per_node


def test_parameters_go_one_after_another_until_the_fraction_has() -> None:
    assert [going([4, 4, 2], share) for share in (0.0, 0.1, 0.4, 0.41, 1.0)] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("fraction", [one for one, _, _ in LADDER[1:]])
def test_a_gpu_keeps_less_by_the_moments_as_it_was_measured(fraction: float) -> None:
    """Main parameters stay: 8 of 12 bytes an element go. Measured in all 15.2 GB of them."""
    (_, whole, _), measured = LADDER[0], {one: gb for one, gb, _ in LADDER}[fraction]
    most = [max(rank.allocated_bytes for rank in estimate(read_job(ladder(one))).ranks) for one in (0.0, fraction)]
    freed = (most[0] - most[1]) / 1e9
    assert freed == pytest.approx(fraction * 8 * STEPPED / 1e9, rel=0.02)
    assert freed == pytest.approx(whole - measured, abs=0.3)


@pytest.mark.parametrize(("fraction", "measured_s"), [(one, step_s) for one, _, step_s in LADDER])
def test_a_step_takes_as_long_as_it_was_measured(fraction: float, measured_s: float) -> None:
    """torchrun gives each rank one thread: 0.66e9 elements a second; and the PCIe link both ways, 4 bytes an element."""
    told = step_time(read_job(ladder(fraction)))
    assert told.step_s == pytest.approx(measured_s, rel=0.1)
    if fraction == 1.0:
        gpu = read_job(ladder(fraction)).cluster.device
        stepped_s = STEPPED / thread_elements_per_s("fused").value
        copied_s = sum(4 * STEPPED / host_bytes_per_s(gpu, way).value for way in ("h2d", "d2h"))
        parts = dict(told.parts)
        assert parts["optimizer"] == pytest.approx(stepped_s, rel=0.01)
        assert parts["offload"] == pytest.approx(copied_s, rel=0.01)


def test_overlapped_copies_hide_behind_the_steps() -> None:
    plain, overlapped = (step_time(read_job(ladder(1.0, overlap_cpu_optimizer_d2h_h2d=on))) for on in (False, True))
    assert plain.step_s - overlapped.step_s == pytest.approx(dict(plain.parts)["offload"], rel=0.01)


def test_the_command_lines_default_takes_all_and_the_precision_aware_optimizer_takes_the_main_parameters_too() -> None:
    plain, aware = on_the_gpu(job(None)), on_the_gpu(job(None, use_precision_aware_optimizer=True))
    assert set(plain) == {"main gradients (dense)", "main parameters (dense)"} | {
        one for one in plain if "dummy" in one
    }
    assert set(plain) - set(aware) == {"main parameters (dense)"}


def test_16_bit_gradients_of_what_is_stepped_here_are_copied_and_stay() -> None:
    """grad.to(fp32) is another tensor where gradients are not fp32, and zero_grad knows the 16-bit parameters alone."""
    most = on_the_gpu(job(0.25, dp=1, grads="bf16", use_precision_aware_optimizer=True))
    copies = most["fp32 copies of the gradients stepped here (dense)"]
    assert copies == most["main parameters (dense)"] == most["exp_avg (dense)"]
    assert not any("copies" in one for one in on_the_gpu(job(0.25, dp=1, use_precision_aware_optimizer=True)))


def test_loading_passes_through_copies_of_whole_parameters() -> None:
    """The optimizer is made of them before the distributed one has its shards: beside 16-bit parameters, fp32 gradients and a fourth of
    fp32 main parameters, fp32 copies of what would be stepped on the GPU."""
    read = read_job(job(0.5, dp=4))
    graph = graph_of(read)
    (rank,) = ranks_of(read, graph)
    tensors = [local.numel for local in rank.params for _ in range(local.copies)]
    stay = tensors[going(tensors, 0.5) :]
    told = (2 + 4 + 4 / 4) * sum(tensors) + 4 * sum(stay)
    assert account(read, graph, rank).loading.peak_bytes == pytest.approx(told, rel=1e-4)


def test_the_host_holds_parameters_gradients_and_moments_and_what_the_first_copies_left() -> None:
    """On one rank shards are whole: the gradients take the blocks of the first optimizer's copies. Nothing of it is pinned with neither
    option, but the 16-bit copy of each size, before it is cast."""
    document = job(1.0, dp=1, use_precision_aware_optimizer=True)
    read = read_job(document)
    (rank,) = ranks_of(read, graph_of(read))
    tensors = [local.numel for local in rank.params for _ in range(local.copies)]
    blocks, moments = sum(pinned(4 * numel) for numel in tensors), 8 * sum(tensors)
    narrow = {pinned(2 * numel) for numel in tensors} - {pinned(4 * numel) for numel in tensors}
    assert host_bytes(document) == 2 * blocks + moments + sum(narrow)
    loose = job(1.0, dp=1, use_precision_aware_optimizer=True, pin_cpu_grads=False, pin_cpu_params=False)
    assert host_bytes(loose) == 16 * sum(tensors) + sum({pinned(2 * numel) for numel in tensors})


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (job() | {"engine": {"name": "megatron", "zero_stage": 0}}, "zero_stage"),
        (job() | {"optimizer": "lion"}, "Adam or SGD"),
        (job(state="bf16"), "fp32"),
    ],
    ids=["replicas", "lion", "moments"],
)
def test_what_megatron_does_not_do_is_refused(document: dict, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        estimate(read_job(document))


ARGUMENTS = """\
torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
  --max-position-embeddings 4096 --seq-length 1024 --micro-batch-size 1 --global-batch-size 2 --swiglu --normalization RMSNorm \\
  --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer \\
  --tokenizer-type NullTokenizer --vocab-size 31999 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --no-pin-cpu-grads {more}
"""


def test_arguments_are_read_and_written(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(ARGUMENTS.format(more="--use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d"))
    _, read = read_whole(script, ["cluster=2xH100-SXM-80GB"])
    assert read.offload.optimizer == "cpu"
    said = {
        "optimizer_offload_fraction": 0.5,
        "pin_cpu_grads": False,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
    }
    assert said.items() <= dict(read.engine.options).items()
    again = write_job(read, format_named("megatron"))
    assert not [one for one in again.unsaid if one.key.startswith(("offload", "engine.options"))]
    for word in ("--optimizer-cpu-offload", "--optimizer-offload-fraction 0.5", "--no-pin-cpu-grads"):
        assert word in again.text


def test_megatron_asks_for_the_precision_aware_optimizer_beside_it(tmp_path: Path) -> None:
    """megatron/training/arguments.py asserts it; an API that is no command line (Megatron-Bridge) does not."""
    script = tmp_path / "train.sh"
    script.write_text(ARGUMENTS.format(more=""))
    reading = format_named("megatron").read(script.read_text(), str(script))
    (found,) = [one for one in reading.findings if one.severity == "error"]
    assert found.key == "--optimizer-cpu-offload"
    assert "--use-precision-aware-optimizer" in found.remedy
    assert "--use-precision-aware-optimizer" in write_job(read_job(job()), format_named("megatron")).text
