"""Which sequences a rank sees in a step: the step's are dealt out micro-batch by micro-batch, over the data-parallel ranks."""

from __future__ import annotations

import torch
from torch import distributed

from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.train.settings import Settings, Training
from ullage.train.tokens import TOKEN_FILES, Packed, Random, Tokens


def tokens_of(job: Job, settings: Settings | Training) -> Tokens:
    vocab, seq_len = vocabulary(job), job.data.seq_len
    if not settings.data:
        return Random(vocab, seq_len, settings.seed)
    for path in settings.data:
        if path.suffix not in TOKEN_FILES:
            raise Unsupported("is no token file", key="--data", value=str(path), allowed=", ".join(TOKEN_FILES))
    return Packed(settings.data, vocab, seq_len, settings.seed)


def micro_batches(job: Job, tokens: Tokens, step: int) -> list[torch.Tensor]:
    """Token tensors (micro_batch, seq_len) of this rank for the step, counted from 0, one for each micro-batch.

    The ranks of a replica, tensor-parallel neighbours and pipeline stages, see the same ones. One device that runs every rank's
    (composed.alone) meets the same sequences in the same micro-batches.
    """
    data, ranks = job.data, job.layout.dp
    first = step * data.grad_accum * ranks
    rank = _rank() // job.layout.tp % ranks
    return [
        torch.stack([tokens.sequence(number * data.micro_batch + index) for index in range(data.micro_batch)])
        for number in range(first + rank, first + data.grad_accum * ranks, ranks)
    ]


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def vocabulary(job: Job) -> int:
    vocab = job.model.keys.get("vocab_size")
    if not isinstance(vocab, int):
        from ullage.trace.models import config_of

        vocab = config_of(job).vocab_size
    assert isinstance(vocab, int), "a language model has a vocabulary"
    return vocab
