"""Launch lines: what a shell and Kubernetes' schema make of them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ullage.formats.convert import convert

MEGATRON = "model: llama-3.1-8b\ncluster: 2x8xH100-SXM-80GB\nlayout: {tp: 2}\nengine: {name: megatron, zero_stage: 1}\n"
DEEPSPEED = "model: llama-3.1-8b\ncluster: 8xH100-SXM-80GB\nengine: {name: deepspeed}\n"
TITAN = "model: llama-3.1-8b\ncluster: 2x8xH100-SXM-80GB\nengine: {name: fsdp2}\nstack: torchtitan\n"


def text_of(tmp_path: Path, job: str, to: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(f"schema: 1\n{job}")
    return convert(path, to).text


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
@pytest.mark.parametrize("job", [MEGATRON, DEEPSPEED, TITAN], ids=["megatron", "deepspeed", "torchtitan"])
def test_scripts_are_shell(tmp_path: Path, job: str, to: str) -> None:
    text = text_of(tmp_path, job, to)
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-n"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(
        text[text.index("torchrun") if to == "torchrun" else text.index("srun ") :].replace("\\\n", " "), comments=True
    )
    nodes = 2 if "2x8x" in job else 1
    assert words[words.index("--nnodes") + 1] == str(nodes)
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert ("--rdzv-endpoint" in words) == (nodes > 1)


def test_each_engine_starts_its_own_way(tmp_path: Path) -> None:
    assert "--tensor-model-parallel-size 2" in text_of(tmp_path, MEGATRON, "torchrun")
    assert "--deepspeed ds_config.json" in text_of(tmp_path, DEEPSPEED, "torchrun")
    assert "--job.config_file train.toml" in text_of(tmp_path, TITAN, "torchrun")


def test_slurm_asks_for_the_cluster(tmp_path: Path) -> None:
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text_of(tmp_path, MEGATRON, "slurm"), re.M))
    assert (directives["nodes"], directives["gpus-per-node"], directives["ntasks-per-node"]) == ("2", "8", "1")


@pytest.mark.parametrize(("job", "workers"), [(MEGATRON, 1), (DEEPSPEED, None)], ids=["two nodes", "one node"])
def test_kubernetes(tmp_path: Path, job: str, workers: int | None) -> None:
    manifest = yaml.safe_load(text_of(tmp_path, job, "kubernetes"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert replicas.get("Worker", {}).get("replicas") == workers
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert all(isinstance(word, str) for word in container["command"])
