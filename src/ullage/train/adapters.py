"""The frozen base beside adapters: no checkpoint has it, so a run says which one it is, and leaves it where its adapters find it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ullage.job.job import Job, Lora
from ullage.trace.models import build
from ullage.train.settings import Training
from ullage.units import KIB

FOLDER = "base"
_SAMPLE, _SAMPLES = 4 * KIB, 64
"""Bytes that are read at once, and how many times of each file."""


def adapted(job: Job, training: Training) -> dict[str, object]:
    """What adapters must have been trained as to be gone on with, by name."""
    lora = job.lora
    return {
        "lora": None if lora is None else [*_shape(lora)],
        "--weights": None if lora is None or training.weights is None else fingerprint(training.weights),
    }


def _shape(lora: Lora) -> Iterator[object]:
    yield from (lora.rank, lora.alpha, sorted(lora.targets), lora.dtype)
    yield from ([lora.dora, sorted(lora.modules_to_save)] if lora.dora or lora.modules_to_save else [])


def fingerprint(weights: Path) -> str:
    """Of a folder's safetensors: their names, sizes, heads, and samples of what is in them."""
    found = hashlib.sha256()
    for path in sorted(weights.glob("*.safetensors")):
        found.update(f"{path.name} {path.stat().st_size}".encode())
        for piece in _samples(path):
            found.update(piece)
    return found.hexdigest()[:16]


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(size * number // _SAMPLES)
            yield file.read(_SAMPLE)


def save(model: Any, adapters: dict[str, torch.Tensor], job: Job, training: Training, folder: Path) -> None:
    """A folder that PeftModel.from_pretrained loads; its adapter_config.json names the base. A drawn base is written into OUT/base.

    model: a PeftModel of the job, of whatever weights.
    """
    if training.weights is None:
        _drawn(job, training.seed).save_pretrained(training.out / FOLDER)
    (config,) = model.peft_config.values()
    config.base_model_name_or_path = str((training.weights or training.out / FOLDER).resolve())
    model.save_pretrained(folder, state_dict=adapters, save_embedding_layers=False)


def _drawn(job: Job, seed: int) -> Any:
    """The base as every run of the job begins with it, from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = build(job)
        return model.unload()
