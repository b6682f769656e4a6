"""Each kind of data through the command: it trains, and where it is empty or short it says so before a process is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.training import job_of
from tests.train.texts import EOS, tokenizer

from ullage.cli.main import main
from ullage.job.write import job_to_dict

WORDS = "one text of some words that is long enough for a few sequences. " * 4
SEQ_LEN = 24


def parquet(path: Path, rows: dict[str, list[object]]) -> None:
    from datasets import Dataset

    Dataset.from_dict(rows).to_parquet(path)


def lines(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TALK = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
IDS = [number % EOS for number in range(12 * SEQ_LEN)]
KINDS: dict[str, Callable[[Path], object]] = {
    "a.txt": lambda path: path.write_text(WORDS),
    "a.jsonl": lambda path: lines(path, {"text": WORDS}, {"text": WORDS}),
    "talk.jsonl": lambda path: lines(path, {"messages": TALK}),
    "a.json": lambda path: path.write_text(json.dumps([{"text": WORDS}])),
    "a.parquet": lambda path: parquet(path, {"text": [WORDS, WORDS]}),
    "ids.parquet": lambda path: parquet(path, {"input_ids": [IDS]}),
    "a.npy": lambda path: np.save(path, np.array(IDS, dtype=np.uint16)),
    "a.bin": lambda path: np.array(IDS, dtype="<u2").tofile(path),
}
EMPTY: dict[str, Callable[[Path], object]] = {
    "a.txt": Path.touch,
    "a.jsonl": Path.touch,
    "a.json": lambda path: path.write_text("[]"),
    "a.parquet": lambda path: parquet(path, {"text": []}),
    "a.npy": lambda path: np.save(path, np.array([], dtype=np.uint16)),
    "a.bin": Path.touch,
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """On one device, in this process; data come last."""
    job = tmp_path / "job.json"
    job.write_text(json.dumps(job_to_dict(job_of("single", 1, model={"num_hidden_layers": 1}))))
    words = tokenizer(tmp_path / "tokenizer")
    return ["train", str(job), "--out", str(tmp_path / "out"), "--tokenizer", str(words), "--json", "--data"]


@pytest.mark.parametrize("name", KINDS)
def test_it_is_trained_on(name: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    KINDS[name](path)
    assert main([*command, str(path), "--steps", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["last"]["step"] == 2
    assert found["last"]["tokens"] == 2 * 4 * SEQ_LEN  # four sequences a step


@pytest.mark.parametrize("name", EMPTY)
def test_it_is_empty(name: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    EMPTY[name](path)
    assert main([*command, str(path)]) == 2
    assert f"ullage: --data = {path}: is empty\n" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "tokens"), [("a.txt", 9), ("a.bin", 4)])  # with the end of the text
def test_it_is_shorter_than_a_sequence(
    name: str, tokens: int, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(b"abcdefgh")
    assert main([*command, str(path)]) == 2
    said = capsys.readouterr().err
    assert f"--data = {path}: {tokens} tokens, which make no sequence of data.seq_len = 24; give it more" in said
