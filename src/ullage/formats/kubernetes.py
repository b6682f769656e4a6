"""A PyTorchJob of Kubeflow's training operator: one pod a node. The operator sets MASTER_ADDR and the rest of the environment.

Source: kubeflow.org/v1 PyTorchJob (kubeflow/training-operator, pkg/apis/kubeflow.org/v1/pytorch_types.go).
"""

from __future__ import annotations

import shlex

from ullage.formats import yaml_text
from ullage.formats.launch import launch_of
from ullage.job.job import Job

TITLE = "a Kubeflow PyTorchJob"

_IMAGE = "YOUR_IMAGE"
_PORT = 29400


def write(job: Job, comments: tuple[str, ...]) -> str:
    """The manifest; the image, the volumes and the node selector are the site's."""
    replicas = {"Master": _replica(job, 1)}
    if job.cluster.nodes > 1:
        replicas["Worker"] = _replica(job, job.cluster.nodes - 1)
    manifest: dict[str, object] = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train"},
        "spec": {"nprocPerNode": str(job.cluster.gpus_per_node), "pytorchReplicaSpecs": replicas},
    }
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml_text.block(manifest)


def _replica(job: Job, count: int) -> dict[str, object]:
    launch = launch_of(job)
    words = [word for line in launch.command for word in shlex.split(line)]
    rendezvous = ["--nnodes", str(job.cluster.nodes), "--nproc-per-node", str(job.cluster.gpus_per_node)]
    if job.cluster.nodes > 1:
        rendezvous += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"$(MASTER_ADDR):{_PORT}", "--rdzv-id", "train"]
    container = {
        "name": "pytorch",  # the name that the operator looks for
        "image": _IMAGE,
        "command": ["torchrun", *rendezvous, *words],
        "env": [{"name": name, "value": value} for name, value in launch.environment],
        "resources": {"limits": {"nvidia.com/gpu": job.cluster.gpus_per_node}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
