"""``ullage trace``, as a person runs it."""

import json
from pathlib import Path

import pytest

from ullage.cli.main import main

FACTORIES = Path(__file__).with_name("factories.py")
SMALL = {
    "schema": 1,
    "model": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 64,
    },
    "cluster": "1xH100-SXM-80GB",
    "engine": {"name": "single"},
    "precision": "bf16",
    "data": {"seq_len": 32, "micro_batch": 2, "grad_accum": 2},
}  # fmt: skip


def test_a_factory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", f"{FACTORIES}:mlp"]) == 0
    printed = capsys.readouterr().out
    for part in ("Peak", "Account at the peak", "Saved for backward", "Phases"):
        assert part in printed


def test_json_holds_every_allocation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", f"{FACTORIES}:fsdp2", "--world", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["world"] == 4
    assert sum(line["bytes"] for line in answer["ledger"]) == answer["peak"]["allocated_bytes"]
    live = [
        one["bytes"]
        for one in answer["allocations"]
        if one["birth"] <= answer["peak"]["at"] and (one["death"] is None or one["death"] > answer["peak"]["at"])
    ]
    assert sum(live) == answer["peak"]["allocated_bytes"]


@pytest.mark.parametrize(
    ("engine", "gpus", "precision"), [("single", 1, "bf16"), ("ddp", 2, "bf16-mixed"), ("fsdp2", 2, "bf16-mixed")]
)
def test_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, gpus: int, precision: str) -> None:
    job = SMALL | {"cluster": f"{gpus}xH100-SXM-80GB", "engine": {"name": engine}, "precision": precision}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    assert main(["trace", str(path), "--recompute", "full", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world"] == gpus


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_estimate_of_any_module(tmp_path: Path, capsys: pytest.CaptureFixture[str], recompute: str) -> None:
    job = {"schema": 1, "cluster": "8xH100-SXM-80GB", "engine": {"name": "fsdp2"}, "recompute": recompute}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    assert main(["trace", f"{FACTORIES}:convolutional", "--estimate", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert sum(line["bytes"] for line in answer["ledger"]) == answer["peak"]["allocated_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to trace"),
        ([f"{FACTORIES}:mlp", "--tp", "2"], "--tp 2: goes with a job"),
        ([f"{FACTORIES}:mlp", "--steps", "0"], "--steps = 0"),
        ([f"{FACTORIES}:mlp", "--world", "2", "--rank", "2"], "rank = 2"),
        ([f"{FACTORIES}:mlp", "--format", "html"], "--format: goes with --out"),
        ([f"{FACTORIES}:mlp", "--json", "--format", "html", "--out", "x"], "--json"),
        ([f"{FACTORIES}:mlp", "--estimate", "x.yaml", "--world", "2"], "--world"),
        ([f"{FACTORIES}:no_such"], "has no no_such"),
        (["--model", "llama-3.2-1b", "--cluster", "2xH100-SXM-80GB", "--world", "2"], "--world = 2: goes with a factory"),
        (["--model", "llama-3.2-1b", "--cluster", "2xH100-SXM-80GB", "--pp", "2"], "layout.pp = 2: is not traced from a job"),
    ],
)  # fmt: skip
def test_wrong_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *arguments]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
