"""A training as the ranks that launchers start: the processes are real, and of SLURM's the environment is what srun gives them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.training import job_of

from ullage.job.write import job_to_dict

STEPS, TIMEOUT_S = 2, 200
ULLAGE = ("-m", "ullage.cli.main")


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    """On two ranks, once over the data."""
    (tmp_path / "job.json").write_text(json.dumps(job_to_dict(job_of("fsdp2", 2))))
    np.save(tmp_path / "tokens.npy", np.arange(24 * 8 * STEPS, dtype=np.uint16) % 384)
    return ["train", "job.json", "--data", "tokens.npy", "--out", "run", "--json"]


def free_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def started(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    surroundings = {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **surroundings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def of_slurm(rank: int, port: str) -> dict[str, str]:
    """What ``srun --ntasks 2`` sets for a task (srun(1), OUTPUT ENVIRONMENT VARIABLES); the port is the user's."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost,node[01-03,7]",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": port,
    }


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What each has told; all are over."""
    try:
        said = [one.communicate(timeout=TIMEOUT_S) for one in processes]
    finally:
        for one in processes:
            one.kill()
    assert [one.returncode for one in processes] == [0] * len(processes), said
    return [(told, errors) for told, errors in said]


def is_trained(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len([*(folder / f"run/step-{STEPS}").glob("*.distcp")]) == 2
    assert (folder / "run/hf/model.safetensors").is_file()


def test_as_the_tasks_of_srun(training: list[str], tmp_path: Path) -> None:
    port = free_port()
    told = ended([started(tmp_path, *ULLAGE, *training, **of_slurm(rank, port)) for rank in range(2)])
    assert json.loads(told[0][0])["last"]["step"] == STEPS
    assert told[1] == ("", "")  # the first speaks for all
    is_trained(tmp_path)


def test_by_torchrun(training: list[str], tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port())
    ((told, _),) = ended([started(tmp_path, *launcher, *ULLAGE, *training)])
    assert json.loads(told)["last"]["step"] == STEPS
    is_trained(tmp_path)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_by_deepspeeds_launcher(training: list[str], tmp_path: Path) -> None:
    """Which puts --local_rank before the command's own arguments."""
    launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", free_port(), "--module")
    ((told, _),) = ended([started(tmp_path, *launcher, ULLAGE[1], *training)])
    assert '"step": 2' in told
    is_trained(tmp_path)
