"""Look-ups in what was measured of a machine, and a step's seconds from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hardware.machines import calibration, written

from ullage.calibration.measured import attention_flops_per_s, matmul_flops_per_s, traffic_s
from ullage.errors import Unsupported
from ullage.frozen import replace
from ullage.hardware import catalogue
from ullage.hardware.measured import Measured, Moved, Multiplied
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.timing.step import step_time

MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def measured(folder: Path) -> Measured:
    found = catalogue.cluster({"device": str(written(folder)), "gpus_per_node": 1}).device.measured
    assert found is not None
    return found


def job(folder: Path, ranks: int, **more: object) -> Job:
    cluster = {"device": str(written(folder)), "gpus_per_node": ranks}
    return read_job({"model": MODEL, "cluster": cluster, "data": {"seq_len": 256}, "precision": "fp32", **more})


def test_measured_points_are_given_back(tmp_path: Path) -> None:
    grid = Multiplied(
        dtype="fp32",
        direction="forward",
        m=(1.0, 4.0),
        n=(2.0, 8.0),
        k=(16.0, 64.0, 256.0),
        flops_per_s=tuple(float(number) for number in range(1, 13)),
    )
    one = replace(measured(tmp_path), matmuls=(grid,))
    rates = [matmul_flops_per_s(one, "fp32", "forward", m, n, k) for m in (1, 4) for n in (2, 8) for k in (16, 64, 256)]
    assert rates == pytest.approx(grid.flops_per_s)


def test_between_points_seconds_of_a_flop_are_linear_in_logarithms(tmp_path: Path) -> None:
    grid = Multiplied(dtype="fp32", direction="forward", m=(1.0, 4.0), n=(1.0,), k=(1.0,), flops_per_s=(1.0, 3.0))
    one = replace(measured(tmp_path), matmuls=(grid,))
    assert matmul_flops_per_s(one, "fp32", "forward", 2, 7, 7) == pytest.approx(2 / (1 / 1 + 1 / 3))
    assert matmul_flops_per_s(one, "fp32", "forward", 100, 7, 7) == 3.0


def test_an_op_of_few_bytes_takes_its_start_and_one_of_many_the_last_rate(tmp_path: Path) -> None:
    series = Moved(kind="copy", dtype="fp32", backward=False, bytes=(1e4, 1e6), seconds=(1e-5, 1e-4))
    one = replace(measured(tmp_path), traffic=(series,))
    assert traffic_s(one, "copy", "fp32", 1, backward=False) == 1e-5
    assert traffic_s(one, "copy", "fp32", 1e5, backward=True) == pytest.approx((1e-5 * 1e-4) ** 0.5)
    assert traffic_s(one, "copy", "fp32", 1e8, backward=False) == pytest.approx(1e-2)
    assert traffic_s(one, "copy", "fp32", 0, backward=False) == 0.0


def test_a_type_that_was_not_measured_is_unsupported(tmp_path: Path) -> None:
    one = measured(tmp_path)
    with pytest.raises(
        Unsupported, match=r"a matrix product in fp16 was not measured .* allowed: fp32, bf16; measure it"
    ):
        matmul_flops_per_s(one, "fp16", "forward", 128, 128, 128)
    with pytest.raises(Unsupported, match="attention in fp16 was not measured"):
        attention_flops_per_s(one, "fp16", 64, 128, True, False)
    with pytest.raises(Unsupported, match="an op of kind norm in fp16 was not measured"):
        traffic_s(one, "norm", "fp16", 1e6, backward=False)


def test_ops_in_16_bits_take_what_was_measured_of_them(tmp_path: Path) -> None:
    one = measured(tmp_path)
    assert traffic_s(one, "copy", "bf16", 1e8, backward=False) == 2 * traffic_s(
        one, "copy", "fp32", 1e8, backward=False
    )


def test_matmuls_of_a_step_take_what_was_measured(tmp_path: Path) -> None:
    found = step_time(job(tmp_path, 1, engine={"name": "single"}))
    weights = 2 * (4 * 256 * 256 + 3 * 256 * 512) + 1024 * 256
    assert dict(found.parts)["matmul"] == pytest.approx(6 * weights * 256 / 1e11)
    faster = step_time(job(tmp_path, 1, engine={"name": "single"}, precision="bf16-mixed"))
    assert dict(faster.parts)["matmul"] == pytest.approx(6 * weights * 256 / 4e11)


def test_what_the_cores_send_they_do_not_compute(tmp_path: Path) -> None:
    """Nothing is hidden by the file: an all-reduce is added to the step, behind whatever backward it runs."""
    two = job(tmp_path, 2, engine={"name": "ddp"})
    found = dict(step_time(two).parts)
    numel = 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256 + 2 * 1024 * 256
    assert found["dp"] == pytest.approx(1e-4 * (4 * numel / 1e3) ** 0.6, rel=0.02)


def test_sharded_steps_wait_for_what_is_sent(tmp_path: Path) -> None:
    found = dict(step_time(job(tmp_path, 2, engine={"name": "fsdp2"})).parts)
    whole = dict(step_time(job(tmp_path, 2, engine={"name": "ddp"})).parts)
    assert found["shard"] > whole["dp"] > 0


def test_an_engines_own_python_is_of_each_block_that_it_wraps(tmp_path: Path) -> None:
    slow = calibration().replace("overlap = 0.0", "overlap = 0.0\nsharded_layer_s = 1e-3\nsplit_layer_s = 2e-3")
    written(tmp_path, slow, name="slow.toml")
    data = {"seq_len": 256, "grad_accum": 3}
    for engine, layout, part, seconds in (
        ("fsdp2", {}, "shard", 4e-3),
        ("fsdp2", {"tp": 2}, "tp", 8e-3),
        ("ddp", {}, "dp", 0),
    ):
        keys = {"engine": {"name": engine}, "layout": layout, "data": data}
        quick = job(tmp_path, 2, **keys)
        device = {"device": str(tmp_path / "slow.toml"), "gpus_per_node": 2}
        slower = read_job({"model": MODEL, "precision": "fp32", **keys, "cluster": device})
        more = dict(step_time(slower).parts)[part] - dict(step_time(quick).parts)[part]
        assert more == pytest.approx(3 * seconds)  # embedding, two layers and head, in three micro-batches


def test_more_processes_have_slower_cores(tmp_path: Path) -> None:
    """The rates of the run with as many processes as the job has."""
    one, two = (dict(step_time(job(tmp_path, ranks, engine={"name": "ddp"})).parts) for ranks in (1, 2))
    assert two["matmul"] == pytest.approx(2 * one["matmul"])


def test_a_gpu_that_was_measured_hides_what_it_sends(tmp_path: Path) -> None:
    text = calibration().replace('vendor = "cpu"', 'vendor = "nvidia"')
    written(tmp_path, text, name="gpu.toml")
    cluster = {"device": str(tmp_path / "gpu.toml"), "gpus_per_node": 2}
    gpus = read_job(
        {"model": MODEL, "cluster": cluster, "data": {"seq_len": 256}, "precision": "fp32", "engine": {"name": "ddp"}}
    )
    cpus = job(tmp_path, 2, engine={"name": "ddp"})
    assert dict(step_time(gpus).parts).get("dp", 0.0) < dict(step_time(cpus).parts)["dp"]
