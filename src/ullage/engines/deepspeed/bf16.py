"""BF16_Optimizer: fp32 gradients of the whole model, never sharded; masters and moments in partitions as under ZeRO-1.

Source: runtime/bf16_optimizer.py, and engine.py _take_model_step, which drops the bf16 gradients with each step. Between the backwards
of one step they are zeroed and used again (clear_lp_grads); until 2022 each backward dropped the one before's and made its own.
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
            (sized("optimizer", f"master partition ({name})", flat.padded, "fp32", shards=flat.shards), 1),
            (sized("gradients", f"fp32 gradients ({name})", flat.padded, "fp32", why="never sharded"), 1),
        ]
    return found


def stepped_sizes(held: Held, knobs: Knobs) -> list[int]:
    """Elements of the flat tensors that the optimizer steps."""
    return [flat.partition for _, flat in held.flats]


def moments(job: Job, held: Held, knobs: Knobs) -> Static:
    """Adam's moments and their like: made by the first step."""
    return states.moments(job, knobs, states.stepped(stepped_sizes(held, knobs), knobs))


def zero_gradients(job: Job, held: Held, knobs: Knobs) -> list[Item]:
    """The opening step steps on its part of the fp32 gradients, which are there already."""
    return []


def step(job: Job, graph: Graph, rank: Rank, held: Held, knobs: Knobs, replayer: Replayer) -> Node:
    cast = states.transient(
        "fp32 copy of one bf16 gradient", max(held.numels, default=0), "fp32", "sum into the fp32 gradients"
    )
    summed = states.pulse(cast, "sum into the fp32 gradients")
    before, backward, after = _backward(job, graph, rank, knobs, replayer, summed)
    passes = Passes(
        job=job, rank=rank, replayer=replayer, forward=plain_forward(replayer), backward=backward
    ).all_micro_batches()
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
    return Sequence([before, passes, reduce, states.optimizer_step(job, knobs, stepped_sizes(held, knobs)), after])


def _backward(
    job: Job, graph: Graph, rank: Rank, knobs: Knobs, replayer: Replayer, summed: Node
) -> tuple[Node, Backward, Node]:
    """What is there before the first forward, a backward with its sum into the fp32 gradients, and what is let go of after the step."""
    if knobs.immediate_grad_update:
        adding = GradRule(mode="add")

        def at_once(elements: ListLike[Element], first: bool) -> Node:
            return Sequence([chunks.backward(elements, replayer, Wrap(), adding), summed])

        return Sequence([]), at_once, Sequence([])

    grads = whole_gradients(job, graph, rank, replayer, dtype=job.precision.params, each=not knobs.keeps_lp_grads)

    def zeroing(elements: ListLike[Element], first: bool) -> Node:
        return Sequence([grads.backward(elements, first), summed])

    def dropping(elements: ListLike[Element], first: bool) -> Node:
        return Sequence([grads.free, grads.backward(elements, True), summed])

    if knobs.keeps_lp_grads:
        return grads.before, zeroing, grads.free
    return grads.all, dropping, grads.free  # the last step's are still there in the first forward
