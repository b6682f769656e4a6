"""Texts and rows become one token file, and each file that cannot is told by its name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.training import job_of
from tests.train.texts import EOS, tokenizer

from ullage.errors import InvalidInput, Unsupported
from ullage.train.documents import _tokenizer, prepare, token_files
from ullage.train.settings import Training

JOB = job_of("single", 1, data={"seq_len": 4})  # a vocabulary of 384


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def training(tmp_path: Path, *data: Path, **keys: object) -> Training:
    return Training(data=data, out=tmp_path / "out", **keys)  # type: ignore[arg-type]


def written(tmp_path: Path, *data: Path, folder: Path | None) -> list[int]:
    one = training(tmp_path, *data, tokenizer=folder)
    prepare(JOB, one)
    (file,) = token_files(JOB, one)
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing half-done is left
    return np.fromfile(file, "<u2").tolist()


def told(ids: list[int], folder: Path) -> list[str]:
    """The documents again, as text."""
    documents: list[list[int]] = [[]]
    for token in ids:
        if token == EOS:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return [_tokenizer(folder).decode(one) for one in documents]


def parquet(path: Path, rows: dict[str, list[object]]) -> Path:
    from datasets import Dataset

    Dataset.from_dict(rows).to_parquet(path)
    return path


def test_a_text_is_one_document(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ullage.train.documents._BLOCK", 16)  # blocks end where lines do
    texts = ["Naïve lines\n\n  of a text\nwithout an end", "another\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    assert told(written(tmp_path, tmp_path / "0.txt", tmp_path / "1.txt", folder=folder), folder) == texts


def test_rows(tmp_path: Path, folder: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("one", "two\nlines")))
    table = parquet(tmp_path / "b.parquet", {"text": ["three", ""]})
    assert told(written(tmp_path, lines, table, folder=folder), folder) == ["one", "two\nlines", "three", ""]


def test_conversations(tmp_path: Path, folder: Path) -> None:
    said = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"messages": said}) + "\n")
    assert told(written(tmp_path, lines, folder=folder), folder) == ["user: why\nassistant: because\n"]


def test_token_numbers_need_no_tokenizer(tmp_path: Path) -> None:
    table = parquet(tmp_path / "a.parquet", {"input_ids": [[1, 2, 3], [383]]})
    assert written(tmp_path, table, folder=None) == [1, 2, 3, 383]


def test_made_once(tmp_path: Path, folder: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("before")
    one = training(tmp_path, text, tokenizer=folder)
    prepare(JOB, one)
    (file,) = token_files(JOB, one)
    time = file.stat().st_mtime_ns
    prepare(JOB, one)
    assert file.stat().st_mtime_ns == time
    text.write_text("other words")
    assert token_files(JOB, one) != (file,)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "empty.txt: is empty"),
        ("empty.jsonl", b"", "empty.jsonl: is empty"),
        ("latin.txt", b"na\xefve", "is no UTF-8 text: byte 2"),
        ("torn.jsonl", b'{"text": "a', "torn.jsonl: cannot be read"),
        ("other.jsonl", b'{"body": "a"}', "has the fields body; allowed: text or messages or input_ids"),
        ("none.jsonl", b'{"text": "a"}\n{"text": null}', "has no text in row 2"),
        ("large.jsonl", b'{"input_ids": [1, 384]}', "becomes token 384"),
        ("torn.parquet", b"PAR1nothing", "torn.parquet: cannot be read"),
        ("missing.txt", None, "missing.txt: cannot be read: No such file"),
    ],
)
def test_a_wrong_file_is_told(name: str, content: bytes | None, said: str, tmp_path: Path, folder: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=said):
        written(tmp_path, path, folder=folder)
    assert not [*tmp_path.rglob("*.part")]


def test_a_file_where_the_folder_should_be(tmp_path: Path, folder: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("words")
    with pytest.raises(InvalidInput, match=r"--out = .*a.txt/tokens: cannot be written: Not a directory"):
        prepare(JOB, Training(data=(text,), out=text, tokenizer=folder))


def test_what_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="is no text that is read"):
        token_files(JOB, training(tmp_path, tmp_path / "a.csv"))
    with pytest.raises(Unsupported, match="is a token file among texts"):
        token_files(JOB, training(tmp_path, tmp_path / "a.txt", tmp_path / "a.npy"))


def test_a_tokenizer_that_is_missing_or_another(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("words")
    with pytest.raises(InvalidInput, match=r"--tokenizer: is missing; name the folder"):
        prepare(JOB, training(tmp_path, text))
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidInput, match="holds no tokenizer"):
        prepare(JOB, training(tmp_path, text, tokenizer=tmp_path / "none"))
    ends = tokenizer(tmp_path / "ends", eos=False)
    with pytest.raises(InvalidInput, match="has no end-of-sequence token"):
        prepare(JOB, training(tmp_path, text, tokenizer=ends))
    silent = tokenizer(tmp_path / "silent", chat=False)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "why"}]}\n')
    with pytest.raises(InvalidInput, match="has no chat template"):
        prepare(JOB, training(tmp_path, lines, tokenizer=silent))
