"""Whatever is wrong with the input: one message that names value, limit, place and remedy, exit status 2, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.units import MIB

HEAD = "model: llama-3.1-8b\ncluster: 8xH100-SXM-80GB\n"


def complains(done, *parts: str) -> None:
    assert done.status == 2, done
    assert done.out == ""
    assert done.err.startswith("ullage: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err, done.err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param(
            f"{HEAD}layuot: {{tp: 2}}", ["layuot", "did you mean layout?", "job.yaml, line 3"], id="misspelt key"
        ),
        pytest.param(f"{HEAD}layout: {{tp: 3}}", ["layout.tp = 3", "32 attention heads", "use 1, 2, 4"], id="heads"),
        pytest.param(f"{HEAD}layout: {{dp: 3}}", ["layout.dp = 3", "8 GPUs", "line 3"], id="impossible degree"),
        pytest.param(f"{HEAD}data: {{seq_len: -5}}", ["data.seq_len = -5", "at least 1", "line 3"], id="negative size"),
        pytest.param(
            "model: lama-3.1-8b\ncluster: 8xH100-SXM-80GB", ["lama-3.1-8b", "llama-3.1-8b", "line 1"], id="model"
        ),
        pytest.param("model: llama-3.1-8b\ncluster: 8xH100-SXM-81GB", ["H100-SXM-81GB", "did you mean"], id="device"),
        pytest.param("", ["is empty", "job.yaml"], id="empty file"),
        pytest.param("- 1\n- 2", ["a list", "job.yaml"], id="a list"),
        pytest.param("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ["job.yaml"], id="aliases"),
        pytest.param("model: {model_type: mamba2}\ncluster: 8xH100-SXM-80GB", ["mamba2", "line 1"], id="not modelled"),
    ],
)
def test_a_wrong_job(run, tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    complains(run("estimate", path), *parts)


def test_a_config_that_is_a_list(run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")
    path = tmp_path / "job.yaml"
    path.write_text("model: ./config.json\ncluster: 8xH100-SXM-80GB\n")
    complains(run("estimate", path), "config.json", "list")


def test_a_truncated_json(run, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"model": "llama-3.1-8b", "cluster": "8xH100-SXM-80GB"})[:-9])
    complains(run("estimate", path), "is it truncated?", "job.json, line 1")


def test_a_yaml_of_200_mb(run, tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.write(b"a: 1\n")
        file.truncate(200 * MIB)
    complains(run("estimate", path), "200.00 MiB", "at most 1.00 MiB", "big.yaml")


def test_aliases_that_explode(run, tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]" for depth in range(1, 30)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    complains(run("estimate", path), "bomb.yaml")


def test_a_directory(run, tmp_path: Path) -> None:
    complains(run("estimate", tmp_path), "is a directory", str(tmp_path))


def test_a_missing_file(run, tmp_path: Path) -> None:
    complains(run("estimate", tmp_path / "none.yaml"), "no such file", "none.yaml")


def test_a_binary_file(run, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 10)
    complains(run("estimate", path), "model.safetensors", "allowed: a job file")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read everything")
def test_no_read_permission(run, job_file: Path) -> None:
    job_file.chmod(0)
    complains(run("estimate", job_file), "no permission", "chmod")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], []),
        (["estimat"], ["estimat", "is no command", "did you mean ullage estimate?"]),
        (["zzz"], ["zzz", "allowed: estimate, show, plan, models, devices, "]),
        (["estimate"], ["no job", "--model and --cluster"]),
        (["estimate", "--modle", "x"], ["--modle", "did you mean --model?"]),
        (["estimate", "a.yaml", "b.yaml"], ["no further argument b.yaml"]),
        (["estimate", "--set"], ["--set", "expected one argument"]),
        (["estimate", "--model", "llama-3.1-8b"], ["cluster: is missing"]),
        (
            ["estimate", "--model", "llama-3.1-8b", "--cluster", "8xH100-SXM-80GB", "--seq-len", "-5"],
            ["(--seq-len -5)"],
        ),
        (
            ["estimate", "--model", "llama-3.1-8b", "--cluster", "8xH100-SXM-80GB", "--set", "x"],
            ["KEY=VALUE", "--set x"],
        ),
        (["estimate", "--grad-accum", "2", "--global-batch", "8"], ["--global-batch", "keep one"]),
        (["estimate", "--option", "x"], ["--option = x", "NAME=VALUE"]),
        (["models", "extra"], ["extra"]),
        (["validate"], ["PATH"]),
        (["validate", "nowhere.json"], ["nowhere.json", "no such file"]),
    ],
)
def test_a_wrong_command_line(run, arguments: list[str], parts: list[str]) -> None:
    done = run(*arguments)
    if not arguments:
        assert done.status == 2
        assert "usage: ullage COMMAND" in done.err
    else:
        complains(done, *parts)


def test_terminal_codes_of_a_hostile_name_are_not_printed(run) -> None:
    for arguments in (
        ("\x1b[31mestimate\n",),
        ("estimate", "--\x1b[31m"),
        ("estimate", "--model", "\x1b[31mx", "--cluster", "8xH100"),
    ):
        done = run(*arguments)
        assert done.status == 2
        assert "\x1b" not in done.err


def test_a_bug_of_ours_is_no_verdict(run, job_file, monkeypatch) -> None:
    monkeypatch.setattr("ullage.api.estimate", lambda job: 1 / 0)
    done = run("estimate", job_file)
    assert done.status == 70
    assert "a bug in ullage" in done.err
    with pytest.raises(ZeroDivisionError):
        run("estimate", job_file, "--traceback")


def test_an_interrupt_ends_without_a_traceback(run, job_file, monkeypatch) -> None:
    def interrupted(job: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ullage.api.estimate", interrupted)
    done = run("estimate", job_file)
    assert (done.status, done.out, done.err) == (130, "", "ullage: interrupted\n")


def test_a_reader_that_leaves_early(job_file: Path) -> None:
    """``ullage ... | head -0``: no traceback, and no status that a verdict has."""
    command = [sys.executable, "-m", "ullage", "estimate", str(job_file), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert err == b""
    assert process.returncode == 141


def test_the_process_answers_as_the_function_does(job_file: Path) -> None:
    command = [sys.executable, "-m", "ullage", "estimate", str(job_file), "--tp", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ullage: layout.tp = 3")


def test_version_and_help(run) -> None:
    assert run("--version") == (0, "ullage 0.1.0\n", "")
    done = run("--help")
    assert done.status == 0
    assert "estimate" in done.out
