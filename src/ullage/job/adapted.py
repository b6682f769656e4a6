"""What a job trains: its model's graph, with low-rank adapters beside the linears that it names and everything else frozen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from math import prod

from ullage.errors import InvalidInput, Unsupported
from ullage.frozen import FrozenMap, replace
from ullage.job.job import Job, Lora
from ullage.model.build import graph as build
from ullage.model.graph import Block, Graph, Op, Param, Run

ADAPTERS = "fp32"
"""PEFT makes adapters of a 16-bit model in fp32 (tuners/tuners_utils.py, cast_adapter_dtype; autocast_adapter_dtype=True)."""

ALL_LINEAR = "all-linear"

_SPELLINGS: dict[str, tuple[str, ...]] = {
    "qkv": ("query_key_value", "W_pack", "c_attn", "qkv_proj", "Wqkv", "wqkv", "in_proj_qkv", "attn_qkv"),
    "gate_up": ("gate_up_proj", "dense_h_to_4h", "c_fc", "fc1", "fc_in", "up_proj"),
    "q_proj": ("q_proj", "wq", "query"),
    "k_proj": ("k_proj", "wk", "key"),
    "v_proj": ("v_proj", "wv", "value"),
    "o_proj": ("o_proj", "out_proj", "dense", "c_proj", "wo", "attn_out"),
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "w3", "c_fc", "fc1", "fc_in", "dense_h_to_4h"),
    "down_proj": ("down_proj", "w2", "c_proj", "fc2", "fc_out", "dense_4h_to_h"),
}
"""What the classes of transformers call the linears of a layer; a fused projection by its group."""


def adapters_type(lora: Lora) -> str:
    """The element type of the adapters."""
    return lora.dtype or ADAPTERS


def graph_of(job: Job) -> Graph:
    """The graph of what the job trains."""
    return trained(build(job.model, mtp=job.engine.name == "megatron"), job)


def trained(graph: Graph, job: Job) -> Graph:
    """A graph with the job's adapters."""
    if job.lora is None:
        return graph
    # gradient checkpointing makes the embedding's output ask for a gradient (enable_input_require_grads)
    return _with_adapters(graph, job.lora, job.recompute.kind != "none")


@lru_cache(maxsize=64)
def _with_adapters(graph: Graph, lora: Lora, input_grads: bool) -> Graph:
    """input_grads: whether the embedding's output asks for a gradient though nothing before it is trained."""
    _refuse(lora)
    found: set[str] = set()
    runs: list[Run] = []
    for run in graph.runs:
        block = _adapted(graph, run.block, lora, found)
        if block.role == "embedding" and not input_grads:
            block = replace(block, output=replace(block.output, grad=False))
        first = block.role == "layer" and not any(one.block.role == "layer" for one in runs)
        if first and not input_grads:
            runs.append(Run(block=replace(block, input=replace(block.input, grad=False))))
            run = replace(run, repeat=run.repeat - 1)
        if run.repeat:
            runs.append(Run(block=block, repeat=run.repeat))
    missing = [target for target in lora.targets if target != ALL_LINEAR and target not in found]
    if missing:
        raise InvalidInput(
            "is no linear of this model's layers",
            key="lora.targets",
            value=", ".join(missing),
            allowed=", ".join(sorted(_names(graph))),
        )
    return replace(graph, runs=tuple(runs))


def _refuse(lora: Lora) -> None:
    refused = {
        "lora.base": lora.base if lora.base != "bf16" else None,
        "lora.dora": True if lora.dora else None,
        "lora.modules_to_save": ", ".join(lora.modules_to_save) or None,
    }
    for key, value in refused.items():
        if value is not None:
            raise Unsupported("is not modelled yet", key=key, value=value)


def _names(graph: Graph) -> Iterator[str]:
    for run in graph.runs:
        if run.block.role == "layer":
            for ops in _called(run.block):
                yield from _spellings(ops)


def _called(block: Block) -> Iterator[tuple[Op, ...]]:
    """A block's ops, the projections that are one linear together."""

    def joined(op: Op) -> object:
        return op.attrs["group"] if op.kind == "linear" and op.attrs["fused"] and op.attrs["group"] else op.name

    for _, ops in groupby(block.ops, joined):
        yield tuple(ops)


def _spellings(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """By which names a target may mean a linear, its own first."""
    if ops[0].kind != "linear":
        return ()
    if len(ops) > 1:
        return _SPELLINGS.get(str(ops[0].attrs["group"]), ())
    return tuple(dict.fromkeys((ops[0].name, *_SPELLINGS.get(ops[0].name, ()))))


def _adapted(graph: Graph, block: Block, lora: Lora, found: set[str]) -> Block:
    """found: the targets that were met, which this adds to."""
    made: list[Op] = []
    for ops in _called(block):
        frozen = [_frozen(op) for op in ops]
        names = _spellings(ops) if block.role == "layer" else ()
        meant = [target for target in lora.targets if target in names]
        found.update(meant)
        if meant or (names and ALL_LINEAR in lora.targets):
            frozen[0] = _with_adapter(graph, frozen[0], ops, lora)
        made += frozen
    return replace(block, ops=tuple(made))


def _frozen(op: Op) -> Op:
    return replace(op, params=tuple(replace(param, trainable=False) for param in op.params))


def _with_adapter(graph: Graph, op: Op, ops: tuple[Op, ...], lora: Lora) -> Op:
    """An op with A, [rank, in], and B, [out, rank]; of projections that are one linear the first has them for all."""
    inner, outer = op.attrs["in"], op.attrs["out"]
    assert isinstance(inner, tuple)
    assert isinstance(outer, tuple)
    if len(ops) > 1:
        outer = (sum(prod(graph.size(dim) for dim in one.outputs[0].dims[2:]) for one in ops),)
    name = op.name if len(ops) == 1 else str(op.attrs["group"])
    dtype = adapters_type(lora)
    low = Param(name=f"{name}.lora_A", dims=(lora.rank, *inner), elements=dtype)
    high = Param(name=f"{name}.lora_B", dims=(*outer, lora.rank), elements=dtype)
    adapter = {"rank": lora.rank, "dropout": lora.dropout, "dtype": dtype}
    return replace(op, params=(*op.params, low, high), attrs=FrozenMap({**op.attrs.as_dict(), "lora": adapter}))
