"""Stage 0: nothing sharded. 16-bit weights get a flat fp32 master (FP16_Optimizer); fp32 runs the bare optimizer.

Sources: runtime/fp16/fused_optimizer.py, unfused_optimizer.py, engine.py buffered_allreduce_fallback.
"""

from __future__ import annotations

from ullage.engines import optimizer as optimizers
from ullage.engines.base import sized
from ullage.engines.deepspeed import states
from ullage.engines.deepspeed.grads import whole_gradients
from ullage.engines.deepspeed.options import ALLREDUCE_ELEMENTS, Knobs
from ullage.engines.deepspeed.partition import Held
from ullage.engines.deepspeed.passes import Passes, plain_forward
from ullage.engines.deepspeed.states import Static
from ullage.job.job import Job
from ullage.memory.chunk import Replayer
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def static(job: Job, held: Held, knobs: Knobs) -> Static:
    found = states.flat_weights(job, held)
    if job.precision.params != "fp32":
        for name, flat in held.flats:
            found.append((sized("optimizer", f"master parameters ({name})", flat.total, knobs.master), 1))
    return found


def stepped_sizes(held: Held, knobs: Knobs) -> list[int]:
    """Elements of the flat tensors that the optimizer steps."""
    return [flat.total for _, flat in held.flats]


def moments(job: Job, held: Held, knobs: Knobs) -> Static:
    """Adam's moments and their like: made by the first step."""
    return states.moments(job, knobs, states.stepped(stepped_sizes(held, knobs), knobs))


def zero_gradients(job: Job, held: Held, knobs: Knobs) -> list[Item]:
    """What the opening step steps on; FP16_UnfusedOptimizer makes 16-bit ones of the weights too."""
    fp32 = states.zeros(held.trainable, "fp32")
    return [fp32] if job.optimizer.impl == "fused" else [states.zeros(held.trainable, job.precision.params), fp32]


def step(job: Job, graph: Graph, rank: Rank, held: Held, knobs: Knobs, replayer: Replayer) -> Node:
    grads = whole_gradients(job, graph, rank, replayer)
    passes = Passes(
        job=job, rank=rank, replayer=replayer, forward=plain_forward(replayer), backward=grads.backward
    ).all_micro_batches()
    scratch = states.transient(
        "flattened gradients of one all-reduce",
        min(ALLREDUCE_ELEMENTS, held.trainable),
        job.precision.grads,
        "gradient reduction",
        why=f"at most {ALLREDUCE_ELEMENTS} elements at once",
    )
    reduce = states.pulse(scratch, "gradient reduction") if job.layout.dp * job.layout.cp > 1 else Sequence([])
    return Sequence([grads.before, passes, reduce, *_optimizer(job, held, knobs, grads.free)])


def _optimizer(job: Job, held: Held, knobs: Knobs, free_grads: Node) -> list[Node]:
    if job.precision.params == "fp32":
        return [optimizers.step(job.optimizer, states.stepped([held.trainable], knobs)), free_grads]
    copies = states.transient("fp32 copies of the gradients", held.trainable, "fp32", "optimizer step")
    if job.optimizer.impl != "fused":
        # FP16_UnfusedOptimizer keeps a master per parameter; the 16-bit gradients live until the end of the step.
        scratch = optimizers.step(job.optimizer, states.stepped(list(held.numels), knobs))
        return [Sequence([alloc(copies), scratch, free(copies)], "optimizer step"), free_grads]
    flat = states.transient("flattened fp32 gradients", held.trainable, "fp32", "optimizer step")
    return [
        Sequence([alloc(copies), alloc(flat), free(copies), free_grads], "gradients into fp32"),
        states.optimizer_step(job, knobs, stepped_sizes(held, knobs)),
        free(flat),
    ]
