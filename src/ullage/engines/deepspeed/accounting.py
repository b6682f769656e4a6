"""What DeepSpeed keeps on one rank, and when: which wrapper a job gets, and its account.

Source: runtime/engine.py (_configure_optimizer, _do_optimizer_sanity_check, get_data_types).
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from ullage.engines import offloaded
from ullage.engines.base import Account, context_of, sized
from ullage.engines.deepspeed import bf16, offload, stage0, stage3, stage12, states
from ullage.engines.deepspeed.options import FLATTENS_ON_DEVICE, FORK_OF_2022, Knobs
from ullage.engines.deepspeed.options import knobs as read_knobs
from ullage.engines.deepspeed.partition import Held
from ullage.engines.deepspeed.partition import held as held_by
from ullage.engines.deepspeed.passes import pipeline_buffers
from ullage.engines.recompute import stops_early
from ullage.job.job import Job
from ullage.memory.chunk import Replayer
from ullage.memory.program import EMPTY, Node, Sequence, alloc, free
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    offloaded.refuse(job)
    context = context_of(job, graph)
    knobs = read_knobs(job, graph)
    held = held_by(job, rank)
    replayer = Replayer(
        context=context,
        recompute=job.recompute,
        early_stop=stops_early(job, context),
        group=_checkpointed_together(job),
        inputs=offloaded.inputs(job),
    )
    wrapper: ModuleType = bf16 if knobs.bf16_optimizer else (stage0, stage12, stage12, stage3)[job.engine.zero_stage]
    kept = wrapper.static(job, held, knobs)
    moments = wrapper.moments(job, held, knobs)
    step: Node = wrapper.step(job, graph, rank, held, knobs, replayer)
    early = [*states.beside_the_model(job, context), *pipeline_buffers(job, rank, context), *kept]
    opening: Node = EMPTY
    if knobs.opening_step and moments:
        zeros = wrapper.zero_gradients(job, held, knobs)
        opening = states.opening_step(job, knobs, wrapper.stepped_sizes(held, knobs), zeros, moments)
    return Account(
        static=tuple((item, count) for item, count in (*early, *moments) if item.bytes),
        step=step,
        late=() if knobs.opening_step else tuple(item for item, _ in moments),
        load=_load(job, held, knobs, early, opening),
        groups=_groups(job),
        eager=knobs.version <= FORK_OF_2022,
        host_bytes=offload.host_bytes(job, held, knobs) + _inputs_on_host(rank, job, replayer),
        host_at_load_bytes=offload.parameters_bytes(job, held, knobs),
    )


def _load(job: Job, held: Held, knobs: Knobs, kept: states.Static, opening: Node) -> Node:
    """Modules make their parameters one by one; the flat groups replace them. Until 0.16.9 stages 1 and 2 flattened on the host."""
    on_device = knobs.bf16_optimizer or job.engine.zero_stage == 0 or knobs.version >= FLATTENS_ON_DEVICE
    made = [(item, alloc(item, count)) for item, count in kept if item.bytes]
    if job.precision.params == "fp32" or job.engine.zero_stage == 3 or not on_device or not held.trainable:
        return Sequence([*(node for _, node in made), opening], "load")
    loose = [sized("parameters", "parameters of the modules", held.trainable, job.precision.params, pieces=held.numels)]
    if job.engine.zero_stage == 0 and not knobs.bf16_optimizer:  # FP16_Optimizer makes flat groups of copies
        loose.append(replace(loose[0], what="copies of the modules' parameters"))
    flat = [node for item, node in made if item.category == "parameters"]
    beside = [node for item, node in made if item.category != "parameters"]
    return Sequence([*map(alloc, loose), *flat, *map(free, loose), *beside, opening], "load")


def _inputs_on_host(rank: Rank, job: Job, replayer: Replayer) -> int:
    return sum(offloaded.host_bytes(job, replayer.context, replayer.elements(part)) for part in rank.chunks)


def _checkpointed_together(job: Job) -> int:
    """--split-transformers makes two of a layer, attention and MLP, which --checkpoint-num-layers counts (DeepSpeedExamples,
    Megatron-LM-v1.1.5-ZeRO3). A half by itself is not told apart here."""
    layers = job.engine.options.get("checkpoint_num_layers", 1)
    counted = layers if isinstance(layers, int) and layers > 0 else 1
    return max(1, counted // 2) if job.engine.options.get("split_transformers") else counted


def _groups(job: Job) -> tuple[tuple[str, int, int], ...]:
    """Groups that communicate: name, ranks, nodes crossed. Ranks are laid out tp fastest, then dp, then pp; under the pipeline engine
    each pair of neighbours has a communicator of its own (pipe/p2p.py, topology.py)."""
    layout = job.layout
    node = job.cluster.scale_up_gpus
    inner = layout.tp * layout.cp
    groups = {
        "tp": (layout.tp, layout.tp),
        "dp": (layout.dp * layout.cp, inner * layout.dp),
        "ep": (layout.ep, inner * layout.dp),
        "pp": (layout.pp, layout.world),
    }
    return tuple((name, size, -(-reach // node)) for name, (size, reach) in groups.items() if size > 1)
