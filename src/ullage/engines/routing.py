"""A step whose router is uneven: how many rows the busiest rank's experts compute at a quantile of routing.

Experts' loads are taken as normal about their mean. Their spread is a trained router's (data/routing.toml) and that of a draw of as many
rows as a micro-batch has (multinomial: the least that any router has). A rank has the mean load of its experts, and the busiest of a group
that shares experts is looked at. How popular a layer's experts are says nothing of the next layer's: the rows of several layers that are
live at once deviate as independent ones do, those of several micro-batches in one layer alike.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ullage.engines.base import context_of
from ullage.engines.estimate import located
from ullage.engines.interval import BALANCED
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory.program import Peak
from ullage.memory.rank import Rank
from ullage.model.graph import ROUTED, SENT, Graph

QUANTILES = (0.90, 0.99)
_BIAS = "moe_router_enable_expert_bias"


def is_uneven(job: Job, graph: Graph) -> bool:
    """Whether ranks may compute unequally many rows: without expert parallelism each has its own tokens' rows, however routed."""
    experts = "experts" in graph.sizes and job.layout.ep > 1
    return experts and not any(job.engine.options.get(name) for name in BALANCED)


def peak_bytes(job: Job, graph: Graph, rank: Rank, quantile: float) -> int:
    """Allocated bytes of the busiest rank's peak, where ``quantile`` of steps are routed no less evenly."""
    peak, _ = located(job, graph, rank)
    deviation = (load(context_of(job, graph), quantile, bias=_has_bias(job, graph)) - 1) * _share(peak, rank)
    uneven = replace(job, data=replace(job.data, expert_load=1 + deviation))
    return max(peak.bytes, located(uneven, graph, rank)[0].bytes)


def load(context: Context, quantile: float, *, bias: bool) -> float:
    """Rows of the busiest rank's experts in one layer and micro-batch, over the mean of all ranks that share experts.

    bias: the router is balanced by a bias on each expert's score, not by an auxiliary loss.
    """
    here, everywhere = context.size("experts"), context.size("router")
    rows = context.size(SENT) * context.ep / everywhere
    of_an_expert = _router(bias) ** 2 + 1 / rows
    of_a_rank = of_an_expert / here * (everywhere - here) / (everywhere - 1)  # drawn without putting back
    busiest = NormalDist().inv_cdf(quantile ** (1 / context.ep))
    top_k = context.size("top_k")
    most = context.ep * min(top_k, here) / top_k  # each token's experts are different ones
    return min(most, 1 + busiest * math.sqrt(of_a_rank))


def _router(bias: bool) -> float:
    """Standard deviation of experts' loads over their mean, from the largest of so many normal ones (Blom 1958)."""
    told = _measured()
    experts = told["experts"]
    largest = NormalDist().inv_cdf((experts - 0.375) / (experts + 0.25))
    return float(told["expert_bias" if bias else "auxiliary_loss"]) / largest


@functools.cache
def _measured() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "data" / "routing.toml").read_text(encoding="utf-8"))


def provenance() -> str:
    """Of the loads: measured or default."""
    return str(_measured()["provenance"])


def _has_bias(job: Job, graph: Graph) -> bool:
    named = any(param.name.endswith("router.score_bias") for run in graph.runs for param in run.block.params)
    return named or bool(job.engine.options.get(_BIAS))


def _share(peak: Peak, rank: Rank) -> float:
    """Standard deviation of all rows live at the peak, over what it would be if all deviated alike: below 1 where layers add up."""
    layers = sum(
        run.repeat for chunk in rank.chunks for run in chunk.runs if any(op.kind == "dispatch" for op in run.block.ops)
    )
    copies = list(_copies(peak))
    if not copies or not layers:
        return 1.0
    of_a_layer = math.ceil(len(copies) / layers)
    return min(1.0, math.sqrt(of_a_layer * sum(size**2 for size in copies)) / sum(copies))


def _copies(peak: Peak) -> Iterator[int]:
    """Bytes of rows live at the peak, of one layer and micro-batch after another: the tensors that are there at least so often."""
    live = {item: count for item, count in peak.live.items() if f"{ROUTED} " in item.formula}
    for place in range(max(live.values(), default=0)):
        yield sum(item.bytes for item, count in live.items() if count > place)
