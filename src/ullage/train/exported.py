"""A trained model as a folder that ``from_pretrained`` loads: safetensors, config.json, and the tokenizer's files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ullage.errors import InvalidInput
from ullage.trace.models import build
from ullage.train.composed import Run
from ullage.train.documents import tokenizer_folder
from ullage.train.settings import Training

FOLDER = "hf"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export(run: Run, training: Training) -> Path:
    """OUT/hf, in the type that parameters have in training; every rank calls it, and the first holds the whole weights and writes."""
    target = training.out / FOLDER
    weights = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if distributed.is_initialized() and distributed.get_rank():
        return target
    with torch.device("meta"):
        model = build(run.job)
    model.config.use_cache = True  # type: ignore[union-attr]
    part = target.with_suffix(".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        with _quiet():
            model.save_pretrained(part, state_dict=weights)  # type: ignore[operator]
        folder = tokenizer_folder(run.job, training)
        for name in _TOKENIZER:
            if folder is not None and (folder / name).is_file():
                shutil.copy(folder / name, part / name)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except OSError as error:
        raise InvalidInput(f"cannot be written: {error.strerror or error}", key="--out", value=str(target)) from None
    return target


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers imports what logs to standard output, where the answer goes."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
