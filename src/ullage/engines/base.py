"""What every engine answers: an Account of one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ullage import dtypes
from ullage.job.bind import local_sizes
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory.program import Item, Node, Sequence, alloc, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Memory of one pipeline rank.

    static: what is allocated from the second step on, before the step begins. step: one whole optimizer step, from the first
    forward to zero_grad; it leaves nothing behind. groups: sizes of the process groups that communicate on this rank, by name.
    after_step: what the steady state keeps beyond ``static`` when memory is read after the step (gradients not yet dropped).
    """

    static: tuple[tuple[Item, int], ...]
    step: Node
    groups: tuple[tuple[str, int], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def program(self) -> Node:
        """Static allocations, then the step: its peak is the rank's."""
        return Sequence([Sequence([alloc(item, count) for item, count in self.static], "load"), self.step])

    @property
    def static_bytes(self) -> int:
        return sum(item.bytes * count for item, count in self.static)


Accounting = Callable[[Job, Graph, Rank], Account]


def context_of(job: Job, graph: Graph) -> Context:
    """The kernels' view of a job."""
    precision = job.precision
    layout = job.layout
    return Context(
        sizes=local_sizes(graph, layout, job.data),
        stack=job.stack,
        version=job.stack_version,
        compute=precision.compute if precision.compute not in ("fp8", "fp4") else "bf16",
        params=precision.params,
        residual=precision.params if precision.autocast else precision.compute,
        autocast=precision.autocast,
        tp=layout.tp,
        sp=layout.sp,
        cp=layout.cp,
        cp_kind=layout.cp_kind,
        ep=layout.ep,
        etp=layout.etp,
        attention=job.attention,
        loss=job.loss.kind,
        loss_chunks=job.loss.chunks,
        compile=job.compile,
        padding_mask=job.data.padding_mask,
        options=job.engine.options,
        compute_capability=job.cluster.device.compute_capability,
    )


def sized(
    category: str,
    what: str,
    numel: int,
    dtype: str,
    *,
    shards: int = 1,
    why: str = "",
    lives: str = "the whole run",
    provenance: str = "exact",
    stream: int = 0,
) -> Item:
    """An Item of ``numel`` elements over ``shards`` ranks, with the formula written out."""
    share = -(-numel // shards)
    formula = f"{numel} elements{f' / {shards}' if shards > 1 else ''} x {dtypes.bits(dtype) / 8:g} B ({dtype})"
    return Item(
        category=category,
        what=what,
        bytes=round_up(dtypes.size_bytes(share, dtype)),
        formula=f"{formula}; {why}" if why else formula,
        lives=lives,
        provenance=provenance,
        stream=stream,
    )


def flag(options: Mapping[str, object], name: str, default: bool) -> bool:
    value = options.get(name, default)
    return bool(value)
