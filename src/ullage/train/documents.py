"""Texts and rows as a token file: documents one behind the other, the tokenizer's end-of-sequence token after each.

A ``.txt`` file is one document. A row of JSON lines or Parquet, read through datasets, has ``text``, or ``messages`` for the tokenizer's
chat template, or ``input_ids``, which are taken as they are. The file is written once, under the run's folder, and mapped by every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from ullage.errors import InvalidInput, Unsupported
from ullage.job.job import Job
from ullage.train.batches import vocabulary
from ullage.train.settings import Training
from ullage.train.tokens import TOKEN_FILES, too_short, type_of_bin
from ullage.units import MIB

TEXTS = (".txt",)
ROWS = (".jsonl", ".json", ".parquet")
_BLOCK = MIB
"""Characters of a text that are tokenised together; a block ends where a line does."""
_ROWS_AT_ONCE = 256
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
_FIELDS = ("text", "messages", "input_ids")


def token_files(job: Job, training: Training) -> tuple[Path, ...]:
    """The files that tokens are read from: those given, or the one that ``prepare`` makes of them."""
    kinds = {path.suffix for path in training.data}
    if kinds <= {*TOKEN_FILES}:
        return training.data
    for path in training.data:
        if path.suffix not in (*TEXTS, *ROWS):
            mixed = path.suffix in TOKEN_FILES
            raise Unsupported(
                "is a token file among texts" if mixed else "is no text that is read",
                key="--data",
                value=str(path),
                allowed="token files alone, or texts alone" if mixed else ", ".join((*TEXTS, *ROWS, *TOKEN_FILES)),
            )
    return (training.out / "tokens" / f"{_fingerprint(job, training)}.bin",)


def prepare(job: Job, training: Training) -> None:
    """Writes the token file of texts, whole or not at all, where it is not there yet. A tokenizer that is none is told for token files too:
    it goes with the trained model."""
    folder = tokenizer_folder(job, training)
    target = token_files(job, training)[0]
    if target in training.data or target.exists():
        return
    vocab = vocabulary(job)
    part = target.with_suffix(f".{uuid4().hex[:8]}.part")  # several nodes may make the same
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            whole = 0
            for path in training.data:
                count = 0
                for ids in _documents(path, folder):
                    _append(file, ids, path, vocab)
                    count += len(ids)
                if not count:
                    raise InvalidInput("is empty", key="--data", value=str(path))
                whole += count
            if whole < job.data.seq_len:
                raise too_short(training.data, whole, job.data.seq_len)
            file.flush()
            os.fsync(file.fileno())
        part.rename(target)
    except OSError as error:
        raise InvalidInput(
            f"cannot be written: {error.strerror or error}", key="--out", value=str(target.parent)
        ) from None
    finally:
        with suppress(OSError):  # there may be no such folder
            part.unlink()


def tokenizer_folder(job: Job, training: Training) -> Path | None:
    """Where the tokenizer is: --tokenizer, or the folder of the weights, or of the model, if it holds one."""
    if training.tokenizer is not None:
        return _known(training.tokenizer)
    model = Path(job.model.name)
    places = (training.weights, model if model.is_dir() else model.parent if model.is_file() else None)
    return next((one for one in places if one is not None and _holds_tokenizer(one)), None)


def _known(folder: Path) -> Path:
    if not _holds_tokenizer(folder):
        what = "holds no tokenizer" if folder.is_dir() else "is no folder"
        raise InvalidInput(what, key="--tokenizer", value=str(folder), allowed=f"one with {' or '.join(_TOKENIZERS)}")
    return folder


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


@cache
def _tokenizer(folder: Path | None) -> Any:
    if folder is None:
        raise InvalidInput("is missing", key="--tokenizer", remedy="name the folder of the model's tokenizer")
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises no narrower kind (a broken tokenizer.json)
        reason = " ".join(str(error).split())[:160]
        raise InvalidInput(f"cannot be read: {reason}", key="--tokenizer", value=str(folder)) from None
    if found.eos_token_id is None:
        raise InvalidInput("has no end-of-sequence token", key="--tokenizer", value=str(folder))
    return found


def _documents(path: Path, folder: Path | None) -> Iterator[list[int]]:
    """Token numbers, in pieces; each document ends with the end-of-sequence token."""
    if path.suffix in TEXTS:
        return _text(path, folder)
    return _rows(path, folder)


def _text(path: Path, folder: Path | None) -> Iterator[list[int]]:
    some = False
    try:
        with path.open(encoding="utf-8") as file:
            while block := "".join(file.readlines(_BLOCK)):
                some = True
                yield _ids(folder, [block])[0]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"is no UTF-8 text: byte {error.start}", key="--data", value=str(path)) from None
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", key="--data", value=str(path)) from None
    if some:
        yield [_tokenizer(folder).eos_token_id]


def _rows(path: Path, folder: Path | None) -> Iterator[list[int]]:
    if find_spec("datasets") is None:
        raise Unsupported("is not installed", key="datasets", remedy="pip install 'ullage[train]'")
    if not path.stat().st_size:
        raise InvalidInput("is empty", key="--data", value=str(path))
    for number, batch in enumerate(_batches(path)):
        yield from _of_rows(batch, folder, path, number * _ROWS_AT_ONCE)


def _batches(path: Path) -> Iterator[dict[str, list[Any]]]:
    from datasets import Dataset, logging  # type: ignore[import-untyped]
    from datasets.exceptions import DatasetsError  # type: ignore[import-untyped]

    logging.set_verbosity(logging.CRITICAL)  # what it logs is raised too
    read: Any = Dataset.from_parquet if path.suffix == ".parquet" else Dataset.from_json
    try:
        yield from read(str(path), streaming=True).iter(_ROWS_AT_ONCE)
    except (DatasetsError, OSError, ValueError, TypeError) as error:  # pyarrow's and json's are ValueErrors
        reason = " ".join(str(error.__cause__ or error).split())[:160]
        raise InvalidInput(f"cannot be read: {reason}", key="--data", value=str(path)) from None


def _of_rows(batch: dict[str, list[Any]], folder: Path | None, path: Path, first: int) -> Iterable[list[int]]:
    field = next((name for name in _FIELDS if name in batch), None)
    if field is None:
        raise InvalidInput(
            f"has the fields {', '.join(batch)[:160]}", key="--data", value=str(path), allowed=" or ".join(_FIELDS)
        )
    kind = str if field == "text" else list
    for number, value in enumerate(batch[field], first + 1):
        if not isinstance(value, kind):
            raise InvalidInput(f"has no {field} in row {number}", key="--data", value=str(path))
    if field == "input_ids":
        return batch[field]
    if field == "text":
        return [[*ids, _tokenizer(folder).eos_token_id] for ids in _ids(folder, batch[field])]
    return [_conversation(folder, messages) for messages in batch[field]]


def _ids(folder: Path | None, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = _tokenizer(folder)(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _conversation(folder: Path | None, messages: list[Any]) -> list[int]:
    tokenizer = _tokenizer(folder)
    if not tokenizer.chat_template:
        raise InvalidInput("has no chat template, and the data has messages", key="--tokenizer", value=str(folder))
    ids: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _append(file: Any, ids: list[int], path: Path, vocab: int) -> None:
    array = np.asarray(ids, np.int64)
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < vocab:
        raise InvalidInput(
            f"becomes token {int(array.max())}",
            key="--data",
            value=str(path),
            allowed=f"0 to {vocab - 1}, the model's vocabulary",
            remedy="the tokenizer is another model's",
        )
    file.write(array.astype(type_of_bin(vocab)).tobytes())


def _fingerprint(job: Job, training: Training) -> str:
    """Of what the token file depends on: files by name, size and time."""
    folder = tokenizer_folder(job, training)
    tokenizer = [folder / name for name in _TOKENIZERS if folder is not None and (folder / name).is_file()]
    files = [_stamp(path) for path in (*training.data, *tokenizer)]
    return hashlib.sha256(json.dumps([files, vocabulary(job)]).encode()).hexdigest()[:16]


def _stamp(path: Path) -> list[object]:
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", key="--data", value=str(path)) from None
    return [str(path.resolve()), found.st_size, found.st_mtime_ns]
