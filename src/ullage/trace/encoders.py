"""Which of transformers' classes trains a model, and on what batch: an encoder's head says it, a decoder predicts the next token."""

from __future__ import annotations

from typing import Any

import torch

from ullage.model.spec import DecoderSpec, Task

_CLASSES = {
    "masked": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "sequence": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
}


def class_of(spec: DecoderSpec) -> Any:
    """transformers' Auto class."""
    import transformers

    decoder = "AutoModelForCausalLM" if spec.encoder is None else "AutoModelForSeq2SeqLM"
    name = decoder if spec.task is None else _CLASSES[spec.task.kind]
    return getattr(transformers, "AutoModelForImageClassification" if spec.patches is not None else name)


def batch_of(spec: DecoderSpec, sequences: int, tokens: int) -> dict[str, Any]:
    """Arguments of one forward: ids (sequences, tokens) or images, and labels."""
    if spec.task is None:
        ids = torch.randint(0, spec.vocab, (sequences, tokens))
        return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    if spec.patches is not None:
        pixels = torch.randn(sequences, spec.patches.channels, *spec.patches.image)
        return {"pixel_values": pixels, "labels": _labels(spec.task, sequences, tokens)}
    ids = torch.randint(1, spec.vocab, (sequences, tokens))
    if spec.task.kind in ("masked", "pretraining"):
        of_pairs = {"next_sentence_label": torch.zeros(sequences, dtype=torch.long)}
        return {"input_ids": ids, "labels": ids.clone(), **(of_pairs if spec.task.kind == "pretraining" else {})}
    return {"input_ids": ids, "labels": _labels(spec.task, sequences, tokens)}


def _labels(task: Task, sequences: int, tokens: int) -> torch.Tensor:
    if task.kind == "tokens":
        return torch.zeros(sequences, tokens, dtype=torch.long)
    if task.problem == "classes":
        return torch.zeros(sequences, dtype=torch.long)
    return torch.zeros(sequences, task.labels)
