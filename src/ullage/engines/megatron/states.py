"""Model states of Megatron-Core: parameter and gradient buffers, main parameters, moments, and how loading makes them.

Sources: megatron/core/distributed/param_and_grad_buffer.py, megatron/core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

from ullage.engines.base import shard, sized
from ullage.engines.megatron import hybrid, narrow, stowed
from ullage.engines.megatron.fsdp import GRADIENTS_SHARDED, PARAMETERS_SHARDED, shards
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.memory.rank import Rank


@frozen
class States:
    """Model states of one kind of parameter (dense or experts), in the order in which they are made."""

    loose: Item  # parameters as the modules first hold them, before the buffers replace them
    parameters: Item
    gradients: Item
    main: Item | None
    moments: tuple[Item, ...]
    opening: Item | None = None  # copies that are there for a moment as the optimizer is made
    copied: Item | None = None  # gradients in another type

    @property
    def late(self) -> list[Item]:
        """What the first optimizer step makes."""
        return [*self.moments, *([self.copied] if self.copied else [])]

    @property
    def all(self) -> list[Item]:
        return [self.parameters, self.gradients, *([self.main] if self.main else []), *self.late]


def states(job: Job, rank: Rank) -> list[States]:
    """Parameters and main gradients whole (less under Megatron-FSDP); main parameters and moments over the data-parallel group with
    the distributed optimizer.

    Expert parameters have buffers and a data-parallel group of their own. Where parameters are kept in 8 bits, those of Transformer
    Engine's linears are these alone (narrow.py), and MXFP8's are gathered in the gradients' buffer (param_and_grad_buffer.py,
    shared_buffer).
    """
    in_8_bits = narrow.names(job, rank) if job.precision.fp8_params else frozenset()
    found = []
    for expert in (False, True):
        mine = [local for local in rank.params if local.expert == expert and local.param.trainable]
        if tensors := trained_tensors(rank, expert=expert):
            whole = [local.numel for local in mine if local.name not in in_8_bits for _ in range(local.copies)]
            found.append(_states_of(job, tensors, whole, expert))
    return found


def gradients_type(job: Job) -> str:
    """Of the buffers that gradients add up in: Megatron-FSDP's have a type of their own where it is told one (mixed_precision.py)."""
    told = job.engine.options.get("megatron_fsdp_main_grads_dtype")
    sharded = job.engine.zero_stage >= GRADIENTS_SHARDED
    return told if sharded and isinstance(told, str) else job.precision.grads


def trained(rank: Rank, *, expert: bool) -> int:
    """Elements of what has gradients."""
    return sum(local.total for local in rank.params if local.expert == expert and local.param.trainable)


def trained_tensors(rank: Rank, *, expert: bool) -> list[int]:
    """Elements of each parameter that has gradients."""
    mine = [local for local in rank.params if local.expert == expert and local.param.trainable]
    return [local.numel for local in mine for _ in range(local.copies)]


def frozen_parameters(job: Job, rank: Rank) -> list[Item]:
    """Parameters without gradients: each a tensor of its module, in no buffer (param_and_grad_buffer.py takes what requires_grad).

    Where parameters are kept in 8 bits, those of Transformer Engine's linears are these alone (narrow.py).
    """
    in_8_bits = narrow.names(job, rank) if job.precision.fp8_params else frozenset()
    mine = [local for local in rank.params if not local.param.trainable and local.name not in in_8_bits]
    found = []
    for expert in (False, True):
        tensors = [local.numel for local in mine if local.expert == expert for _ in range(local.copies)]
        if tensors:
            what = f"frozen parameters ({'experts' if expert else 'dense'})"
            found.append(sized("parameters", what, sum(tensors), job.precision.params, pieces=tensors))
    return found


def _states_of(job: Job, tensors: list[int], whole: list[int], expert: bool) -> States:
    """whole: of the tensors, those that are not kept in 8 bits."""
    numel = sum(tensors)
    which = "experts" if expert else "dense"
    group = shards(job, expert)
    pieces = shard(tensors, group)
    precision = job.precision
    here = pieces[stowed.count(job, pieces) :]
    stay = here[hybrid.going(here, hybrid.fraction(job)) :]
    over = {least: group if job.engine.zero_stage >= least else 1 for least in (GRADIENTS_SHARDED, PARAMETERS_SHARDED)}

    def optimizer(what: str, dtype: str, here: tuple[int, ...]) -> Item | None:
        if not here:
            return None
        name, whole = f"{what} ({which})", len(here) == len(pieces)
        count, over = (numel, group) if whole else (sum(here), 1)
        return sized("optimizer", name, count, dtype, shards=over, pieces=here)

    two_copies = precision.master is not None and precision.master != precision.params
    moments = ("exp_avg", "exp_avg_sq") if job.optimizer.name.startswith("adam") else ()
    return States(
        loose=sized("parameters", f"parameters of the modules ({which})", sum(whole), precision.params, pieces=whole),
        parameters=sized(
            "parameters", f"parameters ({which})", sum(whole), precision.params, shards=over[PARAMETERS_SHARDED]
        ),
        gradients=sized(
            "gradients",
            f"main gradients ({which})",
            numel,
            gradients_type(job),
            shards=over[GRADIENTS_SHARDED],
            why="" if job.engine.zero_stage >= GRADIENTS_SHARDED else "never sharded",
        ),
        main=optimizer("main parameters", precision.master or "", stay if hybrid.is_aware(job) else here)
        if two_copies
        else None,
        moments=tuple(found for one in moments if (found := optimizer(one, job.optimizer.state, stay))),
        opening=hybrid.opening(job, tensors, which) or stowed.opening(job, pieces, which),
        copied=hybrid.gradients(job, pieces, which),
    )


def load(states: list[States], others: list[Item]) -> Node:
    """Modules make their parameters; DDP's buffers replace them; the optimizer copies its shard."""
    buffers = [node for one in states for node in (alloc(one.parameters), alloc(one.gradients))]
    return Sequence(
        [
            *(alloc(one.loose) for one in states),
            *buffers,
            *(free(one.loose) for one in states),
            *(alloc(one.opening) for one in states if one.opening),
            *(alloc(one.main) for one in states if one.main),
            *(free(one.opening) for one in states if one.opening),
            *(alloc(item) for item in others if item.bytes),
        ]
    )
