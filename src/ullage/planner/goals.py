"""What a plan is to be best at."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.frozen import replace
from ullage.hardware.cluster import Cluster
from ullage.job.job import Job
from ullage.planner.strategies import Goal, Value

GOALS = {
    "fastest": "the least seconds a step on all GPUs",
    "cheapest": "the least GPU-seconds a step, on as many of the GPUs as that takes",
    "fewest-gpus": "on as few of the GPUs as it can be trained on",
    "longest-sequence": "the longest sequences that can be trained on all GPUs",
    "largest-batch": "the most sequences in one forward and backward, nothing accumulated",
    "simplest": "the fewest and simplest techniques",
}
ON_FEWER = ("cheapest", "fewest-gpus")
"""Goals for which a part of the cluster may be better than all of it."""

_EVERY_NODE = 64
"""Up to so many nodes each number of them is looked at; beyond, their halves, quarters and so on."""


def goal(name: str) -> Goal:
    """The value that is to be least, of a job and its seconds a sequence."""
    return _GOALS[name]


def effort(job: Job) -> int:
    """How much a person has to understand and keep working: what wraps a model counts one, what reaches into its layers two, what cuts it
    apart three. A judgement, for the goal ``simplest`` alone."""
    layout, engine, recompute = job.layout, job.engine, job.recompute
    used = (
        (1, engine.name == "deepspeed"),
        (2, engine.name == "megatron"),  # its own layers, checkpoints and data
        (1, layout.dp > 1),
        (1, engine.zero_stage > 0),
        (1, engine.shard_group is not None),
        (2, layout.tp > 1),
        (1, layout.sp),
        (2, layout.cp > 1),
        (2, layout.ep > 1),
        (1, layout.etp > 1),
        (3, layout.pp > 1),
        (1, layout.vpp > 1),
        (1, layout.pp_split is not None),
        (1, recompute.kind != "none"),
        (1, recompute.kind not in ("none", "full", "selective")),
        (1, job.offload.optimizer != "none"),
        (1, job.offload.params != "none"),
    )
    return sum(weight for weight, on in used if on)


def _fastest(job: Job, sequence_s: float) -> Value:
    return (sequence_s,)


def _cheapest(job: Job, sequence_s: float) -> Value:
    return (sequence_s * job.cluster.gpus,)


def _fewest_gpus(job: Job, sequence_s: float) -> Value:
    return (float(job.cluster.gpus), sequence_s)


def _largest_batch(job: Job, sequence_s: float) -> Value:
    return (-float(job.data.micro_batch * job.layout.dp), sequence_s)


def _simplest(job: Job, sequence_s: float) -> Value:
    """A bound of a job without its pipeline or its stage counts what it has so far: never more than in the end."""
    return (float(effort(job)), sequence_s)


_GOALS: dict[str, Goal] = {
    "fastest": _fastest,
    "cheapest": _cheapest,
    "fewest-gpus": _fewest_gpus,
    "longest-sequence": _fastest,
    "largest-batch": _largest_batch,
    "simplest": _simplest,
}


def smaller(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, and its parts: some of its nodes, or some GPUs of one node."""
    nodes = cluster.nodes
    if nodes <= _EVERY_NODE:
        counts = list(range(nodes, 1, -1))
    else:
        counts = [nodes]
        while counts[-1] > 1 and counts[-1] % 2 == 0:
            counts.append(counts[-1] // 2)
        counts = [one for one in counts if one > 1]
    for one in counts:
        yield replace(cluster, nodes=one)
    for gpus in range(cluster.gpus_per_node, 0, -1):
        yield replace(cluster, nodes=1, gpus_per_node=gpus)
