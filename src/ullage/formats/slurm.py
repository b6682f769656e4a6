"""A batch script for SLURM: one task a node, which starts torchrun for the node's GPUs."""

from __future__ import annotations

from ullage.formats.launch import exports, torchrun
from ullage.job.job import Job

TITLE = "a SLURM batch script"


def write(job: Job, comments: tuple[str, ...]) -> str:
    """The script for sbatch; partition, account and time are the site's."""
    head = "".join(f"# {line}\n" for line in comments)
    directives = {
        "job-name": "train",
        "nodes": job.cluster.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.cluster.gpus_per_node,
        "exclusive": None,
        "output": "%x-%j.out",
    }
    lines = "".join(f"#SBATCH --{name}{'' if value is None else f'={value}'}\n" for name, value in directives.items())
    master = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport MASTER_ADDR\n'
    command = torchrun(job, '"$MASTER_ADDR"', "    ")
    return f"#!/bin/bash\n{lines}{head}set -eu\n{exports(job)}{master}srun {command}\n"
