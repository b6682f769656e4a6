"""Selective recomputation by op in transformers' layers: torchtitan's policy, in torch's own selective checkpoint.

Kept: what fused attention returns, what is reduced over ranks, and every second matmul with a weight, the first of a layer among them
(kernels/transformers_selective.py is its account). All else runs again: norms, rotary embeddings, activations, casts, the other matmuls,
and the scores of attention that is not fused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

_aten, _reduced = torch.ops.aten, torch.ops._c10d_functional
MATMULS = frozenset({_aten.mm.default, _aten.addmm.default})
KEPT = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _reduced.all_reduce.default,
        _reduced.reduce_scatter_tensor.default,
    }
)


def contexts() -> tuple[Any, Any]:
    """``context_fn`` of one checkpoint: the contexts of a layer's forward and of its recomputation."""
    matmuls: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, op: Any, *_: object, **__: object) -> CheckpointPolicy:
        kept = op in KEPT
        if op in MATMULS:
            matmuls[context.is_recompute] += 1
            kept = bool(matmuls[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    made: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return made
