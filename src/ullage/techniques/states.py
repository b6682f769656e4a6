"""States per parameter: the arithmetic that this field knows by heart (2 + 2 + 12 bytes, divided by what shards them).

Source of the division: ZeRO, arXiv 1910.02054, section 5. It says what the states come to before rounding and buckets; the ledger says
what they are.
"""

from __future__ import annotations

from fractions import Fraction

from ullage import dtypes
from ullage.engines.registry import ranks_of
from ullage.frozen import frozen
from ullage.job.adapted import graph_of
from ullage.job.job import Job

# Moments that an optimizer keeps for every parameter. Others keep what depends on a parameter's shape.
MOMENTS = {"adam": 2, "adamw": 2, "lion": 1}


@frozen
class State:
    """``bits`` of each parameter, divided over ``shards`` ranks. role: parameters, gradients or optimizer."""

    role: str
    what: str
    bits: int
    shards: int

    @property
    def per_parameter(self) -> Fraction:
        return Fraction(self.bits, 8 * self.shards)


@frozen
class States:
    """The states of one kind of parameter on one rank.

    parameters: how many of them the rank has, after tensor, pipeline and expert parallelism.
    """

    kind: str
    parameters: int
    states: tuple[State, ...]

    @property
    def bytes(self) -> int:
        return int(self.parameters * sum(state.per_parameter for state in self.states))

    @property
    def unsharded_bytes(self) -> int:
        return self.parameters * sum(state.bits for state in self.states) // 8


def states(job: Job, stage: int) -> tuple[States, ...]:
    """Dense parameters of a pipeline stage, and experts where there are any.

    Nothing where only a part of the parameters is trained, or the optimizer keeps no moments of their size.
    """
    if job.lora is not None or job.freeze or job.optimizer.name not in MOMENTS:
        return ()
    rank = ranks_of(job, graph_of(job))[stage]
    kinds = {"dense": rank.numel(expert=False), "experts": rank.numel(expert=True)}
    return tuple(
        States(
            kind=kind if kinds["experts"] else "all",
            parameters=count,
            states=_states(job, kind == "experts"),
        )
        for kind, count in kinds.items()
        if count
    )


def _states(job: Job, expert: bool) -> tuple[State, ...]:
    precision = job.precision
    separate = precision.master is not None and precision.master != precision.params
    params, grads, optimizer = _shards(job, expert)
    found = [
        State(
            role="parameters",
            what=f"parameters in {precision.params}",
            bits=dtypes.bits(precision.params),
            shards=params,
        ),
        State(
            role="gradients", what=f"gradients in {precision.grads}", bits=dtypes.bits(precision.grads), shards=grads
        ),
    ]
    if separate and precision.master is not None:
        bits = dtypes.bits(precision.master)
        found.append(State(role="optimizer", what=f"master copy in {precision.master}", bits=bits, shards=optimizer))
    state = "uint8" if job.optimizer.state == "8bit" else job.optimizer.state
    for moment in ("first moment", "second moment")[: MOMENTS[job.optimizer.name]]:
        what = f"{moment} in {job.optimizer.state}"
        found.append(State(role="optimizer", what=what, bits=dtypes.bits(state), shards=optimizer))
    return tuple(found)


def _shards(job: Job, expert: bool) -> tuple[int, int, int]:
    """Ranks over which parameters, gradients and optimizer states are divided."""
    layout, engine = job.layout, job.engine
    group = layout.expert_dp if expert else layout.dp * layout.cp
    if engine.shard_group is not None:
        group = min(group, engine.shard_group)
    if engine.name in ("fsdp1", "fsdp2"):
        return (group, group, group) if engine.zero_stage else (1, 1, 1)
    stage = engine.zero_stage
    return (group if stage >= 3 else 1, group if stage >= 2 else 1, group if stage >= 1 else 1)
