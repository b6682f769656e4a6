"""CUDA graphs over parts of a layer (``cuda_graph_impl: transformer_engine``, ``cuda_graph_scope: attn``).

A captured part runs on addresses of its own: what it saves lies in the graphs' pool, which holds it from capture on. While training runs
torch hands nothing out for it; its input is a static tensor, its output lies in the pool. Sources:
megatron/core/transformer/cuda_graphs.py, TransformerEngine pytorch/graph.py make_graphed_callables.
"""

from __future__ import annotations

from ullage.kernels.step import Buffer, Context, Step

LAST_OF_ATTENTION = "attention_add"


def captures_attention(context: Context) -> bool:
    """Whether everything of a layer up to the attention's residual is a graph."""
    scope = context.option("cuda_graph_scope")
    names = scope if isinstance(scope, tuple) else (scope,)
    return context.option("cuda_graph_impl") == "transformer_engine" and "attn" in names


def captured(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps that a layer's graph is made of; none where the block is no layer."""
    names = [step.name for step in steps]
    return steps[: names.index(LAST_OF_ATTENTION) + 1] if LAST_OF_ATTENTION in names else ()


def replayed(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The block with its captured part as one step that allocates nothing."""
    part = captured(steps)
    if not part:
        return steps
    (output,) = part[-1].writes
    static = Buffer(f"{output.name}.static", 0, "static output of the attention's graph")
    graph = Step(
        name="attention_graph",
        reads=("x",),
        writes=(static,),
        aliases=((output, static.name),),
        weights=tuple(weight for step in part for weight in step.weights),
        module="attention_graph",
    )
    return (graph, *steps[len(part) :])
