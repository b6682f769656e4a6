"""Shapes of parameters as FSDP shards them: rows, columns and ranks of each."""

from __future__ import annotations

import math

from ullage.engines import quantised
from ullage.engines.fsdp2.units import Shape
from ullage.job.adapted import PACKED, is_adapter, model_type, saved_type
from ullage.job.bind import is_expert, local_sizes
from ullage.job.job import Job
from ullage.kernels.transformers_parallel import whole_gradients
from ullage.memory.rank import Rank
from ullage.model.graph import Block, Graph, Op, Param

WORD_BYTES = 2
"""Of the compute types beside which a base is packed."""


def shape_of(graph: Graph, job: Job, op: Op, param: Param, block: Block) -> Shape:
    """Rows are the module's own first dimension: a linear's output features, however many names they have."""
    sizes = local_sizes(graph, job.layout, job.data)

    def size(dim: object) -> int:
        value = sizes[dim] if isinstance(dim, str) else dim
        assert isinstance(value, int), dim
        return value

    out = op.attrs.get("out")
    leading = len(out) if isinstance(out, tuple) and param.dims[: len(out)] == out else 1
    dims = [size(dim) for dim in param.dims]
    rows, columns = math.prod(dims[:leading]), math.prod(dims[leading:])
    shards = shard_count(job, expert=is_expert(param))
    if is_expert(param) and len(dims) > 2 and shards * job.layout.ep > graph.size(param.dims[0]):
        rows, columns = (
            dims[1],
            dims[0] * math.prod(dims[2:]),
        )  # torchtitan shards experts on dim 1 where ranks outnumber them
    name = f"{block.name}.{param.name}"
    if param.elements in PACKED:  # a column of bytes, seen as numbers of the compute type, so that no gather casts them
        words = -(-quantised.sharded_bytes(job, rows * columns) // WORD_BYTES)
        return Shape(
            name=name,
            rows=words,
            columns=1,
            shards=shards,
            trainable=False,
            original=job.precision.compute,
            gathered_as=job.precision.compute,
        )
    whole_gradient = job.stack == "transformers" and name in whole_gradients(graph)
    return Shape(
        name=name,
        rows=rows,
        columns=columns,
        shards=shards,
        gradient_parts=job.layout.tp if whole_gradient else 1,
        trainable=param.trainable,
        original=_kept_as(job, param),
        gathered_as="fp8" if _is_gathered_in_fp8(job, op, block) else None,
    )


def _kept_as(job: Job, param: Param) -> str | None:
    """The type of a shard where that is not the unit's."""
    if not param.trainable:
        return model_type(job)
    return None if job.lora is None or is_adapter(param.name) else saved_type(job)


def _is_gathered_in_fp8(job: Job, op: Op, block: Block) -> bool:
    """torchao's Float8Linear with ``enable_fsdp_float8_all_gather`` (tensorwise scaling only): the weight travels and stays in 8 bits."""
    options = job.engine.options
    wanted = options.get("float8_all_gather") or options.get("enable_fsdp_float8_all_gather")
    return bool(wanted) and job.precision.compute == "fp8" and block.role == "layer" and op.kind == "linear"


def shard_count(job: Job, *, expert: bool) -> int:
    """Ranks over which FSDP shards: data and context parallelism, or shard_group (HSDP); of experts what expert parallelism leaves."""
    layout = job.layout
    whole = layout.expert_dp if expert and layout.ep > 1 else layout.dp * layout.cp
    group = job.engine.shard_group
    if group is None:
        return whole
    return max(1, min(whole, group // layout.ep if expert and layout.ep > 1 else group))


def block_shapes(graph: Graph, job: Job, block: Block, rank: Rank) -> tuple[Shape, ...]:
    """The parameters of one block that this rank holds (a tied one is where it is held)."""
    held = {param.name for param in rank.params}
    return tuple(
        shape_of(graph, job, op, param, block)
        for op in block.ops
        for param in op.params
        if not param.buffer
        and f"{block.name}.{param.name}" in held
        and (param.elements not in PACKED or quantised.shards(job))
    )
