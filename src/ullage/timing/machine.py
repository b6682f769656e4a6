"""Seconds of single kernels and transfers on one machine, from what was measured of it."""

from __future__ import annotations

from functools import lru_cache

from ullage.calibration.attention import attention_efficiency
from ullage.calibration.collectives import curve
from ullage.calibration.matmul import (
    Scales,
    early_library,
    grouped_matmul_efficiency,
    matmul_efficiency,
    misaligned,
    scaled,
)
from ullage.calibration.measured import attention_flops_per_s, matmul_flops_per_s
from ullage.calibration.measured import traffic_s as measured_traffic_s
from ullage.calibration.memory import MEASURED_AS, MemoryKind, kernel_start_s, memory_efficiency
from ullage.calibration.overlap import called_s
from ullage.comm.cost import Cost
from ullage.comm.cost import seconds as transfer
from ullage.comm.group import Group
from ullage.comm.group import axis_group as joined
from ullage.engines.fsdp2.shapes import shard_count
from ullage.errors import Unsupported
from ullage.frozen import replace
from ullage.hardware.cluster import Cluster, Device
from ullage.hardware.curve import Kind
from ullage.hardware.measured import Direction
from ullage.job.job import Job, Layout
from ullage.timing.work import Attention, Exchange, Matmul, Traffic

BACKWARD_OF_ATTENTION = 2.5
"""Matmuls of a fused attention's backward, of the forward's two: it computes the scores again (arXiv 2307.08691, section 3.1)."""


def peak_flops_per_s(device: Device, dtype: str) -> float:
    rates = dict(device.flops_per_s)
    found = (
        rates.get(dtype) or (rates.get("tf32") if dtype == "fp32" else None) or rates.get("bf16") or rates.get("fp16")
    )
    if not found:
        raise Unsupported(
            "has no known peak",
            key=f"{device.name}: flops_per_s",
            remedy="write the device as a mapping with bf16_flops_per_s",
        )
    return found


def bandwidth_bytes_per_s(device: Device) -> float:
    if not device.memory_bytes_per_s:
        raise Unsupported(
            "has no known memory bandwidth",
            key=f"{device.name}: memory_bytes_per_s",
            remedy="write the device as a mapping with memory_bytes_per_s",
        )
    return device.memory_bytes_per_s


def matmul_s(device: Device, work: Matmul) -> float:
    how = work.accumulate, work.streams, work.aligned, work.scales, work.cuda, work.direction
    return multiplied_s(device, work.dtype, work.m, work.n, work.k, work.groups, *how)


@lru_cache(maxsize=65536)
def multiplied_s(
    device: Device,
    dtype: str,
    m: int,
    n: int,
    k: int,
    groups: int,
    accumulate: bool,
    streams: int,
    aligned: bool,
    scales: Scales,
    cuda: str,
    direction: Direction = "forward",
) -> float:
    """A ``Matmul`` by its fields: a search asks for a hundred thousand."""
    if device.measured is not None:
        return 2 * m * n * k * groups / matmul_flops_per_s(device.measured, dtype, direction, m, n, k, groups)
    if groups > 1:
        share = grouped_matmul_efficiency(device, dtype, groups, m, n, k, accumulate, streams)
    else:
        share = matmul_efficiency(device, dtype, m, n, k, accumulate)
    kept = share.value if aligned else share.value * misaligned(dtype, cuda).value
    kept *= scaled(scales, m, n, k).value
    if cuda:
        kept *= early_library(device, dtype, cuda).value
    return 2 * m * n * k * groups / (peak_flops_per_s(device, dtype) * kept)


@lru_cache(maxsize=4096)
def attention_s(device: Device, work: Attention, impl: str, *, backward: bool) -> float:
    times = BACKWARD_OF_ATTENTION if backward else 1.0
    keys = max(1, work.keys // work.parts)  # of one kernel
    if device.measured is not None:
        how = work.head_dim, keys, work.causal, backward
        return times * work.flops / attention_flops_per_s(device.measured, work.dtype, *how)
    share = attention_efficiency(
        device, impl, work.dtype, work.head_dim, keys, work.causal, backward, work.batch * work.heads
    )
    return times * work.flops / (peak_flops_per_s(device, work.dtype) * share.value)


@lru_cache(maxsize=65536)
def traffic_s(device: Device, work: Traffic, *, backward: bool) -> float:
    if not work.bytes:
        return 0.0
    if device.measured is not None:
        kind = MEASURED_AS.get(work.kind, work.kind)
        each = work.bytes / work.kernels
        return work.kernels * measured_traffic_s(device.measured, kind, work.dtype, each, backward=backward)
    share = memory_efficiency(device, work.kind).value
    return work.kernels * kernel_start_s().value + work.bytes / (bandwidth_bytes_per_s(device) * share)


def moved_s(device: Device, moved_bytes: float, kind: MemoryKind = "pointwise", dtype: str = "fp32") -> float:
    """Bytes read and written by kernels so large that their start does not count. dtype: what they compute in."""
    if device.measured is not None:
        return measured_traffic_s(device.measured, kind, dtype, moved_bytes, backward=False)
    return moved_bytes / (bandwidth_bytes_per_s(device) * memory_efficiency(device, kind).value)


@lru_cache(maxsize=4096)
def axis_group(cluster: Cluster, layout: Layout, axis: str, shard: int = 1) -> Group:
    """The ranks that an axis joins: tensor parallelism is the innermost, then context, data and pipeline parallelism.

    shard: ranks of a shard group ("shard"); "replica": how many there are of it. "expert_...": of experts' parameters.
    """
    inner = layout.tp * layout.cp
    strides = {
        "tp": (1, layout.tp),
        "cp": (layout.tp, layout.cp),
        "dp": (layout.tp, layout.dp * layout.cp),
        "ep": (max(1, layout.etp), layout.ep),
        "expert_dp": (max(1, layout.ep * layout.etp), layout.expert_dp),
        "pp": (inner * layout.dp, layout.pp),
        "shard": (layout.tp, shard),
        "replica": (layout.tp * shard, max(1, layout.dp * layout.cp // shard)),
        "expert_shard": (max(1, layout.ep * layout.etp), shard),
        "expert_replica": (max(1, layout.ep * layout.etp) * shard, max(1, layout.expert_dp // shard)),
    }
    stride, size = strides[axis]
    return joined(cluster, stride, size)


def exchange_group(job: Job, axis: str) -> Group:
    """The ranks that an exchange of a job joins."""
    shard = shard_count(job, expert=axis.startswith("expert"))
    return axis_group(job.cluster, job.layout, axis, shard)


def exchange_cost(job: Job, work: Exchange) -> Cost:
    """Seconds of one exchange of a job by itself, and how it is done."""
    return called(work.kind, work.payload_bytes, exchange_group(job, work.axis), job.cluster, work.copies)


@lru_cache(maxsize=65536)
def called(kind: Kind, payload_bytes: int, group: Group, cluster: Cluster, copies: int = 1) -> Cost:
    """A collective as a training process calls it."""
    cost = transfer(kind, payload_bytes, group, curve(cluster), copies)
    if cluster.device.measured is not None and group.domains == 1:  # measured as torch calls it
        return cost
    return replace(cost, seconds=cost.seconds + called_s(kind)) if cost.seconds else cost


def sent_s(cluster: Cluster, layout: Layout, work: Exchange) -> float:
    """Seconds of an exchange over one of the layout's own axes."""
    group = axis_group(cluster, layout, work.axis)
    return called(work.kind, work.payload_bytes, group, cluster, work.copies).seconds
