"""Modules trained in full beside adapters: PEFT's ``modules_to_save`` (peft utils/other.py, ModulesToSaveWrapper).

A trained copy stands in the module's place, and the original stays where it was, frozen.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.errors import InvalidInput
from ullage.frozen import replace
from ullage.job.freezing import FAMILIES, IN_A_LAYER, OUTSIDE
from ullage.model.graph import Block, Graph, Op

ORIGINAL = "original"
"""The kind of an op that runs nothing: it holds what a trained copy replaces."""

_EMBEDDINGS = {
    "bloom": "word_embeddings", "falcon": "word_embeddings", "gpt2": "wte", "gpt_neox": "embed_in", "gptj": "wte", "mpt": "wte",
}  # fmt: skip
_HEADS = {"gpt_neox": "embed_out"}


def trained_in_full(graph: Graph, modules: tuple[str, ...], dtype: str) -> Graph:
    """The graph with a trained copy, in ``dtype``, of every module whose path ends as one of ``modules`` does."""
    paths = {(run.block.name, op.name): _path(run.block, op) for run in graph.runs for op in run.block.ops if op.params}
    for module in modules:
        if not any(path.endswith(module) for path in paths.values()):
            raise InvalidInput(
                "names no module of this model whose name is known here",
                key="lora.modules_to_save",
                value=module,
                allowed=", ".join(sorted({path.rpartition(".")[2] for path in paths.values() if path})),
            )
    meant = {key for key, path in paths.items() if path and path.endswith(modules)}
    copied = {
        f"{run.block.name}.{param.name}"
        for run in graph.runs
        for op in run.block.ops
        for param in op.params
        if (run.block.name, op.name) in meant
    }
    # a tied original that one place still uses is counted there, and one that both have copies of with the first
    elsewhere = {name for pair in graph.tied for name in pair if copied & {*pair} and not {*pair} <= copied}
    elsewhere |= {second for first, second in graph.tied if {first, second} <= copied}
    runs = []
    for run in graph.runs:
        ops: list[Op] = []
        for op in run.block.ops:
            if (run.block.name, op.name) not in meant:
                ops.append(op)
                continue
            keeps = not any(f"{run.block.name}.{param.name}" in elsewhere for param in op.params)
            ops += _copied(op, dtype, keeps=keeps)
        runs.append(replace(run, block=replace(run.block, ops=tuple(ops))))
    return replace(graph, runs=tuple(runs), tied=tuple(pair for pair in graph.tied if not copied & {*pair}))


def _copied(op: Op, dtype: str, *, keeps: bool) -> list[Op]:
    """keeps: whether the original is a storage of its own, which nothing else counts."""
    trained = replace(op, params=tuple(replace(param, trainable=True, elements=dtype) for param in op.params))
    held = tuple(replace(param, name=f"{ORIGINAL}.{param.name}", trainable=False) for param in op.params)
    original = Op(name=f"{op.name}.{ORIGINAL}", kind=ORIGINAL, inputs=(), outputs=(), params=held)
    return [original, trained] if keeps else [trained]


def _path(block: Block, op: Op) -> str:
    """A module's path in transformers' classes, "" where it is not known."""
    outside: Mapping[str, str] = {
        "embed_tokens": f"model.{_EMBEDDINGS.get(block.family, 'embed_tokens')}",
        "lm_head": _HEADS.get(block.family, "lm_head"),
    }
    if block.role != "layer":
        return outside.get(op.name) or (OUTSIDE.get(op.name, "") if block.family in FAMILIES else "")
    module = IN_A_LAYER.get(op.name, "") if block.family in FAMILIES else ""
    return f"model.layers.0.{module}" if module else ""
