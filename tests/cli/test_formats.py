"""``ullage convert`` and ``ullage check`` as commands: answers, exit statuses, messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.test_bad_input import complains

DATA = Path(__file__).parents[1] / "formats" / "data"
ON = ("--model", "llama-2-7b", "--cluster", "8xA100-SXM-80GB")


def test_convert_writes_text_and_tells_the_rest_on_stderr(run, job_file: Path) -> None:
    done = run("convert", job_file, "--to", "deepspeed", "--tp", 1, "--pp", 1)
    assert done.status == 0
    assert json.loads(done.out)["zero_optimization"]["stage"] == 1
    assert "not said: data.seq_len" in done.err
    assert "note: optimizer.params.lr" in done.err


def test_convert_to_a_file_and_back(run, job_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "ds.json"
    done = run("convert", job_file, "--to", "deepspeed", "--tp", 1, "--pp", 1, "--out", out)
    assert (done.status, "ds.json" in done.out) == (0, True)
    back = run("convert", out, "--to", "job", "--model", "llama-3.1-8b", "--cluster", "8xH100-SXM-80GB")
    assert back.status == 0
    assert "zero_stage: 1" in back.out
    job = tmp_path / "back.yaml"
    job.write_text(back.out)
    assert run("estimate", job, "--json").status in (0, 1, 3)


def test_convert_json(run) -> None:
    done = run("convert", DATA / "LlamaFactory_6942-ds_z3_offload.json", "--to", "job", *ON, "--json")
    answer = json.loads(done.out)
    assert set(answer) == {"format", "text", "unsaid", "notes", "leftovers"}
    assert {"key": "gradient_clipping", "value": "auto"}.items() <= answer["leftovers"][3].items()


def test_check_answers_as_the_contract_says(run) -> None:
    done = run("check", DATA / "nebuly_315-ds_config.json", *ON, "--json")
    answer = json.loads(done.out)
    assert {"job", "leftovers", "estimate", "findings", "edit"} <= set(answer)
    assert done.status == {"fits": 0, "oom": 1, "tight": 3}[answer["estimate"]["verdict"]]
    for finding in answer["findings"]:
        assert set(finding) == {"severity", "key", "what", "remedy"}
    keys = {(finding["severity"], finding["key"]) for finding in answer["findings"]}
    assert ("warning", "zero_optimization.reduce_bucket_size") in keys


def test_check_for_the_eye(run) -> None:
    done = run("check", DATA / "DeepSpeedExamples_186-ds_config.json", *ON)
    assert done.status in (0, 1, 3)
    assert "Findings" in done.out


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty", "DeepSpeed JSON"]),
        ("{", ["none of the formats"]),
        ("nothing at all", ["none of the formats"]),
        ('{"model_type": "llama"}', ["none of the formats"]),
        ("\0\1\2", ["binary"]),
        ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": 1}}', ["bf16.enabled", "true or false", "line 1"]),
        ('{"zero_optimization": {"stage": 2}', ["no valid JSON", "truncated"]),
    ],
)
def test_bad_files(run, tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for command in (("convert", path, "--to", "job"), ("check", path)):
        complains(run(*command, *ON), *parts)


def test_bad_paths_and_flags(run, tmp_path: Path, job_file: Path) -> None:
    big = tmp_path / "big.json"
    big.write_bytes(b"{" + b" " * 3_000_000 + b"}")
    binary = tmp_path / "x.json"
    binary.write_bytes(bytes(range(256)))
    for path, part in (
        (tmp_path / "no.json", "no such file"),
        (tmp_path, "is a directory"),
        (big, "long"),
        (binary, "no text"),
    ):
        complains(run("check", path, *ON), part)
    complains(run("convert", job_file), "--to", "is missing")
    complains(run("check"), "FILE", "is missing")
    complains(run("convert", job_file, "--to", "deepsped"), "deepsped", "did you mean deepspeed?")
    complains(run("check", job_file, "--from", "toml"), "no format")
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    complains(run("check", path), "model", "is missing")
    complains(run("check", path, "--model", "llama-2-7b"), "cluster", "is missing")
