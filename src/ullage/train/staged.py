"""A transformers model cut into the stages of a pipeline: each a model of the same names that keeps its part alone.

What a stage does not hold lets its input through, so that layers keep the numbers by which models choose their masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.memory.rank import layers_per_chunk
from ullage.trace.checkpointed import recompute_stage

_PARTS = ("embed_tokens", "layers", "norm")


class _Through(nn.Module):
    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return hidden


def staged(job: Job, model: Any, index: int) -> nn.Module:
    """Makes stage ``index`` of the whole model: its ``forward`` takes token numbers or what the stage before returns, and labels.

    It returns (micro_batch, seq_len, hidden), the last stage the mean loss. Raises Unsupported for a model that transformers does not cut.
    """
    base: Any = getattr(model, model.base_model_prefix)
    if not model.supports_pp_plan or any(not hasattr(base, part) for part in _PARTS):
        raise Unsupported("has no plan of pipeline stages in transformers", key="layout.pp", value=job.layout.pp)
    split = layers_per_chunk(len(base.layers), job.layout)
    start, last = sum(split[:index]), index == len(split) - 1
    for number in range(len(base.layers)):
        if not start <= number < start + split[index]:
            base.layers[number] = _Through()
    if index:
        base.embed_tokens = _Through()
    if not last:
        base.norm, model.lm_head = _Through(), _Through()
    recompute_stage(job, model)
    whole, given = model.forward, "inputs_embeds" if index else "input_ids"

    def forward(hidden: torch.Tensor, *, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        if last:
            found = whole(**{given: hidden}, labels=labels, use_cache=False).loss
        else:
            found = base(**{given: hidden}, use_cache=False).last_hidden_state
        return found

    model.forward = forward
    found: nn.Module = model
    return found
