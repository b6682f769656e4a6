"""Where Megatron-Bridge puts low-rank adapters (peft/lora.py, peft/utils.py): beside Megatron's fused linears, by its names.

A and B are tensor parallel whatever the linear is: A over the rank where its input is whole, else over its input; B over its output. The
experts of a rank share one adapter (share_expert_adapters).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ullage.errors import InvalidInput
from ullage.frozen import FrozenMap, replace
from ullage.job.job import Lora
from ullage.model.graph import Block, Dim, Graph, Op, Param

ALL_LINEAR = "all-linear"
TARGETS = {
    "qkv": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_up": "linear_fc1",
    "shared_gate_up": "linear_fc1",
    "expert_gate_up": "linear_fc1",
    "down_proj": "linear_fc2",
    "shared_down_proj": "linear_fc2",
    "experts.down_proj": "linear_fc2",
}
"""Megatron's names of a layer's linears; all of them are adapted where nobody chooses."""
OUTPUTS = {"qkv": "lora_qkv", "gate_up": "lora_fc1", "shared_gate_up": "lora_shared_fc1"}
"""Dimensions of what column-parallel adapters make."""
RANK, HIDDEN = "lora_rank", "lora_hidden"


def adapted(graph: Graph, lora: Lora, dtype: str) -> Graph:
    """The graph with A and B beside the linears that ``lora`` names and everything else frozen; ``dtype``: of the adapters."""
    sizes: dict[str, object] = {RANK: lora.rank, HIDDEN: graph.size("hidden")}
    found: set[str] = set()
    runs = []
    for run in graph.runs:
        ops = [
            one for called, ops in _called(run.block) for one in _adapted(graph, called, ops, lora, dtype, sizes, found)
        ]
        runs.append(replace(run, block=replace(run.block, ops=tuple(ops))))
    missing = [target for target in lora.targets if target not in (ALL_LINEAR, *found)]
    if missing:
        raise InvalidInput(
            "is no linear of this model's layers",
            key="lora.targets",
            value=", ".join(missing),
            allowed=", ".join(dict.fromkeys((*TARGETS.values(), ALL_LINEAR))),
        )
    return replace(graph, runs=tuple(runs), sizes=FrozenMap({**graph.sizes, **sizes}))


def _called(block: Block) -> Iterator[tuple[str, tuple[Op, ...]]]:
    """A block's ops, those that are one matmul together, with a name for each."""
    for name, ops in groupby(block.ops, lambda op: str(op.attrs.get("group") or op.name)):
        yield (name if block.role == "layer" else ""), tuple(ops)


def _adapted(
    graph: Graph, called: str, ops: tuple[Op, ...], lora: Lora, dtype: str, sizes: dict[str, object], found: set[str]
) -> list[Op]:
    """sizes, found: of the adapters' dimensions, and of the targets that were met, which this adds to."""
    frozen = [replace(op, params=tuple(replace(param, trainable=False) for param in op.params)) for op in ops]
    target = TARGETS.get(called)
    if target is None or not {target, ALL_LINEAR} & {*lora.targets}:
        return frozen
    found.add(target)
    low, high = _dims(graph, called, ops, lora.rank)
    if isinstance(high, str) and high not in sizes:
        sizes[high] = sum(graph.numel(op.params[0]) for op in ops) // graph.size("hidden")
    name = called if len(ops) > 1 else ops[0].name
    first = frozen[0]
    adapter = {"rank": lora.rank, "dropout": lora.dropout, "dtype": dtype}
    frozen[0] = replace(
        first,
        params=(
            *first.params,
            Param(name=f"{name}.lora_A", dims=low, elements=dtype),
            Param(name=f"{name}.lora_B", dims=(high, lora.rank), elements=dtype),
        ),
        attrs=FrozenMap({**first.attrs.as_dict(), "lora": adapter}),
    )
    return frozen


def _dims(graph: Graph, called: str, ops: tuple[Op, ...], rank: int) -> tuple[tuple[Dim, ...], Dim]:
    """Of A, and of B's output."""
    first = ops[0]
    if first.kind == "grouped_linear":
        _, out, inner = first.params[0].dims
        return (rank, inner), len(ops) * graph.size(out)
    features = first.attrs["in"]
    assert isinstance(features, tuple)
    if called in OUTPUTS:
        return (RANK, *features), OUTPUTS[called]
    return (rank, *features), HIDDEN
