"""Where litgpt puts low-rank adapters (litgpt/lora.py): queries, keys and values are one linear, whose parts are adapted or not, and
every other linear is one by itself, the head too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import prod

from ullage.errors import InvalidInput
from ullage.frozen import FrozenMap, replace
from ullage.job.job import Lora
from ullage.model.graph import Block, Graph, Op, Param

QKV = "qkv"
DEFAULT_PARTS = ("q_proj", "v_proj")
"""What of the joined projection litgpt adapts where nobody chooses (finetune/lora.py, lora_query, lora_key, lora_value)."""
ALL_LINEAR = "all-linear"


def adapted(graph: Graph, lora: Lora, dtype: str, fused_names: dict[str, str]) -> Graph:
    """The graph with A, [rank, in], and B, [out, rank], beside its linears and everything else frozen; ``dtype``: of the adapters.

    fused_names: what other classes call several projections as one linear, by group; such a name beside other linears means all of
    its parts, and alone those that litgpt adapts by default.
    """
    found: set[str] = set()
    runs = []
    for run in graph.runs:
        block = run.block
        meant = _meant(block, lora.targets, fused_names, found)
        ops = [one for ops in grouped(block) for one in _with_adapter(graph, ops, lora, dtype, meant)]
        runs.append(replace(run, block=replace(block, ops=tuple(ops))))
    missing = [target for target in lora.targets if target != ALL_LINEAR and target not in found]
    if missing:
        known = {op.name for run in graph.runs for op in run.block.ops if op.kind == "linear"}
        raise InvalidInput(
            "is no linear of this model",
            key="lora.targets",
            value=", ".join(missing),
            allowed=", ".join(sorted({*known, *fused_names.values(), ALL_LINEAR})),
        )
    return replace(graph, runs=tuple(runs))


def grouped(block: Block) -> Iterator[tuple[Op, ...]]:
    """A block's ops, the three projections of attention together."""
    for _, ops in groupby(block.ops, lambda op: QKV if op.attrs.get("group") == QKV else op.name):
        yield tuple(ops)


def _meant(block: Block, targets: tuple[str, ...], names: dict[str, str], found: set[str]) -> frozenset[str]:
    """The ops that are adapted, by name. found: the targets that were met, which this adds to."""
    linears = [op for op in block.ops if op.kind == "linear"]
    meant: set[str] = set()
    for op in linears:
        called = names.get(op.name, op.name)
        fused = names.get(str(op.attrs["group"]))
        if op.name in targets or called in targets:
            found.update({op.name, called})
            meant.add(op.name)
        if fused in targets:
            found.add(str(fused))
            alone = op.attrs["group"] == QKV and not set(targets) - {fused}
            if not alone or op.name in DEFAULT_PARTS:
                meant.add(op.name)
        if ALL_LINEAR in targets and block.role == "layer":
            meant.add(op.name)
    return frozenset(meant)


def _with_adapter(graph: Graph, ops: tuple[Op, ...], lora: Lora, dtype: str, meant: frozenset[str]) -> list[Op]:
    frozen = [_frozen(op, lora.base) for op in ops]
    parts = [op for op in ops if op.name in meant]
    if not parts:
        return frozen
    inner = parts[0].attrs["in"]
    assert isinstance(inner, tuple)
    sizes = [prod(graph.size(dim) for dim in op.outputs[0].dims[2:]) for op in parts]
    name = QKV if len(ops) > 1 else ops[0].name
    low = Param(name=f"{name}.lora_A", dims=(lora.rank * len(parts), *inner), elements=dtype)
    high = Param(name=f"{name}.lora_B", dims=(sum(sizes), lora.rank), elements=dtype)
    adapter = {"rank": lora.rank, "dropout": lora.dropout, "dtype": dtype, "parts": tuple(op.name for op in parts)}
    first = frozen[0]
    frozen[0] = replace(
        first, params=(*first.params, low, high), attrs=FrozenMap({**first.attrs.as_dict(), "lora": adapter})
    )
    return frozen


def _frozen(op: Op, base: str) -> Op:
    """Fabric's plugin packs every linear, the head too (lightning.fabric, plugins/precision/bitsandbytes.py)."""
    packed = base if base != "bf16" and op.kind == "linear" else None
    return replace(
        op,
        params=tuple(
            replace(param, trainable=False, elements=packed if param.name.endswith(".weight") else None)
            for param in op.params
        ),
    )
