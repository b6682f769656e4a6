"""``job_to_dict``: a Job in docs/job.md's shape, every key written out, so that reading it gives the same job."""

from __future__ import annotations

from dataclasses import asdict

from ullage.errors import UllageError
from ullage.hardware.cluster import Cluster, Device, Link
from ullage.hardware.machine import calls
from ullage.job.job import Job, Lora, Loss, Recompute
from ullage.job.read import SCHEMA
from ullage.job.recipe import ALL_LINEAR
from ullage.model.config import ModelConfig


def job_to_dict(job: Job) -> dict[str, object]:
    """Plain JSON values. ``read_job`` of them equals ``job``, apart from ``defaults``: none of the job's is left to take.

    A model that came from a file is written as its keys, and is then called by its type.
    """
    data = asdict(job.data)
    del data["expert_load"]  # one step's, not the job's
    layout = asdict(job.layout)
    layout["pp_split"] = "even" if job.layout.pp_split is None else list(job.layout.pp_split)
    return {
        "schema": SCHEMA,
        "model": _model(job.model),
        "cluster": cluster_to_dict(job.cluster),
        "data": data,
        "layout": layout,
        "engine": {
            "name": job.engine.name,
            "zero_stage": job.engine.zero_stage,
            "shard_group": job.engine.shard_group,
            "options": job.engine.options.as_dict(),
        },
        "stack": job.stack,
        "stack_version": job.stack_version,
        "precision": asdict(job.precision),
        "optimizer": asdict(job.optimizer),
        "grad_clip": job.grad_clip,
        "recompute": _recompute(job.recompute),
        "attention": job.attention,
        "loss": _loss(job.loss),
        "offload": asdict(job.offload),
        "lora": None if job.lora is None else _lora(job.lora),
        "freeze": list(job.freeze),
        "compile": job.compile,
    }


def _model(model: ModelConfig) -> object:
    """A name of the catalogue, alone or with what was changed, where that means this very config; else all its keys."""
    from ullage.model.catalogue import find, model_config

    base = model.name.removesuffix(" changed")
    if find(base) is not None:
        usual = model_config(base)
        if usual == model:
            return base
        keys = model.keys.as_dict()
        changes = {
            key: value for key, value in keys.items() if key not in usual.keys or usual.keys[key] != model.keys[key]
        }
        written = {"base": base, **changes}
        try:
            if model_config(written) == model:
                return written
        except UllageError:  # not made by changing the base after all
            pass
    return model.keys.as_dict()


def cluster_to_dict(cluster: Cluster) -> object:
    from ullage.hardware.catalogue import cluster as read_cluster

    counts = {"gpus_per_node": cluster.gpus_per_node, "nodes": cluster.nodes}
    mapping: dict[str, object] = {"device": _device(cluster.device), **counts}
    usual = read_cluster(mapping)
    short = isinstance(mapping["device"], str) and not mapping["device"].endswith(".toml")
    if usual == cluster and short:
        nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
        return f"{nodes}{cluster.gpus_per_node}x{mapping['device']}"
    if usual.intra != cluster.intra:
        mapping["intra"] = _link(cluster.intra)
    if usual.inter != cluster.inter:
        mapping["inter"] = _link(cluster.inter)
    if usual.host_memory_bytes != cluster.host_memory_bytes and cluster.host_memory_bytes is not None:
        mapping["host_memory"] = cluster.host_memory_bytes
    return mapping


def _device(device: Device) -> object:
    from ullage.hardware.catalogue import device as read_device

    if device.measured is not None:
        return calls(device.measured)
    try:
        if read_device(device.name) == device:
            return device.name
    except UllageError:
        pass
    capability = device.compute_capability
    written = {
        "name": device.name,
        "memory": device.capacity_bytes,
        "bf16_flops_per_s": dict(device.flops_per_s).get("bf16"),
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "link_bytes_per_s": device.link_bytes_per_s,
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
    }
    return {key: value for key, value in written.items() if value is not None}


def _link(link: Link) -> dict[str, object]:
    return {"name": link.name} | ({} if link.bytes_per_s is None else {"bytes_per_s": link.bytes_per_s})


def _recompute(recompute: Recompute) -> object:
    match recompute.kind:
        case "every":
            return {"every": recompute.every}
        case "layers":
            return {"layers": recompute.layers}
        case "modules":
            return {"modules": list(recompute.modules)}
        case "sqrt":
            return {"sqrt": True}
        case word:
            return word


def _loss(loss: Loss) -> object:
    return loss.kind if loss.chunks is None else {"kind": loss.kind, "chunks": loss.chunks}


def _lora(lora: Lora) -> dict[str, object]:
    targets = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    return asdict(lora) | {"targets": targets, "modules_to_save": list(lora.modules_to_save)}
