"""Calibration files: what they make of a job's cluster, and what is said of broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hardware.machines import calibration, written

from ullage.cli.main import main
from ullage.errors import InvalidInput, UllageError
from ullage.hardware import catalogue, machine
from ullage.hardware.cluster import Cluster
from ullage.job.read import read_job
from ullage.job.write import cluster_to_dict


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that this-machine means."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ullage").mkdir()
    return written(tmp_path / "ullage", name="this-machine.toml")


def clusters(path: Path, gpus: int) -> Cluster:
    return catalogue.cluster({"device": str(path), "gpus_per_node": gpus})


def test_processes_share_the_memory(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert [clusters(path, count).device.capacity_bytes for count in (1, 2, 4)] == [16 * 10**9, 8 * 10**9, 4 * 10**9]


def test_the_run_with_the_nearest_number_of_processes_speaks(tmp_path: Path) -> None:
    path = written(tmp_path, calibration((1, 2, 8)))
    spoke = []
    for count in (1, 2, 3, 4, 7, 16):
        measured = clusters(path, count).device.measured
        assert measured is not None
        spoke.append(measured.processes)
    assert spoke == [1, 2, 2, 8, 8, 8]  # of two that are as near, the one under more load


def test_this_machine_is_a_name_for_the_usual_file(usual: Path) -> None:
    found = catalogue.cluster("2xthis-machine")
    assert found == clusters(usual, 2)
    assert found == catalogue.cluster("2xThis Machine")
    assert cluster_to_dict(found) == "2xthis-machine"


def test_another_file_is_written_by_its_path(tmp_path: Path) -> None:
    found = clusters(written(tmp_path), 2)
    document = cluster_to_dict(found)
    assert isinstance(document, dict)
    assert document["device"] == str(tmp_path / "machine.toml")
    assert catalogue.cluster(document) == found


def test_a_job_names_it_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text("model: llama-3.2-1b\ncluster: {device: machine.toml, gpus_per_node: 2}\ndata: {seq_len: 128}\n")
    monkeypatch.chdir("/")
    assert read_job(job).cluster.device.vendor == "cpu"


def test_a_device_set_from_the_shell_keeps_the_counts(tmp_path: Path) -> None:
    values = {"model": "llama-3.2-1b", "cluster": "2x4xH100-SXM-80GB", "data": {"seq_len": 128}}
    job = read_job(values, ("cluster.device=A100-SXM-80GB",))
    assert (job.cluster.device.name, job.cluster.gpus_per_node, job.cluster.nodes) == ("A100-SXM-80GB", 4, 2)


def test_a_node_type_has_no_device_to_set() -> None:
    values = {"model": "llama-3.2-1b", "cluster": "2xdgx-h100", "data": {"seq_len": 128}}
    with pytest.raises(InvalidInput, match="is no mapping"):
        read_job(values, ("cluster.device=A100-SXM-80GB",))


def test_a_card_of_the_catalogue_stays_one_but_for_its_speed(tmp_path: Path) -> None:
    text = (
        calibration((1,)).replace('"this-machine"', '"H200-SXM-141GB"').replace('vendor = "cpu"', 'vendor = "nvidia"')
    )
    device, known = clusters(written(tmp_path, text), 1).device, catalogue.device("H200-SXM-141GB")
    assert device.capacity_bytes == known.capacity_bytes
    assert device.compute_capability == known.compute_capability
    assert dict(device.flops_per_s)["bf16"] == 4e11


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schema = 2", "schema = 1", "schema = 1: is of another version; allowed: 2"),
        (
            "flops_per_s = [100000000000.0, 100000000000.0]",
            "flops_per_s = []",
            r"run\[0\]\.matmul\[0\]\.flops_per_s: is empty",
        ),
        ("flops_per_s = [100000000000.0, 100000000000.0]", "flops_per_s = [1e9]", "has 1 numbers, and its axes have 2"),
        ("m = [128, 512]", "m = [512, 128]", r"m = \[512, 128\]: does not rise"),
        ("seconds = [1e-6, 1e-2]", "seconds = [1e-6, -1e-2]", "has a number that is not positive"),
        ("seconds = [1e-6, 1e-2]", "seconds = [1e-6, nan]", "has a number that is not positive"),
        ('direction = "dgrad"', 'direction = "sideways"', "direction = sideways: is unknown; allowed: forward, dgrad"),
        ("overlap = 0.0", "overlap = 2.0", r"overlap = 2.0: is no share; allowed: 0 to 1"),
        ("memory_bytes = 16000000000", "", "device.memory_bytes = None: is no positive number"),
        ("processes = 1\n", 'processes = "one"\n', r"run\[0\]\.processes = one: is no positive number"),
        ("[device]", "[device", "is no calibration file: "),
        ("date = ", "when = ", "date: is missing"),
    ],
)
def test_what_is_wrong_is_told_by_its_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = calibration()
    assert old in text
    path = written(tmp_path, text.replace(old, new))
    with pytest.raises(InvalidInput, match=says) as raised:
        clusters(path, 1)
    assert str(path) in str(raised.value)
    assert "ullage bench" in str(raised.value)


def test_a_file_that_is_not_there_says_how_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match="there is no such calibration file; measure this machine: ullage bench"):
        catalogue.cluster("2xthis-machine")
    with pytest.raises(UllageError, match=r"cluster\.device = .*: there is no such .*none\.toml"):
        clusters(tmp_path / "none.toml", 1)
    assert machine.here() is None


def test_a_run_without_collectives_is_of_one_process(tmp_path: Path) -> None:
    text = calibration((2,))
    path = written(tmp_path, text[: text.index("[[run.collective]]")])
    with pytest.raises(InvalidInput, match="collective: is missing"):
        clusters(path, 2)


def test_this_machine_is_listed_whole(usual: Path) -> None:
    from ullage.api import devices

    last, _ = devices()[-1]
    assert (last.name, last.capacity_bytes) == ("this-machine", 16 * 10**9)
    assert last.memory_bytes_per_s == pytest.approx(1e10)
    assert dict(last.flops_per_s) == {"bf16": 4e11, "fp32": 1e11}


def test_a_machine_without_a_gpu_is_not_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path)
    job = ["--model", "gpt2", "--cluster", "1xH100-SXM-80GB", "--engine", "single", "--seq-len", "64"]
    main(["estimate", *job, "--calibration", str(path)])
    told = capsys.readouterr().out
    assert "resident size" in told
    assert "cuda" not in told
    assert "nvidia-smi" not in told
