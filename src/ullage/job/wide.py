"""Layers whose matrices a job leaves in 16 bits while the others multiply in fewer: blocks of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ullage.errors import Unsupported
from ullage.frozen import FrozenMap, replace
from ullage.model.graph import Block, Graph, Run

MATRICES = ("linear", "grouped_linear")
WIDE = "wide"
"""The attribute of an op that says so."""

AT_AN_END = 1
"""num_layers_at_start_in_bf16 and ..._end_... where none is given (Megatron-Core transformer/transformer_config.py)."""

_FIRST = re.compile(r"first (\d+) ?% of the (?:blocks|layers)")


def left_wide(graph: Graph, compute: str, options: Mapping[str, object]) -> Graph:
    """Megatron's ``first_last_layers_bf16`` (fp8_utils.py, is_first_last_bf16_layer; fp4_utils.py, get_fp4_context) and ``float8_layers``,
    which tells of torchtitan's converters how many of the first blocks they convert."""
    if compute not in ("fp8", "fp4"):
        return graph
    start, end = _ends(graph.layers, options)
    if not start and not end:
        return graph
    return replace(graph, runs=tuple(_runs(graph, start, graph.layers - end)))


def _ends(layers: int, options: Mapping[str, object]) -> tuple[int, int]:
    """How many of the first and of the last layers."""
    if options.get("first_last_layers_bf16"):
        start, end = (options.get(f"num_layers_at_{place}_in_bf16", AT_AN_END) for place in ("start", "end"))
        return _count(start), _count(end)
    told = options.get("float8_layers")
    if not told:
        return 0, 0
    found = _FIRST.fullmatch(str(told))
    if found is None:
        what = "names layers in a way that is not read"
        raise Unsupported(what, key="engine.options.float8_layers", value=told, allowed="first N% of the blocks")
    return 0, layers - layers * int(found[1]) // 100


def _count(value: object) -> int:
    return value if isinstance(value, int) else AT_AN_END


def _runs(graph: Graph, start: int, end: int) -> Iterator[Run]:
    """Runs cut where layer ``start`` begins and before layer ``end``."""
    at = 0
    for run in graph.runs:
        if run.block.role != "layer":
            yield run
            continue
        before = min(max(start - at, 0), run.repeat)
        after = min(max(at + run.repeat - end, 0), run.repeat - before)
        wide = _wide(run.block)
        parts = ((wide, before), (run.block, run.repeat - before - after), (wide, after))
        yield from (Run(block=block, repeat=repeat) for block, repeat in parts if repeat)
        at += run.repeat


def _wide(block: Block) -> Block:
    ops = tuple(
        replace(op, attrs=FrozenMap({**op.attrs, WIDE: True})) if op.kind in MATRICES else op for op in block.ops
    )
    return replace(block, name=f"{block.name} in 16 bits", ops=ops)
