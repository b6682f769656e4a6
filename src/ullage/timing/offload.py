"""Seconds of states that wait on the host or on NVMe: copies over the host link, and the optimizer on the host's cores.

Sources: DeepSpeed runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py; torch distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from ullage import dtypes
from ullage.calibration.host import (
    HostOptimizer,
    host_bytes_per_s,
    host_optimizer_bytes_per_s,
    nvme_bytes_per_s,
    thread_elements_per_s,
)
from ullage.engines import hosted, offloaded
from ullage.engines.base import flag
from ullage.engines.deepspeed.offload import pins
from ullage.engines.deepspeed.options import version_of
from ullage.engines.megatron import hybrid, stowed
from ullage.engines.megatron.offloaded import layers_of, stash
from ullage.engines.optimizer import MOMENTS
from ullage.errors import Unsupported
from ullage.job.adapted import adapters_type, graph_of
from ullage.job.job import Job
from ullage.kernels import stacks
from ullage.kernels.megatron_offload import one_layer_bytes
from ullage.kernels.step import Context
from ullage.memory.chunk import CHECKPOINT, Element, Replayer, stream_bytes
from ullage.timing.states import PARAMETERS_SHARDED, reductions

PINNED_PARAMETERS = (0, 14, 1)
"""Since then stages 1 and 2 copy stepped parameters from pinned memory (DeepSpeed #5301); before, from a cast made on the spot."""

EAGER_PASSES = 13
"""Tensors in the parameters' type that AdamW's foreach kernels read and write beside what one fused kernel does (20 and 7): counted from
torch/optim/adamw.py, _multi_tensor_adamw, and held against no measurement."""


def refuse(job: Job) -> None:
    """Raises Unsupported for states on the host that no engine is known to step there."""
    offload, engine = job.offload, job.engine.name
    if offload.optimizer == "none" and offload.params == "none":
        return
    whole = offload.params != "none" if engine in ("fsdp1", "fsdp2") else engine in ("deepspeed", "megatron", "single")
    if not whole:
        key, value = "offload.optimizer", offload.optimizer
        raise Unsupported(f"is not timed under engine {engine} without its parameters", key=key, value=value)


def is_hosted(job: Job) -> bool:
    """Whether the optimizer steps on the host."""
    return job.offload.optimizer != "none"


def share(job: Job) -> float:
    """Of a rank's elements, what is stepped on the host."""
    return hybrid.fraction(job) if job.engine.name == "megatron" else float(is_hosted(job))


def offloads(job: Job) -> bool:
    """Whether anything of a step is copied to the host or back."""
    offload = job.offload
    told = {offload.optimizer, offload.params, offload.activations} != {"none"}
    return told or offloaded.goes(job) or _is_fine_grained(job) or layers_of(job) > 0


def is_beside(job: Job) -> bool:
    """Whether gradients are copied beside the backward: in pinned memory, on a stream of their own.

    DeepSpeed's is the reductions' stream, where ``overlap_comm`` makes one (default at stage 3). FSDP2 copies a gradient that is added
    to one on the host synchronously (_fsdp_collectives.py, foreach_reduce). torchao's has a stream of its own.
    """
    if job.engine.name == "deepspeed":
        return pins(job) and flag(job.engine.options, "overlap_comm", job.engine.zero_stage == PARAMETERS_SHARDED)
    return hosted.is_used(job) or job.data.grad_accum == 1


# -- copies


def fetched_s(job: Job, trained: float, frozen_bytes: float, *, both: bool) -> float:
    """Parameters of a shard of so many trained elements brought to the GPU ahead of a gather, with frozen ones. both: gradients leave
    meanwhile."""
    if job.offload.params == "none":
        return 0.0
    kept_as = job.precision.params if job.engine.name == "deepspeed" else _master(job)
    n_bytes = trained * _bytes(kept_as) + frozen_bytes
    read = n_bytes / _nvme_bytes_per_s(job) if job.offload.params == "nvme" else 0.0
    return read + n_bytes / _link_bytes_per_s(job, to_host=False, both=both)


def gradients_s(job: Job, numel: float) -> float:
    """Gradients of a shard of ``numel`` elements taken to the host after one reduction; what one micro-batch alone copies is spread
    over all."""
    if not is_hosted(job) or job.engine.name == "megatron":  # whose optimizer copies them
        return 0.0
    both = job.offload.params != "none"
    there, back = (numel * n_bytes / reductions(job) for n_bytes in _gradient_bytes(job))
    return there / _link_bytes_per_s(job, to_host=True, both=both) + back / _link_bytes_per_s(
        job, to_host=False, both=both
    )


def _gradient_bytes(job: Job) -> tuple[float, float]:
    """Of one element in a step: to the host, and back from it.

    DeepSpeed adds those of several micro-batches on the GPU: what is on the host comes for it and goes again (stage 3 always has it come,
    for its norm). At the end of the accumulation they go in the masters' type.
    """
    last, micro_batches, stage = _bytes(_master(job)), job.data.grad_accum, job.engine.zero_stage
    if job.engine.name != "deepspeed":
        return reductions(job) * last, 0.0
    made = _bytes(job.precision.grads if stage == PARAMETERS_SHARDED else job.precision.params)
    if stage == PARAMETERS_SHARDED:
        return micro_batches * made + last, micro_batches * made
    if micro_batches == 1:
        return last, 0.0
    if reductions(job) == 1:
        return made + last, made
    return micro_batches * made + last, (micro_batches - 1) * made


def returned_s(job: Job, numel: float) -> float:
    """Stepped parameters of a shard of ``numel`` elements copied to the GPU, where they stay there; to NVMe, where they come from it.
    Megatron's with the gradients that it copied to the host before."""
    n_bytes = numel * _bytes(job.precision.params)
    if stowed.is_used(job):
        return _fetched_s(job, numel)
    if job.offload.params == "nvme":
        return n_bytes / _nvme_bytes_per_s(job, write=True)
    if (
        job.offload.params != "none" or not is_hosted(job) or hosted.is_used(job)
    ):  # torchao's copies run beside its steps
        return 0.0
    if job.engine.name == "megatron":
        return 0.0 if hybrid.overlaps(job) else sum(_copied_s(job, numel, to_host=way) for way in (True, False))
    pinned = job.engine.zero_stage < PARAMETERS_SHARDED and version_of(job) >= PINNED_PARAMETERS and pins(job)
    return n_bytes / host_bytes_per_s(job.cluster.device, "h2d", pinned=pinned).value


def _fetched_s(job: Job, numel: float) -> float:
    """Megatron's states of ``numel`` elements of a rank that come for their update; that they go is hidden beside the next forward, or
    beside those that come."""
    moved = stowed.fraction(job) * stowed.bytes_of(job, numel)
    return moved / host_bytes_per_s(job.cluster.device, "h2d", both=stowed.chunk_bytes(job) > 0).value


def _copied_s(job: Job, numel: float, *, to_host: bool) -> float:
    """Megatron's gradients to the host, or its stepped parameters back, of ``numel`` elements of a rank, both fp32 (ATen/native/cuda/
    Copy.cu casts non-blocking copies on the GPU). Where one is stepped while others are copied, both ways are busy."""
    pinned = hybrid.pins(job, "grads" if to_host else "params") or (not to_host and not hybrid.is_aware(job))
    rate = host_bytes_per_s(job.cluster.device, "d2h" if to_host else "h2d", hybrid.overlaps(job), pinned).value
    return numel * share(job) * _bytes(hybrid.STEPPED_AS) / rate


def _link_bytes_per_s(job: Job, *, to_host: bool, both: bool) -> float:
    pinned = job.engine.name != "deepspeed" or pins(job)
    return host_bytes_per_s(job.cluster.device, "d2h" if to_host else "h2d", both, pinned).value


# -- the optimizer


def optimizer_s(job: Job, numel: float) -> float:
    """The step of ``numel`` elements of each rank: all ranks of a node share its memory, and torchrun gives each of several one thread
    (torch distributed/run.py, OMP_NUM_THREADS); DeepSpeed's launcher leaves them all."""
    ranks, whole, numel = _ranks_of_a_node(job), numel, numel * share(job)
    fused = job.engine.name in ("deepspeed", "megatron", "single") or job.optimizer.impl == "fused"
    impl: HostOptimizer = "fused" if fused else "foreach"
    rate = host_optimizer_bytes_per_s(job.cluster.device, impl, ranks).value
    seconds = numel * ranks * _moved_bytes(job, impl) / rate
    if job.engine.name != "deepspeed" and ranks > 1:
        seconds = max(seconds, numel / thread_elements_per_s(impl).value)
    if job.engine.name == "megatron" and hybrid.overlaps(job):
        seconds = max(seconds, *(_copied_s(job, whole, to_host=way) for way in (True, False)))
    if hosted.is_used(job):
        seconds = max(seconds, numel * _bytes(_master(job)) / _link_bytes_per_s(job, to_host=False, both=False))
    return seconds + _swapped_s(job, numel)


def _moved_bytes(job: Job, impl: HostOptimizer) -> float:
    """Of one element, through the host's memory: DeepSpeed scales gradients in the masters' type and casts what it stepped."""
    master = _bytes(_master(job))
    gradient = master
    once = gradient + 2 * master + 2 * _moments_bytes(job) + (EAGER_PASSES * master if impl == "foreach" else 0.0)
    if job.engine.name == "deepspeed":
        clipped = 2 * gradient if job.grad_clip or job.precision.params == "fp16" else 0.0
        return once + clipped + master + _bytes(job.precision.params)
    if job.engine.name in ("megatron", "single"):  # clips on the GPU
        return once
    return once + (3 * gradient if job.grad_clip else 0.0)


def _swapped_s(job: Job, numel: float) -> float:
    """Masters, moments and gradients from NVMe and back, sub-group by sub-group, none beside the step (pipeline_read and pipeline_write
    are off unless set; swap_tensor/partitioned_optimizer_swapper.py)."""
    if job.offload.optimizer != "nvme":
        return 0.0
    moved = numel * (2 * _bytes(_master(job)) + _moments_bytes(job))
    return moved / _nvme_bytes_per_s(job) + moved / _nvme_bytes_per_s(job, write=True)


def _moments_bytes(job: Job) -> float:
    return len(MOMENTS.get(job.optimizer.name, ("momentum",))) * _bytes(job.optimizer.state)


def _master(job: Job) -> str:
    """What is stepped: FSDP keeps it alone, and casts it on the GPU for each gather; adapters have a type of their own."""
    if job.lora is not None and job.engine.name != "deepspeed":
        return adapters_type(job)
    return job.precision.master or job.precision.params


def _nvme_bytes_per_s(job: Job, *, write: bool = False) -> float:
    """A rank's share, of a node with a drive for each of its GPUs (DGX A100 and H100, AWS p4d and p5)."""
    return nvme_bytes_per_s(job.cluster.gpus_per_node, write).value / _ranks_of_a_node(job)


def _ranks_of_a_node(job: Job) -> int:
    return min(job.layout.world, job.cluster.gpus_per_node)


def _bytes(dtype: str) -> float:
    return dtypes.bits(dtype) / 8


# -- activations


def left_s(job: Job, context: Context, element: Element) -> float:
    """What one block leaves on the host for its backward, copied one way: the input of a checkpointed block, what Megatron's
    fine-grained offloading names, or a layer's part of the layers that Transformer Engine offloads whole: those have until as many later
    have run as stay. All go on a stream of their own, from and to pinned memory, but where a pass waits (engines/offloaded.py)."""
    away = layers_of(job)
    if away and element.block.role == "layer":
        replayer = Replayer(context=context, recompute=job.recompute, early_stop=False, reentrant=True)
        whole = sum(item.bytes * count for item, count in stash(element.block, replayer))
        n_bytes = whole * away / graph_of(job).layers
    elif _is_fine_grained(job):
        n_bytes = float(one_layer_bytes(stacks.lower(element.block, context)))
    elif offloaded.goes(job) and element.mode == CHECKPOINT:
        n_bytes = offloaded.part(job) * stream_bytes(element.block.input, context)
    else:
        return 0.0
    return n_bytes / host_bytes_per_s(job.cluster.device, "d2h", pinned=not offloaded.waits(job)).value


def _is_fine_grained(job: Job) -> bool:
    return flag(job.engine.options, "fine_grained_activation_offloading", False)
