"""``ullage show``: what it prints and writes, and what it says of a job or a command line that is wrong."""

import json

import pytest
from tests.cli.test_bad_input import complains


def test_terminal(run, job_file) -> None:
    done = run("show", "tensor-parallel", job_file)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("tensor-parallel  llama-3.1-8b on 8xH100-SXM-80GB")
    assert "by column" in done.out
    assert "\x1b" not in done.out


def test_options_stand_where_they_like(run, job_file) -> None:
    before, after = run("show", "zero", "--set", "layout.tp=1", job_file), run("show", "zero", job_file, "--tp", "1")
    assert before.status == 0
    assert before == after


def test_json(run, job_file) -> None:
    done = run("show", "pipeline", job_file, "--format", "json", "--rank", "1")
    answer = json.loads(done.out)
    assert (done.status, answer["technique"], answer["stage"]) == (0, "pipeline", 1)
    assert [len(one["passes"]) for one in answer["gantt"]] == [8, 8]


@pytest.mark.parametrize(("form", "start"), [("html", "<!DOCTYPE html>"), ("perfetto", '{"traceEvents":')])
def test_drawings(run, job_file, tmp_path, form: str, start: str) -> None:
    out = tmp_path / "step"
    done = run("show", "pipeline", job_file, "--format", form, "--out", out)
    assert done.status == 0
    assert done.out.startswith(f"{out}: 2 stages, 16 passes, ")
    assert out.read_text().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["TECHNIQUE: is missing", "collectives"]),
        (["zero"], ["no job", "--model and --cluster"]),
        (["pipelin", "JOB"], ["TECHNIQUE = pipelin", "did you mean pipeline?"]),
        (["zero", "JOB", "--format", "html", "--out", "x"], ["--format = html", "draws a pipeline"]),
        (["pipeline", "JOB", "--format", "html"], ["--out: is missing"]),
        (["pipeline", "JOB", "--out", "x"], ["--out", "--format html"]),
        (["pipeline", "JOB", "--format", "html", "--out", "/nowhere/x"], ["--out = /nowhere/x", "cannot be written"]),
        (["pipeline", "JOB", "--rank", "2"], ["--rank = 2", "allowed: 0 to 1"]),
        (["pipeline", "JOB", "--format", "png"], ["png"]),
        (["pipeline", "JOB", "--pp", "1"], ["layout.pp = 1", "no pipeline parallelism", "set layout.pp"]),
        (["checkpointing", "JOB"], ["recompute = none", "set recompute to full"]),
        (["tensor-parallel", "JOB", "--tp", "1"], ["layout.tp = 1", "set layout.tp"]),
        (["zero", "JOB", "--zero-stage", "0"], ["engine.zero_stage = 0", "set engine.zero_stage"]),
        (["mixed-precision", "JOB", "--precision", "fp32"], ["precision = fp32", "bf16-mixed"]),
        (["collectives", "--model", "llama-3.2-1b", "--cluster", "1xH100", "--engine", "single"], ["one GPU"]),
        (["zero", "examples/convnet.py:factory"], ["no such file"]),
        (["zero", "JOB", "--tp", "3"], ["layout.tp = 3", "(--tp 3)"]),
        (["zero", "JOB", "extra"], ["extra"]),
    ],
    ids=lambda value: " ".join(value),
)  # fmt: skip
def test_what_is_wrong_is_said(run, job_file, arguments: list[str], parts: list[str]) -> None:
    done = run("show", *(job_file if one == "JOB" else one for one in arguments))
    complains(done, *parts)
