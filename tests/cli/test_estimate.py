"""``ullage estimate``: the JSON of docs/job.md, exit statuses, flags, and what a person reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ullage
from ullage.memory.ledger import CATEGORIES
from ullage.units import GIB

ROOT = Path(__file__).parents[2]


def documented() -> dict:
    """The estimate's answer as docs/job.md writes it."""
    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    return next(json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.S) if '"ledger"' in block)


def test_json_has_every_documented_key(run, job_file) -> None:
    done = run("estimate", job_file, "--json")
    answer, example = json.loads(done.out), documented()
    assert (done.status, done.err) == (0, "")
    assert answer.keys() >= example.keys()
    for name in ("peak", "time"):
        assert answer[name].keys() >= example[name].keys()
    for name in ("ranks", "ledger"):
        assert answer[name][0].keys() >= example[name][0].keys()
    assert answer["schema"] == 1
    assert answer["verdict"] == "fits"
    assert all(isinstance(answer[name], int) for name in answer if name.endswith("_bytes"))
    assert sum(answer["time"]["parts"].values()) == pytest.approx(answer["time"]["step_s"])
    assert 0 < answer["time"]["mfu"] == answer["time"]["hfu"] < 1


def test_the_ledger_adds_up_to_the_byte(run, job_file) -> None:
    answer = json.loads(run("estimate", job_file, "--json").out)
    peak = answer["peak"]
    assert sum(line["bytes"] for line in answer["ledger"]) == peak["allocated_bytes"]
    worst = next(one for one in answer["ranks"] if peak["rank"] in one["ranks"])
    assert {name: worst[name] for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "moment")} == {
        name: peak[name] for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "moment")
    }
    outside = sum(one["bytes"] for one in answer["outside_allocator"])
    assert peak["device_bytes"] == peak["reserved_bytes"] + outside
    assert peak["low_bytes"] <= peak["device_bytes"] <= peak["high_bytes"] < answer["capacity_bytes"]
    assert sorted(rank for one in answer["ranks"] for rank in one["ranks"]) == list(range(8))


def test_each_line_says_what_it_is(run, job_file) -> None:
    for line in json.loads(run("estimate", job_file, "--json").out)["ledger"]:
        assert line["category"] in CATEGORIES
        assert line["provenance"] in ("exact", "measured", "default")
        assert line["what"]
        assert line["formula"]
        assert line["lives"]


@pytest.mark.parametrize(
    ("overrides", "verdict", "status"),
    [
        ((), "fits", 0),
        (("--set", "data.micro_batch=64"), "oom", 1),
    ],
)
def test_the_exit_status_is_the_verdict(run, job_file, overrides, verdict, status) -> None:
    done = run("estimate", job_file, "--json", *overrides)
    assert (json.loads(done.out)["verdict"], done.status) == (verdict, status)


def test_tight_is_status_3(run, job_file) -> None:
    """A card of exactly the estimate's size lies inside its interval."""
    device = json.loads(run("estimate", job_file, "--json").out)["peak"]["device_bytes"]
    cluster = f"{{device: {{memory: {device}, compute_capability: '9.0'}}, gpus_per_node: 8}}"
    done = run("estimate", job_file, "--json", "--cluster", cluster)
    assert (json.loads(done.out)["verdict"], done.status) == ("tight", 3)


def test_flags_build_the_same_job_as_a_file(run, job_file) -> None:
    flags = "--model llama-3.1-8b --cluster 8xH100-SXM-80GB --seq-len 4096 --grad-accum 4 --tp 2 --pp 2 --engine megatron --zero-stage 1"
    from_flags = json.loads(run("estimate", "--json", *flags.split()).out)
    from_file = json.loads(run("estimate", "--json", job_file).out)
    assert from_flags["ledger"] == from_file["ledger"]


def test_a_flag_overrides_the_file_and_set_overrides_a_flag(run, job_file) -> None:
    def tokens(*arguments: str) -> int:
        answer = json.loads(run("estimate", job_file, "--json", *arguments).out)
        return answer["flops_per_step"]

    assert tokens("--micro-batch", "2") == 2 * tokens()
    assert tokens("--micro-batch", "2", "--set", "data.micro_batch=3") == 3 * tokens()
    assert tokens("--sp", "--recompute", "{modules: [core_attn]}", "--no-grad-clip") == tokens()


def test_a_person_reads_the_verdict_first(run, job_file) -> None:
    done = run("estimate", job_file)
    first = done.out.splitlines()[0].split()
    assert first[0] == "FITS"
    assert "llama-3.1-8b" in first
    for word in (
        "allocated",
        "reserved",
        "device",
        "capacity",
        "stage 0, ranks 0-3",
        "stage 1, ranks 4-7",
        "Defaults taken",
    ):
        assert word in done.out
    assert "\x1b" not in done.out  # no terminal, no colours
    assert all(len(line) <= 110 for line in done.out.splitlines())


def test_the_table_shows_the_numbers_of_the_json(run, job_file) -> None:
    answer = json.loads(run("estimate", job_file, "--json").out)
    shown = run("estimate", job_file).out
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "low_bytes", "high_bytes"):
        assert f"{answer['peak'][name] / GIB:,.2f} GiB" in shown
    assert answer["peak"]["moment"] in shown


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_table_keeps_to_the_width(run, job_file, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert all(len(line) <= columns for line in run("estimate", job_file).out.splitlines())


def test_explain_shows_every_line_with_formula_and_life(run, job_file) -> None:
    answer = json.loads(run("estimate", job_file, "--json").out)
    shown = " ".join(run("estimate", job_file, "--explain").out.split())
    assert f"{answer['peak']['allocated_bytes']:,} bytes, the sum of all lines" in shown
    for line in answer["ledger"]:
        assert f"{line['bytes']:,} bytes" in shown
    assert shown.count("formula") >= len(answer["ledger"])
    assert shown.count("lives") >= len(answer["ledger"])


def test_explain_and_json_exclude_each_other(run, job_file) -> None:
    done = run("estimate", job_file, "--explain", "--json")
    assert done.status == 2
    assert "not allowed with" in done.err


def test_python_says_the_same(run, job_file) -> None:
    estimate = ullage.estimate(ullage.read_job(job_file))
    assert ullage.as_dict(estimate) == json.loads(run("estimate", job_file, "--json").out)


def test_models_and_devices(run) -> None:
    models = json.loads(run("models", "--json").out)["models"]
    llama = next(one for one in models if one["name"] == "llama-3.1-8b")
    assert (llama["model_type"], llama["parameters"], llama["layers"], llama["hidden"]) == (
        "llama",
        8030261248,
        32,
        4096,
    )
    devices = json.loads(run("devices", "--json").out)["devices"]
    assert len({one["name"] for one in devices}) == len(devices)
    h100 = next(one for one in devices if one["name"] == "H100-SXM-80GB")
    assert h100["capacity_bytes"] < 80 * GIB
    for command, names in (("models", [one["name"] for one in models]), ("devices", [one["name"] for one in devices])):
        shown = run(command)
        assert shown.status == 0
        assert all(name in shown.out for name in names)
