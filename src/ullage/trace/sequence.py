"""Sequence parallelism in transformers' models: its own plan of rows and columns, with the stream between layers cut by tokens.

The stream is a DTensor, so that the models' code reads its whole length. Norms run on a rank's tokens; attention and MLP gather them once
each, and their last projection's terms are reduce-scattered. (transformers has styles for this and a switch, which no plan uses.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import (
    EmbeddingParallel,
    RowwiseParallel,
    SequenceParallel,
    TensorParallelLayer,
)

_TOKENS = 1
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GATHERS = ("self_attn", "mlp")


class _Cut(EmbeddingParallel):
    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        whole = super().transform_output_post_forward(module, output, mesh)  # type: ignore[no-untyped-call]
        return whole.redistribute(placements=[Shard(_TOKENS)])


class _Gathered(TensorParallelLayer):
    """A module that reads the whole stream, its first argument or ``hidden_states``."""

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> tuple[Any, Any]:
        if args:
            return (args[0].redistribute(placements=[Replicate()]), *args[1:]), kwargs
        whole = kwargs["hidden_states"].redistribute(placements=[Replicate()])
        return args, {**kwargs, "hidden_states": whole}


_STYLES: Mapping[str, Any] = {
    "ullage_cut": _Cut(shard_dim=0, use_local_output=False),
    "ullage_gathered": _Gathered(),
    "ullage_scattered": RowwiseParallel(output_layouts=Shard(_TOKENS), use_local_output=False),
    "ullage_tokens": SequenceParallel(sequence_dim=_TOKENS, use_local_output=False),
}
_INSTEAD = {"embedding_rowwise": "ullage_cut", "rowwise": "ullage_scattered"}


def plan_of(model: nn.Module, layers: Iterable[nn.Module], plan: Mapping[str, str]) -> dict[str, str]:
    """The plan of a model whose layers are a llama's, names of modules and parameters to styles."""
    for name, style in _STYLES.items():
        ALL_PARALLEL_STYLES.register(name, style)
    found = {name: _INSTEAD.get(style, style) for name, style in plan.items()}
    inside = set(layers)
    for name, module in model.named_modules():
        if module in inside:
            found |= {f"{name}.{norm}": "ullage_tokens" for norm in _NORMS}
            found |= {f"{name}.{part}": "ullage_gathered" for part in _GATHERS}
    return {**found, "model.norm": "ullage_tokens"}
