"""``ullage plan`` as a person and a machine call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ullage

JOB_MD = Path(__file__).parents[2] / "docs" / "job.md"
FLAGS = (
    "--model",
    "gpt2",
    "--cluster",
    "2xA100-SXM-40GB",
    "--seq-len",
    "1024",
    "--global-batch",
    "8",
    "--engine",
    "ddp,fsdp2",
)


def test_json_is_as_documented(run) -> None:
    done = run("plan", *FLAGS, "--json")
    answer = json.loads(done.out)
    text = JOB_MD.read_text(encoding="utf-8")
    example = next(json.loads(one) for one in re.findall(r"```json\n(.*?)```", text, re.S) if '"pruned"' in one)
    assert (done.status, done.err) == (0, "")
    assert answer.keys() >= example.keys()
    assert answer["plans"][0].keys() >= example["plans"][0].keys()
    assert answer["plans"][0]["estimate"]["verdict"] == "fits"
    assert answer["nothing_fits"] is None
    assert ullage.read_job(answer["plans"][0]["job"]).layout.world == 2


def test_a_person_reads_the_plan_and_its_reasons(run) -> None:
    done = run("plan", *FLAGS)
    assert done.status == 0
    for word in ("FASTEST", "tokens/s a GPU", "limited by", "proven no better"):
        assert word in done.out


def test_the_best_plan_is_written_as_a_job_that_is_estimated(run, tmp_path: Path) -> None:
    out = tmp_path / "best.yaml"
    assert run("plan", *FLAGS, "--out", out).status == 0
    assert run("estimate", out).status == 0


def test_engines_are_searched_and_no_key_of_the_job(run) -> None:
    answer = json.loads(run("plan", *FLAGS[:-1], "ddp", "--json").out)
    assert {one["job"]["engine"]["name"] for one in answer["plans"]} == {"ddp"}


def test_nothing_fits(run) -> None:
    done = run(
        "plan", "--model", "llama-3.1-8b", "--cluster", "1xA10G-24GB", "--global-batch", "1", "--engine", "single"
    )
    assert done.status == 1
    assert "NOTHING FITS" in done.out


def test_a_tight_plan_is_told_as_one(run) -> None:
    flags = ("plan", "--model", "llama-3.1-8b", "--cluster", "4xRTX-4090-24GB", "--global-batch", "8", "--lora",
             "{rank: 16, base: nf4}", "--micro-batch", "2", "--seq-len", "1024", "--engine", "ddp")  # fmt: skip
    assert run(*flags).status == 0
    done = run(*flags, "--tight")
    assert done.status == 3
    assert "tight: the high estimate is" in done.out


def test_what_is_wrong_is_said_in_one_line(run) -> None:
    for arguments, said in (
        ((*FLAGS, "--fix", "layout.dp=2", "--fix", "layout.dp=1"), "layout.dp"),
        ((*FLAGS, "--goal", "quickest"), "fastest"),
        ((*FLAGS, "--top", "0"), "--top"),
        ((*FLAGS[:-1], "fsdp9"), "fsdp2"),
        ((), "ullage plan"),
    ):
        done = run("plan", *arguments)
        assert done.status == 2
        assert said in done.err
        assert len(done.err.strip().splitlines()) == 1
