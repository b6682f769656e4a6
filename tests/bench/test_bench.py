"""A small measurement, for real, and what is said of a wrong one. How fast this machine is, no test says."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.bench.small import measured, small  # noqa: E402
from tests.hardware.machines import written  # noqa: E402

from ullage.api import plan  # noqa: E402
from ullage.bench.machine import Facts, choose, facts, numbers  # noqa: E402
from ullage.bench.matmul import BATCH, Grid  # noqa: E402
from ullage.bench.settings import extent  # noqa: E402
from ullage.bench.traffic import OPTIMIZER_BYTES  # noqa: E402
from ullage.bench.written import text  # noqa: E402
from ullage.cli.main import main  # noqa: E402
from ullage.errors import InvalidInput, Unsupported  # noqa: E402
from ullage.hardware import machine  # noqa: E402
from ullage.job.adapted import graph_of  # noqa: E402
from ullage.job.read import read_job  # noqa: E402
from ullage.model.count import parameter_count  # noqa: E402
from ullage.timing.machine import moved_s  # noqa: E402
from ullage.timing.step import step_time  # noqa: E402


def test_what_is_measured_is_written_and_read_and_times_a_job(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    with small():
        assert main(["bench", "--out", str(path), "--device", "cpu", "--processes", "1"]) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["machine.toml"]
    [run] = machine.read(path).runs
    assert (run.processes, run.overlap, run.collectives) == (1, 1.0, ())
    assert {(one.dtype, one.direction) for one in run.matmuls} == {
        (dtype, direction)
        for dtype in ("fp32", "bf16", "fp16")
        for direction in ("forward", "dgrad", "wgrad", "batched")
    }
    model = {"base": "llama-3.2-1b", "num_hidden_layers": 2}
    cluster = {"device": str(path), "gpus_per_node": 1}
    values = {"model": model, "cluster": cluster, "data": {"seq_len": 128}, "engine": {"name": "single"}}
    found = step_time(read_job(values))
    assert set(dict(found.parts)) == {"matmul", "attention", "memory", "optimizer"}


def test_text_gives_back_what_was_measured(tmp_path: Path) -> None:
    run = measured()
    assert run is not None
    told = Facts(name="this-machine", vendor="cpu", processor='a "fast" one', cores=2, memory_bytes=16 * 10**9)
    path = tmp_path / "machine.toml"
    path.write_text(text(told, [run]))
    found = machine.read(path)
    assert found.device.capacity_bytes == told.memory_bytes
    assert found.runs[0].source == f'{run.source} on a "fast" one, 2 cores'
    for one, other in zip(found.runs[0].matmuls, run.matmuls, strict=True):
        assert one.flops_per_s == pytest.approx(other.flops_per_s, rel=1e-3)
    for read, moved in zip(found.runs[0].traffic, run.traffic, strict=True):
        assert read.bytes == pytest.approx(moved.bytes, abs=0.5)
        assert read.seconds == pytest.approx(moved.seconds, rel=1e-3)


def test_a_product_that_takes_too_long_has_its_smaller_neighbours_rate() -> None:
    grid = Grid(dtype="fp32", direction="batched", m=(8, 64), n=(8,), k=(8, 64))
    known: dict[tuple[int, int, int], float] = {(8, 8, 8): 1.0, (8, 8, 64): 2.0, (64, 8, 8): 3.0}
    assert grid.flops((8, 8, 8)) == 2 * 8**3 * BATCH
    assert grid._smaller((64, 8, 64), known) in {(8, 8, 64), (64, 8, 8)}
    assert grid._smaller((8, 8, 64), known) == (8, 8, 8)


def test_the_optimizer_is_counted_as_a_step_counts_it(tmp_path: Path) -> None:
    cluster = {"device": str(written(tmp_path)), "gpus_per_node": 1}
    values = {"model": "llama-3.2-1b", "cluster": cluster, "data": {"seq_len": 8}, "engine": {"name": "single"}}
    job = read_job({**values, "precision": "fp32"})
    moved = moved_s(job.cluster.device, parameter_count(graph_of(job)) * OPTIMIZER_BYTES, "optimizer")
    assert dict(step_time(job).parts)["optimizer"] == pytest.approx(moved)


def test_the_machine_is_told_as_the_system_has_it() -> None:
    found = facts("cpu")
    assert (found.name, found.vendor) == ("this-machine", "cpu")
    assert found.cores >= 1
    assert found.memory_bytes > 2**28
    assert found.processor


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("0", "--processes = 0: is no number"),
        ("1,two", "allowed: 1 to 64"),
        ("", "is no number"),
        ("65", "is no number"),
    ],
)
def test_processes_are_counts(said: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        numbers(said, "cpu")


def test_processes_are_sorted_and_told_once() -> None:
    assert numbers("2,1,2", "cpu") == (1, 2)
    assert numbers(None, "cpu") == (1, 2)


def test_a_kind_of_device_that_is_not_here() -> None:
    with pytest.raises(InvalidInput, match="--device = tpu: is no kind of device; allowed: cpu, cuda"):
        choose("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="torch sees no GPU here; measure the CPU"):
            choose("cuda")


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--out", str(tmp_path / "none" / "machine.toml")]) == 2
    assert "--out = " in (said := capsys.readouterr().err)
    assert "cannot be written: No such file or directory; name a file in a folder that is there" in said


def test_a_launchers_processes_are_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "--out", str(tmp_path / "machine.toml")]) == 2


def test_less_is_measured_quickly() -> None:
    for device in ("cpu", "cuda"):
        assert extent(device, quick=True).seconds < extent(device, quick=False).seconds


def test_one_that_is_no_calibration_file_is_told_with_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "llama-3.2-1b", "--cluster", "2xH100", "--calibration", "H100"]) == 2
    assert "--calibration = H100: is no calibration file" in capsys.readouterr().err


def test_a_flag_puts_a_job_on_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    flags = ["--model", "gpt2", "--cluster", "2xH100", "--seq-len", "128", "--engine", "ddp", "--precision", "fp32"]
    assert main(["estimate", *flags, "--calibration", str(path)]) == 0
    assert "process with torch" in capsys.readouterr().out


def test_a_search_knows_the_machine(tmp_path: Path) -> None:
    cluster = {"device": str(written(tmp_path)), "gpus_per_node": 2}
    values = {"model": "gpt2", "cluster": cluster, "data": {"seq_len": 128, "global_batch": 4}, "precision": "fp32"}
    found = plan(values, engines=("ddp", "fsdp2"), top=1)
    best = found.plans[0]
    assert best.job.cluster.device.vendor == "cpu"
    assert best.time.step_s == pytest.approx(step_time(best.job).step_s)
