"""Megatron-FSDP: parameters and gradients of a block exist whole only while the block runs.

Source: megatron/core/distributed/fsdp/src/megatron_fsdp (param_and_grad_buffer.py: bucket allocators; data_parallel_sharding_strategy
optim_grads shards gradients, optim_grads_params parameters too). The next block's parameters are gathered while one runs.
"""

from __future__ import annotations

from ullage.engines.base import sized
from ullage.job.job import Job
from ullage.memory.block import BlockProgram
from ullage.memory.chunk import Element, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.memory.rank import Rank

GRADIENTS_SHARDED = 2  # zero_stage from which gradients are sharded
PARAMETERS_SHARDED = 3  # and parameters too


def shards(job: Job, expert: bool) -> int:
    """Ranks among which the distributed optimizer divides, and what Megatron-FSDP divides beside it."""
    if job.engine.zero_stage == 0:
        return 1
    layout = job.layout
    return layout.expert_dp if expert else layout.dp * layout.cp


class ShardedBlocks(Wrap):
    """Gathers a block's parameters before it runs, and keeps its whole gradients from its backward to their reduce-scatter."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self.gathers = job.engine.zero_stage >= PARAMETERS_SHARDED
        numel: dict[str, int] = {}
        for local in rank.params:
            numel[local.block.name] = numel.get(local.block.name, 0) + local.numel
        self.whole = {
            name: sized(
                "gathered", f"parameters of {name}, gathered", count, job.precision.params, lives="around its block"
            )
            for name, count in numel.items()
        }
        self.grads = {
            name: sized(
                "gradients",
                f"whole gradients of {name}",
                count,
                job.precision.grads,
                lives="its backward to its reduce-scatter",
            )
            for name, count in numel.items()
        }

    def _gathered(self, element: Element | None) -> list[Item]:
        if element is None or not self.gathers or element.block.name not in self.whole:
            return []
        return [self.whole[element.block.name]]

    def _around(self, node: Node, element: Element, previous: Element | None, following: Element | None) -> Node:
        first = [] if previous is not None else [alloc(item) for item in self._gathered(element)]
        ahead = [alloc(item) for item in self._gathered(following)]
        after = [free(item) for item in self._gathered(element)]
        return Sequence([*first, *ahead, node, *after])

    def forward(self, element: Element, node: Node, previous: Element | None, following: Element | None) -> Node:
        return self._around(node, element, previous, following)

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        grads = self.grads.get(element.block.name)
        inner = program.backward if grads is None else Sequence([alloc(grads), program.backward, free(grads)])
        return self._around(inner, element, previous, following)
