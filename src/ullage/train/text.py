"""Text, JSONL and Parquet as one token file: documents through the folder's tokenizer, an end-of-text token behind each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ullage.errors import InvalidInput, Unsupported

READERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_BATCH = 256
"""Documents that the tokenizer is handed at once."""


def tokenized(paths: Sequence[Path], tokenizer: Path, column: str, folder: Path, vocab: int) -> Path:
    """The token file of these texts in ``folder``, made where it is not there yet. Its name says what it was made of.

    Raises InvalidInput for files without text, and where the tokenizer has more tokens than the model.
    """
    target = folder / f"tokens-{_name(paths, tokenizer, column)}.npy"
    if target.exists():
        return target
    made = _tokenizer(tokenizer)
    if len(made) > vocab:
        raise InvalidInput(
            f"has {len(made)} tokens, and the model's vocabulary {vocab}", key="--tokenizer", value=str(tokenizer)
        )
    folder.mkdir(parents=True, exist_ok=True)
    raw, part = target.with_suffix(".raw"), target.with_suffix(".part")
    try:
        count = 0
        with raw.open("wb") as file:
            for batch in _batches(paths, column):
                for ids in made(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                    np.asarray([*ids, made.eos_token_id], dtype="<u4").tofile(file)
                    count += len(ids) + 1
        if not count:
            raise InvalidInput("hold no text", key="--data", value=", ".join(map(str, paths))[:200])
        array = np.lib.format.open_memmap(part, mode="w+", dtype="<u4", shape=(count,))
        array[:] = np.memmap(raw, dtype="<u4", mode="r")
        array.flush()
        part.rename(target)
    finally:
        raw.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    return target


def _name(paths: Sequence[Path], tokenizer: Path, column: str) -> str:
    try:
        facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", key="--data", value=str(error.filename)) from None
    said = json.dumps([facts, str(tokenizer.resolve()), column])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    of: Any = AutoTokenizer
    try:
        made = of.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InvalidInput(f"holds no tokenizer: {reason}", key="--tokenizer", value=str(folder)) from None
    if made.eos_token_id is None:
        raise InvalidInput("has no end-of-text token to put between documents", key="--tokenizer", value=str(folder))
    return made


def _batches(paths: Sequence[Path], column: str) -> Iterator[list[str]]:
    batch: list[str] = []
    for path in paths:
        for text in _documents(path, column):
            batch.append(text)
            if len(batch) == _BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def _documents(path: Path, column: str) -> Iterator[str]:
    """A text file is one document, a row of JSONL or Parquet is one."""
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError
    except ImportError:
        raise Unsupported("is not installed", key="datasets", remedy="pip install 'ullage[train]'") from None
    kind = READERS.get(path.suffix)
    if kind is None:
        allowed = ", ".join((*READERS, ".bin", ".npy"))
        raise InvalidInput("is of a kind that is not read", key="--data", value=str(path), allowed=allowed)
    if not path.stat().st_size:
        raise InvalidInput("is empty", key="--data", value=str(path))
    split = {"sample_by": "document"} if kind == "text" else {}
    name = "text" if kind == "text" else column
    try:
        for row in load_dataset(kind, data_files=str(path), split="train", streaming=True, **split):
            text = row.get(name)
            if not isinstance(text, str):
                raise InvalidInput(
                    f"has a row without text in column {name}", key="--data", value=str(path), allowed=", ".join(row)
                )
            if text:
                yield text
    except (DatasetGenerationError, ValueError, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InvalidInput(f"cannot be read as {kind}: {reason}", key="--data", value=str(path)) from None
