"""What a check finds in a file, and that the edit which it offers does what it says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ullage.api import check, estimate, read_job
from ullage.formats.convert import read_whole

SEVEN_B = ("model=llama-2-7b", "cluster=8xA100-SXM-80GB")


def checked(tmp_path: Path, keys: dict[str, object] | str, *overrides: str):
    path = tmp_path / "ds.json"
    path.write_text(keys if isinstance(keys, str) else json.dumps(keys, indent=2))
    return path, check(path, overrides or SEVEN_B)


def keys_of(found, severity: str) -> set[str]:
    return {finding.key for finding in found.findings if finding.severity == severity}


def patched(path: Path, edit: str) -> None:
    """The file after the edit, applied by patch as a person would."""
    done = subprocess.run(["patch", "-p1"], input=edit, cwd=path.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_edit_that_makes_it_fit(tmp_path: Path) -> None:
    text = """{
    // the shard stage
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": true},
    "train_micro_batch_size_per_gpu": 1
}
"""
    path, found = checked(tmp_path, text, "model=llama-2-13b", "cluster=8xA100-SXM-80GB", "recompute=full")
    assert found.estimate.verdict != "fits"
    assert found.edit is not None
    patched(path, found.edit)
    assert "// the shard stage" in path.read_text()
    _, job = read_whole(path, ("model=llama-2-13b", "cluster=8xA100-SXM-80GB", "recompute=full"))
    assert job.engine.zero_stage > 1
    assert estimate(job).verdict == "fits"


def test_no_edit_touches_what_a_flag_or_the_trainer_says(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    _, found = checked(tmp_path, keys, "model=llama-2-7b", "cluster=2xA100-SXM-80GB", "data.micro_batch=64")
    assert found.estimate.verdict == "oom"
    changed = [line for line in (found.edit or "").splitlines() if line.startswith(("+", "-"))]
    assert not any("accumulation" in line for line in changed)


def test_both_precisions_on_is_an_error_with_its_edit(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    path, found = checked(tmp_path, keys)
    assert "fp16.enabled" in keys_of(found, "error")
    patched(path, found.edit)
    assert json.loads(path.read_text())["fp16"]["enabled"] is False
    assert "fp16.enabled" not in keys_of(check(path, SEVEN_B), "error")


def test_batch_sizes_that_do_not_multiply(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": 100}
    path, found = checked(tmp_path, keys | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2})
    assert "train_batch_size" in keys_of(found, "error")
    patched(path, found.edit)
    assert json.loads(path.read_text())["train_batch_size"] == 16


def test_offload_at_a_stage_that_has_none(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}}
    path, found = checked(tmp_path, keys)
    assert "zero_optimization.offload_param.device" in keys_of(found, "error")
    patched(path, found.edit)
    assert json.loads(path.read_text())["zero_optimization"] == {"stage": 2}


def test_offload_with_much_memory_free_is_waste(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    path, found = checked(tmp_path, keys)
    assert "zero_optimization.offload_optimizer.device" in keys_of(found, "advice")
    patched(path, found.edit)
    assert check(path, SEVEN_B).estimate.verdict == "fits"
    assert check(path, SEVEN_B).job.offload.optimizer == "none"


def test_checkpointing_off_where_memory_runs_out(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 16}
    _, found = checked(tmp_path, keys)
    assert "recompute" in keys_of(found, "warning")


@pytest.mark.parametrize(("size", "said"), [(1000, True), (50_000_000, False), ("auto", False)])
def test_tiny_buckets(tmp_path: Path, size: object, said: bool) -> None:
    keys = {"zero_optimization": {"stage": 3, "reduce_bucket_size": size}, "bf16": {"enabled": True}}
    _, found = checked(tmp_path, keys)
    assert ("zero_optimization.reduce_bucket_size" in keys_of(found, "warning")) is said


def test_a_misspelt_key_is_a_warning(tmp_path: Path) -> None:
    _, found = checked(tmp_path, {"zero_optimization": {"stage": 3, "overlap_com": True}, "bf16": {"enabled": True}})
    finding = next(one for one in found.findings if one.key == "zero_optimization.overlap_com")
    assert finding.severity == "warning"
    assert "overlap_comm" in finding.remedy


def test_comments_are_told(tmp_path: Path) -> None:
    _, found = checked(tmp_path, '{"zero_optimization": {"stage": 3,}, // hm\n "bf16": {"enabled": true}}')
    assert {"line 1"} <= keys_of(found, "warning")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model: llama-2-7b\ncluster: 8xA100-SXM-80GB\n", "job.yaml"),
        ('{"model": "llama-2-7b",\n "cluster": "8xA100-SXM-80GB"}', "job.json"),
        ('model = "llama-2-7b"\ncluster = "8xA100-SXM-80GB"\n', "job.toml"),
    ],
)
def test_the_smallest_job_file_is_known_for_one(tmp_path: Path, text: str, name: str) -> None:
    """A model and a cluster are all that a job must say (docs/job.md)."""
    path = tmp_path / name
    path.write_text(text)
    assert check(path).job == read_job(path)
