"""CUDA graphs over parts of layers (``cuda_graph_impl: transformer_engine``, ``cuda_graph_scope: attn`` or ``mamba``).

A captured part runs on addresses of its own: what it saves lies in the graphs' pool, which holds it from capture on. While training runs
torch hands nothing out for it; its input is a static tensor, its output lies in the pool. Sources:
megatron/core/transformer/cuda_graphs.py, TransformerEngine pytorch/graph.py make_graphed_callables.
"""

from __future__ import annotations

from functools import lru_cache

from ullage.frozen import FrozenMap, replace
from ullage.kernels.step import Buffer, Context, Step

ENDS = {"attn": "attention_add", "mamba": "mamba_add"}
"""The step that a part ends with, by its name in the scope: everything of a layer up to the residual addition after it."""


def captures(context: Context) -> bool:
    """Whether parts of layers are graphs."""
    return context.option("cuda_graph_impl") == "transformer_engine" and bool(_ends(context))


def _ends(context: Context) -> tuple[str, ...]:
    scope = context.option("cuda_graph_scope")
    names = scope if isinstance(scope, tuple) else (scope,)
    return tuple(ENDS[str(name)] for name in names if name in ENDS)


@lru_cache(maxsize=256)
def launched(context: Context) -> Context:
    """The same without graphs. One replays the kernels that it was captured from: it saves their launches, not their work."""
    options = {name: value for name, value in context.options.items() if name != "cuda_graph_impl"}
    return replace(context, options=FrozenMap(options)) if captures(context) else context


def captured(steps: tuple[Step, ...], context: Context) -> tuple[Step, ...]:
    """The steps that a layer's graph is made of; none where the block is no layer, or none that is captured."""
    names = [step.name for step in steps]
    ends = [names.index(end) for end in _ends(context) if end in names]
    return steps[: max(ends) + 1] if ends else ()


def replayed(steps: tuple[Step, ...], context: Context) -> tuple[Step, ...]:
    """The block with its captured part as one step that allocates nothing; but for the output of a layer that is captured whole, which
    counts where the next layer has it."""
    part = captured(steps, context)
    if not part:
        return steps
    (output,) = part[-1].writes
    whole = len(part) == len(steps)
    static = Buffer(f"{output.name}.static", 0, "static output of the layer's graph")
    graph = Step(
        name="layer_graph",
        reads=("x",),
        writes=(output,) if whole else (static,),
        aliases=() if whole else ((output, static.name),),
        weights=tuple(weight for step in part for weight in step.weights),
        module="layer_graph",
    )
    return (graph, *steps[len(part) :])
