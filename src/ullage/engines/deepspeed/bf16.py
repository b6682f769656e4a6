"""BF16_Optimizer: fp32 gradients of the whole model, never sharded; masters and moments in partitions as under ZeRO-1.

Source: runtime/bf16_optimizer.py. Until 2022 the bf16 gradients were dropped before the next backward; since then they are zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from ullage.engines.base import sized
from ullage.engines.deepspeed import states
from ullage.engines.deepspeed.grads import whole_gradients
from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held
from ullage.engines.deepspeed.passes import Backward, Passes, plain_forward
from ullage.engines.deepspeed.states import Static
from ullage.job.job import Job
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def static(job: Job, held: Held, knobs: Knobs) -> Static:
    found = states.flat_weights(job, held)
    for name, flat in held.flats:
        found += [
            (sized("gradients", f"fp32 gradients ({name})", flat.padded, "fp32", why="never sharded"), 1),
            (sized("optimizer", f"master partition ({name})", flat.padded, "fp32", shards=flat.shards), 1),
        ]
    if knobs.keeps_lp_grads and not knobs.immediate_grad_update:
        found.append((_low_precision(job, held), 1))
    return found


def moments(job: Job, held: Held, knobs: Knobs) -> Static:
    """Adam's moments and their like: made by the first step."""
    return states.moments(job, knobs, states.stepped([flat.partition for _, flat in held.flats], knobs))


def _low_precision(job: Job, held: Held) -> Item:
    return sized("gradients", "bf16 gradients", held.trainable, job.precision.params, lives="one backward to the next")


def step(job: Job, graph: Graph, rank: Rank, held: Held, knobs: Knobs, replayer: Replayer) -> Node:
    forward = plain_forward(replayer)
    add = GradRule(mode="add")
    drops = not knobs.keeps_lp_grads and not knobs.immediate_grad_update

    cast = states.transient(
        "fp32 copy of one bf16 gradient", max(held.numels, default=0), "fp32", "sum into the fp32 gradients"
    )
    summed = states.pulse(cast, "sum into the fp32 gradients")

    def adding(elements: ListLike[Element], first: bool) -> Node:
        return Sequence([chunks.backward(elements, replayer, Wrap(), add), summed])

    backward: Backward = adding
    before: Node = Sequence([])
    after: Node = Sequence([])
    if drops:
        grads = whole_gradients(job, graph, rank, replayer, dtype=job.precision.params, each=True)
        before, after = grads.all, grads.free  # the last step's are still there in the first forward

        def dropping(elements: ListLike[Element], first: bool) -> Node:
            return Sequence([grads.free, grads.backward(elements, True), summed])

        backward = dropping
    passes = Passes(job=job, rank=rank, replayer=replayer, forward=forward, backward=backward).all_micro_batches()
    reduce: Node = Sequence([])
    if knobs.reduce != "fp32" and job.layout.dp * job.layout.cp > 1:
        whole = states.transient(
            "gradients in the type of the all-reduce",
            held.trainable,
            knobs.reduce,
            "gradient reduction",
            why="one flat tensor",
        )
        reduce = states.pulse(whole, "gradient reduction")
    sizes = [flat.partition for _, flat in held.flats]
    return Sequence([before, passes, reduce, states.optimizer_step(job, knobs, sizes), after])
