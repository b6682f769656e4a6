"""What starts a run: the command of a job's engine, the files that it reads, and torchrun's own arguments."""

from __future__ import annotations

import shlex

from ullage.formats import megatron, shell_text
from ullage.frozen import frozen
from ullage.job.job import Job

ENTRY = "train.py"
_PORT = 29500


@frozen
class Launch:
    """command: what each process runs, in words, a word of several arguments a line; needs: (file, ullage convert's --to)."""

    command: tuple[str, ...]
    needs: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]


def launch_of(job: Job) -> Launch:
    """The command of a job's engine. Source: each engine's documentation of its entry point."""
    environment = [("OMP_NUM_THREADS", "8")]
    if job.engine.options.get("expandable_segments"):
        environment.append(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
    needs: tuple[tuple[str, str], ...] = ()
    if job.engine.name == "megatron":
        environment.append(("CUDA_DEVICE_MAX_CONNECTIONS", "1"))
        arguments = shell_text.arguments_of(megatron.leaves(job))
        return Launch(command=("pretrain_gpt.py", *arguments), needs=needs, environment=tuple(environment))
    if job.stack == "torchtitan":
        command: tuple[str, ...] = ("-m torchtitan.train", "--job.config_file train.toml")
        needs = (("train.toml", "torchtitan"),)
    elif job.engine.name == "deepspeed":
        command = (ENTRY, "--deepspeed ds_config.json")
        needs = (("ds_config.json", "deepspeed"),)
    else:
        command = (ENTRY,)
    return Launch(command=command, needs=needs, environment=tuple(environment))


def torchrun(job: Job, endpoint: str, indent: str) -> str:
    """torchrun with its rendezvous, one argument a line; ``endpoint``: host[:port] in the shell's words."""
    launch = launch_of(job)
    lines = [f"--nnodes {job.cluster.nodes}", f"--nproc-per-node {job.cluster.gpus_per_node}"]
    if job.cluster.nodes > 1:
        lines += ["--rdzv-backend c10d", f"--rdzv-endpoint {endpoint}:{_PORT}", "--rdzv-id ullage"]
    return f" \\\n{indent}".join(["torchrun", *lines, *launch.command])


def exports(job: Job) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in launch_of(job).environment)


def notes(job: Job) -> tuple[str, ...]:
    """The files that the command reads."""
    found = [f"{file}: ullage convert JOB --to {to} --out {file}" for file, to in launch_of(job).needs]
    if job.engine.name not in ("megatron",) and job.stack != "torchtitan":
        found.append(f"{ENTRY} stands for your script: model, data and recipe are its own")
    return tuple(found)
