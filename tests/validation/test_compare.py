"""Records held against estimates: which rank, which quantity, what is covered, and what is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ullage
from ullage.cli.main import main
from ullage.units import GIB
from ullage.validation.summary import by_quantity

DATA = Path(__file__).parent / "data"
JOB_MD = Path(__file__).parents[2] / "docs" / "job.md"
JOB = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "layout": {"tp": 2, "pp": 4},
    "data": {"grad_accum": 8},
    "engine": {"name": "megatron", "zero_stage": 1},
}


def write(path: Path, *records: dict) -> Path:
    path.write_text(json.dumps(records))
    return path


def record(name: str, measured: dict, *, fits: bool = True, job: dict | None = None, grade: str = "A") -> dict:
    return {"id": name, "source": "s", "grade": grade, "job": job or JOB, "measured": measured, "fits": fits}


@pytest.fixture(scope="module")
def simumax() -> ullage.Validation:
    return ullage.validate([DATA / "simumax.json"])


def test_measured_runs_of_another_estimator_are_met(simumax: ullage.Validation) -> None:
    """github.com/MooreThreads/SimuMax docs/b200: torch.cuda.max_memory_allocated of eight B200."""
    assert not simumax.unsupported
    allocated = next(one for one in simumax.summary if one.quantity == "allocated")
    assert allocated.records == 12
    assert allocated.median < 0.01
    assert simumax.verdicts == {
        "fits_called_fits": 12, "fits_called_tight": 0, "fits_called_oom": 0,
        "oom_called_fits": 0, "oom_called_tight": 0, "oom_called_oom": 0,
    }  # fmt: skip


def test_which_rank_was_measured(tmp_path: Path) -> None:
    estimate = ullage.estimate(ullage.read_job(JOB))
    sizes = [one.allocated_bytes for one in estimate.ranks]
    assert len(set(sizes)) > 1
    expected = {"max": max(sizes), "last": sizes[-1], 0: sizes[0], 2: sizes[2]}
    records = [record(str(rank), {"allocated_gib": 1.0, "rank": rank}) for rank in expected]
    found = ullage.validate([write(tmp_path / "a.json", *records)])
    rows = {row.id: row for row in found.rows if row.quantity == "allocated"}
    assert {name: row.predicted for name, row in rows.items()} == {str(rank): size for rank, size in expected.items()}
    assert all(row.error_ratio == pytest.approx(row.predicted / GIB - 1) for row in rows.values())


@pytest.mark.parametrize(
    ("version", "kind"), [("2024-05-09", "reserved"), ("2024-09-24", "allocated"), (None, "allocated")]
)
def test_torchtune_tells_active_bytes(tmp_path: Path, version: str | None, kind: str) -> None:
    """pytorch/torchtune@30b8519e8 README.md: 8B with LoRA on an A6000, 2 packed sequences of 2,048, compiled: 30.3 GiB."""
    job = {
        "model": "llama-3.1-8b", "cluster": "1xRTX-A6000-48GB", "stack": "torchtune", "stack_version": version,
        "data": {"seq_len": 2048, "micro_batch": 2},
        "engine": {"name": "single", "options": {"attention_backend": "flex", "compile_loss": True}},
        "precision": "bf16", "optimizer": {"name": "adamw", "impl": "fused", "state": "bf16"}, "loss": {"kind": "chunked", "chunks": 8},
        "compile": True, "lora": {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}, "grad_clip": False,
    }  # fmt: skip
    measured = {"unspecified_gib": 30.3, "allocated_gib": 30.3, "reserved_gib": 30.3}
    file = write(tmp_path / "a.json", record("a", measured) | {"job": job})
    rows = {row.quantity: row for row in ullage.validate([file]).rows}
    assert rows["unspecified"].predicted == rows[kind].predicted
    assert rows["allocated"].predicted == pytest.approx(30.3 * GIB, rel=0.01)


def test_each_quantity_has_an_interval_around_it(tmp_path: Path) -> None:
    estimate = ullage.estimate(ullage.read_job(JOB))
    peak = estimate.peak
    measured = {f"{name}_gib": 10.0 for name in ("allocated", "reserved", "device", "unspecified")}
    rows = {row.quantity: row for row in ullage.validate([write(tmp_path / "a.json", record("a", measured))]).rows}
    assert rows["allocated"].predicted == peak.allocated_bytes
    assert rows["reserved"].predicted == rows["unspecified"].predicted == peak.reserved_bytes
    assert rows["device"].predicted == peak.device_bytes
    assert (rows["device"].low, rows["device"].high) == (peak.low_bytes, peak.high_bytes)
    for row in rows.values():
        if row.quantity != "fits":
            assert row.low < row.predicted < row.high
    fits = rows["fits"]
    assert (fits.measured, fits.predicted, fits.error_ratio, fits.low) == (1.0, 1.0, None, None)


def test_what_cannot_be_estimated_has_its_reason(tmp_path: Path) -> None:
    good = record("good", {"allocated_gib": 1.0})
    wrong = record("wrong", {"allocated_gib": 1.0}, job={**JOB, "layout": {"tp": 3}})
    strange = record("strange", {"allocated_gib": 1.0}, job={**JOB, "model": {"model_type": "mamba2"}})
    found = ullage.validate([write(tmp_path / "a.json", good, wrong, strange)])
    assert {row.id for row in found.rows} == {"good"}
    why = {one.id: one.why for one in found.unsupported}
    assert "layout.tp = 3" in why["wrong"]
    assert "model.model_type = mamba2" in why["strange"]
    assert "allowed" not in next(one.short for one in found.unsupported if one.id == "strange")


def test_a_crash_of_ours_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ullage.validation.compare.estimate", lambda job: 1 / 0)
    (crashed,) = ullage.validate([write(tmp_path / "a.json", record("a", {"allocated_gib": 1.0}))]).unsupported
    assert "a bug in ullage: ZeroDivisionError" in crashed.why


def test_verdicts_of_runs_that_ran_out(tmp_path: Path) -> None:
    large = {**JOB, "data": {"grad_accum": 8, "micro_batch": 64}}
    records = [
        record("oom", {}, fits=False, job=large),
        record("fits", {"rank": "max"}),
        record("wrong", {"rank": "max"}, fits=False),
    ]
    records[0]["measured"] = {"rank": "max"}
    verdicts = ullage.validate([write(tmp_path / "a.json", *records)]).verdicts
    assert verdicts["oom_called_oom"] == verdicts["fits_called_fits"] == verdicts["oom_called_fits"] == 1


def test_summary_of_known_errors(simumax: ullage.Validation) -> None:
    from dataclasses import replace

    row = next(row for row in simumax.rows if row.quantity == "reserved")
    rows = [
        replace(row, error_ratio=error / 100, measured=5, low=low, high=9)
        for error, low in zip(range(-5, 5), [0] * 9 + [6], strict=True)
    ]
    (one,) = by_quantity(rows)
    assert (one.records, one.covered) == (10, 0.9)
    assert one.median == pytest.approx(0.025)
    assert one.mean == pytest.approx(0.025)
    assert one.p90 == pytest.approx(0.04)
    assert one.worst == pytest.approx(0.05)


def test_json_is_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(DATA / "simumax.json"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    text = JOB_MD.read_text(encoding="utf-8")
    example = next(json.loads(one) for one in re.findall(r"```json\n(.*?)```", text, re.S) if '"verdicts"' in one)
    assert answer.keys() >= example.keys()
    assert answer["records"][0].keys() == example["records"][0].keys()
    assert answer["summary"][0].keys() == example["summary"][0].keys()
    assert answer["verdicts"].keys() == example["verdicts"].keys()
    memory = [row for row in answer["records"] if row["quantity"] in ("allocated", "reserved", "device")]
    assert memory
    assert all(row["measured"] > GIB for row in memory)


def test_a_person_reads_the_summary_and_each_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(DATA / "simumax.json"), str(DATA / "op_level.json")]) == 0
    short = capsys.readouterr().out
    assert "12 records: 12 estimated, 0 not supported" in short
    assert re.search(r"step_s +A +\d+ ", short)
    assert "op_level.json: 3 single operations" in short
    assert main(["validate", str(DATA / "simumax.json"), "--verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(short.splitlines()) + 20


def test_a_time_that_is_not_known_takes_no_memory_away(tmp_path: Path) -> None:
    unknown = {**JOB, "cluster": {"device": {"memory": "80GiB"}, "gpus_per_node": 8}}
    measured = {"allocated_gib": 1.0, "step_s": 1.0}
    found = ullage.validate([write(tmp_path / "a.json", record("one", measured), record("two", measured, job=unknown))])
    assert {(row.id, row.quantity) for row in found.rows if row.quantity != "fits"} == {
        ("one", "allocated"),
        ("one", "step_s"),
        ("two", "allocated"),
    }
    (why,) = found.unsupported
    assert why.id == "two"
    assert "_per_s" in why.why


def test_the_page_names_the_cause_of_each_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("run-a", {"allocated_gib": 1.0}), record("run-b", {"allocated_gib": 1.0})]
    causes = tmp_path / "misses.toml"
    causes.write_text('[[miss]]\nrecords = ["*-a"]\ncause = "it was made up"\n')
    assert main(["validate", str(write(tmp_path / "a.json", *records)), "--markdown", "--causes", str(causes)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| run-a ") and "it was made up" in line for line in lines)
    assert any(line.startswith("| run-b ") and "unexplained" in line for line in lines)
    assert not any("other grades" in line for line in lines)
    less = [record(name, {"allocated_gib": 1.0}, grade="B") for name in ("one-a", "two-a", "three")]
    assert main(["validate", str(write(tmp_path / "b.json", *less)), "--markdown", "--causes", str(causes)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (known,) = (line for line in lines if "it was made up" in line)
    assert known.startswith("| allocated | B | 2 | ")
    causes.write_text("[[miss]]\nrecords = 'x'\n")
    assert main(["validate", str(tmp_path / "a.json"), "--markdown", "--causes", str(causes)]) == 2
    assert "miss.0" in capsys.readouterr().err
