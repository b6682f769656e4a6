"""--optimizer-cpu-offload: a part of the parameters is stepped on the host, the rest on the GPU.

Sources: Megatron-Core optimizer/cpu_offloading/hybrid_optimizer.py (HybridDeviceOptimizer), optimizer/__init__.py (which optimizers it is
made of), optimizer/distrib_optimizer.py. Without the precision-aware optimizer it is handed the fp32 main parameters, which stay on the
GPU beside their copies; with it the 16-bit ones, and keeps fp32 copies of all on the side where they are stepped. Both sides' moments are
fp32, whatever the precision-aware optimizer is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as ListLike

from ullage import dtypes
from ullage.engines.base import flag, pinned, sized
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.memory.program import Item, Node, Sequence, alloc, free

OPTION = "offload.optimizer"
STEPPED_AS = "fp32"
_FRACTION = 1.0
"""Of --optimizer-offload-fraction (megatron/training/arguments.py)."""
_MOMENTS = {"adam": 2, "adamw": 2, "sgd": 1}
_DISTRIBUTED = 1  # zero_stage
_D2H, _H2D = 1, 2  # streams of their own, where copies are overlapped


def is_used(job: Job) -> bool:
    return job.engine.name == "megatron" and job.offload.optimizer != "none"


def fraction(job: Job) -> float:
    """Of a rank's elements, what is stepped on the host."""
    if not is_used(job):
        return 0.0
    said = job.engine.options.get("optimizer_offload_fraction", _FRACTION)
    assert isinstance(said, float | int), said  # job/options reads it as a number
    return float(said)


def is_aware(job: Job) -> bool:
    """Whether what is stepped are copies that the hybrid optimizer makes of 16-bit parameters."""
    return flag(job.engine.options, "use_precision_aware_optimizer", False)


def overlaps(job: Job) -> bool:
    """Whether one parameter is stepped while others are copied."""
    return flag(job.engine.options, "overlap_cpu_optimizer_d2h_h2d", False)


def pins(job: Job, what: str) -> bool:
    """what: grads | params."""
    return flag(job.engine.options, f"pin_cpu_{what}", True)


def refuse(job: Job) -> None:
    """What is not modelled, and what Megatron does not do: each says which."""
    if not is_used(job):
        return
    kept = job.precision.master or job.precision.params
    for stands, what, remedy in (
        (
            job.engine.zero_stage != _DISTRIBUTED,
            f"is modelled with Megatron's distributed optimizer alone, and this is zero_stage {job.engine.zero_stage}",
            "set engine.zero_stage: 1",
        ),
        (
            job.optimizer.name not in _MOMENTS,
            f"steps Adam or SGD on the host, and not {job.optimizer.name}",
            "set optimizer: adamw",
        ),
        (
            job.optimizer.state != STEPPED_AS or kept != STEPPED_AS,
            f"keeps parameters and moments in fp32, and the job says {kept} and {job.optimizer.state}",
            "leave main_params_dtype, exp_avg_dtype and exp_avg_sq_dtype out",
        ),
        (
            job.precision.fp8_params and job.engine.options.get("fp8_recipe") != "delayed",
            "goes with fp8_param_gather under --fp8-recipe delayed alone",
            "leave fp8_param_gather out",
        ),
    ):
        if stands:
            raise Unsupported(what, key=OPTION, value=job.offload.optimizer, remedy=remedy)


def going(tensors: ListLike[int], share: float) -> int:
    """How many of the first tensors go: one after another, until ``share`` of all elements has (_get_sub_optimizer_param_groups)."""
    threshold, gone = share * sum(tensors), 0
    for count, numel in enumerate(tensors):
        if gone >= threshold:
            return count
        gone += numel
    return len(tensors)


def opening(job: Job, tensors: ListLike[int], which: str) -> Item | None:
    """What loading passes through: the optimizer is first made of the whole parameters, and again of the shards. The first one's fp32
    copies of what is to be stepped on the GPU are there until the second stands."""
    stay = tensors[going(tensors, fraction(job)) :]
    if not is_used(job) or not stay or job.precision.params == STEPPED_AS:
        return None
    what, lives = f"fp32 copies of whole parameters ({which})", "until the optimizer is made of shards"
    why = "of the HybridDeviceOptimizer that is made first"
    return sized("optimizer", what, sum(stay), STEPPED_AS, pieces=stay, lives=lives, why=why)


def gradients(job: Job, pieces: ListLike[int], which: str) -> Item | None:
    """fp32 copies of 16-bit gradients of what is stepped on the GPU; nothing lets go of them until the next step's take their place."""
    stay = pieces[going(pieces, fraction(job)) :]
    if not is_used(job) or not is_aware(job) or not stay or job.precision.grads == STEPPED_AS:
        return None
    what, lives = f"fp32 copies of the gradients stepped here ({which})", "from the first optimizer step on"
    return sized("gradients", what, sum(stay), STEPPED_AS, pieces=stay, lives=lives)


def step(job: Job, pieces: ListLike[int]) -> Node:
    """A copy between types goes through one on the GPU (ATen/native/cuda/Copy.cu: non-blocking copies are cast there)."""
    away = pieces[: going(pieces, fraction(job))]
    copied = []
    if away and is_aware(job):
        lives = "its copy"
        streams = (_D2H, _H2D) if overlaps(job) else (0, 0)
        if job.precision.grads != STEPPED_AS:
            what = "a gradient in fp32 on its way to the host"
            copied.append(sized("transient", what, max(away), STEPPED_AS, lives=lives, stream=streams[0]))
        if job.precision.params != STEPPED_AS:
            what = "a stepped parameter in fp32 on its way back"
            copied.append(sized("transient", what, max(away), STEPPED_AS, lives=lives, stream=streams[1]))
    return Sequence([node for item in copied for node in (alloc(item), free(item))])


def host_bytes(job: Job, tensors: ListLike[int], pieces: ListLike[int]) -> int:
    """Of one rank: fp32 parameters, their gradients and moments. Torch keeps page-locked blocks for the next that ask for their size:
    those of the first optimizer's copies, of whole parameters, are there for the whole run, and the gradients take of them what fits.

    tensors: elements of the rank's whole parameters. pieces: of its shards.
    """
    if not is_used(job):
        return 0
    whole, mine = tensors[: going(tensors, fraction(job))], pieces[: going(pieces, fraction(job))]
    cast = is_aware(job) and job.precision.params != STEPPED_AS
    in_place = not cast or pins(job, "params")  # what is not cast is locked always
    parameters, ever = _fp32(mine), Counter[int]()
    moments = _MOMENTS[job.optimizer.name] * sum(parameters)
    if job.precision.params == STEPPED_AS or pins(job, "params"):
        ever += Counter(map(pinned, _fp32(whole)))
    if job.precision.params != STEPPED_AS:  # each is locked in its own type before it is cast
        ever |= Counter({pinned(dtypes.size_bytes(numel, job.precision.params)): 1 for numel in whole})
    if pins(job, "grads"):
        ever |= Counter(map(pinned, _fp32(mine)))
    else:
        moments += sum(parameters)
    return sum(map(pinned, parameters) if in_place else parameters) + moments + _bytes(ever)


def _fp32(tensors: ListLike[int]) -> list[int]:
    return [dtypes.size_bytes(numel, STEPPED_AS) for numel in tensors]


def _bytes(blocks: Counter[int]) -> int:
    return sum(size * count for size, count in blocks.items())
