"""A trained model as a folder that ``from_pretrained`` loads: safetensors, config.json, and the tokenizer's files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ullage.errors import InvalidInput
from ullage.job.job import Job
from ullage.trace.models import build
from ullage.train import adapters
from ullage.train.checkpoints import weights_in
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


def export(job: Job, training: Training, checkpoint: Path) -> Path:
    """OUT/hf, of a checkpoint of whatever layout, in the type that parameters have in training; one process holds the whole weights.

    Adapters are a folder of their own, which PeftModel.from_pretrained loads beside their base.
    """
    target = training.out / FOLDER
    weights = weights_in(checkpoint)
    with torch.device("meta"):
        model = build(job)
    if job.lora is None:
        model.config.use_cache = True  # type: ignore[union-attr]
    part = target.with_suffix(".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        with _quiet():
            if job.lora is not None:
                adapters.save(model, weights, job, training, part)
            else:
                model.save_pretrained(part, state_dict=weights)  # type: ignore[operator]
        folder = tokenizer_folder(job, training)
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
