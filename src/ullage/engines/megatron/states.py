"""Model states of Megatron-Core: parameter and gradient buffers, main parameters, moments, and how loading makes them.

Sources: megatron/core/distributed/param_and_grad_buffer.py, megatron/core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.engines.base import shard, sized
from ullage.engines.megatron.fsdp import GRADIENTS_SHARDED, PARAMETERS_SHARDED
from ullage.job.job import Job
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.memory.rank import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Model states of one kind of parameter (dense or experts), in the order in which they are made."""

    loose: Item  # parameters as the modules first hold them, before the buffers replace them
    parameters: Item
    gradients: Item
    main: Item | None
    moments: tuple[Item, ...]

    @property
    def all(self) -> list[Item]:
        return [self.parameters, self.gradients, *([self.main] if self.main else []), *self.moments]


def states(job: Job, rank: Rank) -> list[States]:
    """Parameters and main gradients whole (less under Megatron-FSDP); main parameters and moments over the data-parallel group with
    the distributed optimizer.

    Expert parameters have buffers and a data-parallel group of their own.
    """
    found = []
    for expert in (False, True):
        tensors = [local.numel for local in rank.params if local.expert == expert for _ in range(local.copies)]
        if not tensors:
            continue
        numel = sum(tensors)
        which = "experts" if expert else "dense"
        group = shards(job, expert)
        pieces = shard(tensors, group)
        precision = job.precision
        stage = job.engine.zero_stage
        two_copies = precision.master is not None and precision.master != precision.params
        adam = job.optimizer.name.startswith("adam")
        found.append(
            States(
                loose=sized(
                    "parameters", f"parameters of the modules ({which})", numel, precision.params, pieces=tensors
                ),
                parameters=sized(
                    "parameters",
                    f"parameters ({which})",
                    numel,
                    precision.params,
                    shards=group if stage >= PARAMETERS_SHARDED else 1,
                ),
                gradients=sized(
                    "gradients",
                    f"main gradients ({which})",
                    numel,
                    precision.grads,
                    shards=group if stage >= GRADIENTS_SHARDED else 1,
                    why="" if stage >= GRADIENTS_SHARDED else "never sharded",
                ),
                main=sized(
                    "optimizer",
                    f"main parameters ({which})",
                    numel,
                    precision.master or "",
                    shards=group,
                    pieces=pieces,
                )
                if two_copies
                else None,
                moments=tuple(
                    sized("optimizer", f"{moment} ({which})", numel, job.optimizer.state, shards=group, pieces=pieces)
                    for moment in (("exp_avg", "exp_avg_sq") if adam else ())
                ),
            )
        )
    return found


def load(states: list[States], others: list[Item]) -> Node:
    """Modules make their parameters; DDP's buffers replace them; the optimizer copies its shard."""
    buffers = [node for one in states for node in (alloc(one.parameters), alloc(one.gradients))]
    return Sequence(
        [
            *(alloc(one.loose) for one in states),
            *buffers,
            *(free(one.loose) for one in states),
            *(alloc(one.main) for one in states if one.main),
            *(alloc(item) for item in others if item.bytes),
        ]
    )


def shards(job: Job, expert: bool) -> int:
    if job.engine.zero_stage == 0:
        return 1
    layout = job.layout
    return layout.expert_dp if expert else layout.dp * layout.cp
