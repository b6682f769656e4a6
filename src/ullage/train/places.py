"""Where a process stands among the ranks: what torchrun, DeepSpeed's launcher or SLURM has put into its environment.

torchrun and deepspeed set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; srun sets SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS
and the list of its nodes, the first of which has rank 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ullage.errors import InvalidInput
from ullage.frozen import frozen

DEFAULT_PORT = 29500
"""torchrun's (torch/distributed/run.py, --master-port)."""


@frozen
class Place:
    """local_world: processes on this node."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    master: str
    port: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place, None where no launcher has started it."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        world = _number(environment, "WORLD_SIZE")
        local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or str(world)
        return Place(
            rank=_number(environment, "RANK"),
            local_rank=_number(environment, "LOCAL_RANK", environment["RANK"]),
            world=world,
            local_world=_number({"LOCAL_WORLD_SIZE": local}, "LOCAL_WORLD_SIZE"),
            master=environment.get("MASTER_ADDR", "localhost"),
            port=_number(environment, "MASTER_PORT", str(DEFAULT_PORT)),
        )
    if "SLURM_PROCID" in environment and _number(environment, "SLURM_NTASKS", "1") > 1:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
        of_job = environment.get("SLURM_TASKS_PER_NODE") or environment["SLURM_NTASKS"]
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or of_job
        return Place(
            rank=_number(environment, "SLURM_PROCID"),
            local_rank=_number(environment, "SLURM_LOCALID", "0"),
            world=_number(environment, "SLURM_NTASKS"),
            local_world=_number({"SLURM_TASKS_PER_NODE": re.split(r"[(,]", per_node)[0]}, "SLURM_TASKS_PER_NODE"),
            master=environment.get("MASTER_ADDR", first_node(nodes)),
            port=_number(environment, "MASTER_PORT", str(DEFAULT_PORT)),
        )
    return None


def first_node(nodes: str) -> str:
    """The first of a SLURM node list: ``gpu[07-09,12],login`` -> ``gpu07``, ``rack[2,4]-n[1-3]`` -> ``rack2-n1``."""
    found = re.match(r"(?:[^\[\],\s]|\[\d[^\[\]]*\])+", nodes)
    if found is None or nodes[found.end() :][:1] not in ("", ","):
        raise InvalidInput("is no list of nodes", key="SLURM_STEP_NODELIST", value=nodes[:80])
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0])


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for the run: rank 0, or the only one."""
    found = place(environment)
    return found is None or found.rank == 0


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    written = environment.get(name, default)
    if written is None or not written.isdecimal():
        raise InvalidInput(
            "is no count", key=name, value=written, remedy="the launcher sets it: torchrun, deepspeed or srun"
        )
    return int(written)
