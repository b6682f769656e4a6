"""DeepSpeed's knobs with their defaults, by version.

Sources: deepspeed/runtime/zero/config.py, runtime/engine.py and runtime/constants.py of 0.19.8 (the line that is modelled), 0.16.9 and
0.14.5 where memory changed, and of January to April 2022 (0.5.9 to 0.6.3), on which the Megatron-DeepSpeed fork of that time ran.
"auto" is Hugging Face's word for sizes that follow the hidden size (transformers/integrations/deepspeed.py).
"""

from __future__ import annotations

import re

from ullage import dtypes
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.model.graph import Graph

NEWEST = (0, 19, 8)
FORK_OF_2022 = (0, 6, 0)
"""What Megatron-DeepSpeed's layers ran on (bigscience-workshop/Megatron-DeepSpeed requirements.txt, 2022)."""

ALLREDUCE_ELEMENTS = 500_000_000
"""Elements of one all-reduce without ZeRO (MEMORY_OPT_ALLREDUCE_SIZE, runtime/engine.py): no setting changes it."""

_BUCKET = 500_000_000
_PREFETCH = 50_000_000
_PERSISTENCE = 100_000
_LIVE = _REUSE = _SUB_GROUP = 2 * _BUCKET
_UNLIMITED = 1 << 62
# First versions of today's behaviour.
_CONTIGUOUS_STAGE_1 = (0, 7, 0)
_LP_GRADS_ZEROED = (0, 9, 0)
_OVERFLOW_BY_AMAX = (0, 17, 0)
_STAGE_0_BF16_UNSHARDED = (0, 17, 0)
_NO_OPENING_STEP = (0, 13, 2)
FLATTENS_ON_DEVICE = (0, 17, 0)


@frozen
class Knobs:
    """Sizes are elements, as DeepSpeed counts them. master, state, grads, reduce: element types.

    opening_step: whether the optimizer steps on zeros when it is made, so that its moments come before any activation
    (initialize_optimizer_states; FP16_Optimizer still does).
    stage1_buckets: whether stage 1 reduces through a contiguous bucket (before, it flattened a copy of each bucket).
    keeps_lp_grads: BF16_Optimizer zeroes the 16-bit gradients instead of dropping them before the next backward.
    overflow_bytes: bytes of temporaries for each element of the largest slice that is checked for inf and nan.
    """

    version: tuple[int, int, int]
    reduce_bucket: int
    overlap_comm: bool
    prefetch_bucket: int
    persistence_threshold: int
    model_persistence_threshold: int
    max_live: int
    max_reuse_distance: int
    sub_group: int
    hpz: int
    contiguous_gradients: bool
    round_robin: bool
    bf16_optimizer: bool
    immediate_grad_update: bool
    master: str
    state: str
    grads: str
    reduce: str
    opening_step: bool
    stage1_buckets: bool
    keeps_lp_grads: bool
    overflow_bytes: int
    quantized_weights: bool


def knobs(job: Job, graph: Graph) -> Knobs:
    """The knobs of a job, every default taken."""
    options = job.engine.options
    version = version_of(job)
    hidden = graph.sizes.get("hidden")
    width = hidden if isinstance(hidden, int) else 0

    def count(name: str, default: int, auto: int) -> int:
        value = options.get(name, default)
        if value == "auto":
            return auto
        return int(value) if isinstance(value, int | float) else default

    stage = job.engine.zero_stage
    half = job.precision.params != "fp32"
    low = options.get("bf16_master_weights_and_grads", options.get("fp16_master_weights_and_grads")) is True
    low = low or options.get("fp16_master_weights_and_gradients") is True
    bf16_optimizer = _uses_bf16_optimizer(job, version)
    states_follow = low and options.get("bf16_optimizer_states") is True
    reduce = job.precision.reduce
    if options.get("communication_data_type") is None and dtypes.bits(reduce) > dtypes.bits(job.precision.params):
        reduce = (
            job.precision.params
        )  # the enabled mode's type, whatever the accumulator's (engine.py communication_data_type)
    return Knobs(
        version=version,
        reduce_bucket=count("reduce_bucket_size", _BUCKET, width * width),
        overlap_comm=_flag(job, "overlap_comm", stage == 3),
        prefetch_bucket=count("stage3_prefetch_bucket_size", _PREFETCH, int(0.9 * width * width)),
        persistence_threshold=count("stage3_param_persistence_threshold", _PERSISTENCE, 10 * width),
        model_persistence_threshold=count("stage3_model_persistence_threshold", _UNLIMITED, _UNLIMITED),
        max_live=count("stage3_max_live_parameters", _LIVE, _LIVE),
        max_reuse_distance=count("stage3_max_reuse_distance", _REUSE, _REUSE),
        sub_group=max(1, count("sub_group_size", _SUB_GROUP, _SUB_GROUP)),
        hpz=count("zero_hpz_partition_size", 1, 1),
        contiguous_gradients=_flag(job, "contiguous_gradients", True),
        round_robin=_flag(job, "round_robin_gradients", False),
        bf16_optimizer=bf16_optimizer,
        immediate_grad_update=_flag(job, "immediate_grad_update", False),
        master=job.precision.params if low and half else (job.precision.master or job.precision.params),
        state=job.precision.params if states_follow else job.optimizer.state,
        grads=job.precision.params if low and half else job.precision.grads,
        reduce=reduce,
        opening_step=half if stage == 0 and not bf16_optimizer else version < _NO_OPENING_STEP,
        stage1_buckets=version >= _CONTIGUOUS_STAGE_1,
        keeps_lp_grads=version >= _LP_GRADS_ZEROED,
        overflow_bytes=_overflow_bytes(version),
        quantized_weights=_flag(job, "zero_quantized_weights", False),
    )


def _flag(job: Job, name: str, default: bool) -> bool:
    return bool(job.engine.options.get(name, default))


def version_of(job: Job) -> tuple[int, int, int]:
    """DeepSpeed's version, as the job names it."""
    written = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?.*", str(job.engine.options.get("deepspeed_version", "")))
    if written is not None:
        return int(written[1]), int(written[2]), int(written[3] or 0)
    return FORK_OF_2022 if job.stack == "megatron" else NEWEST


def _uses_bf16_optimizer(job: Job, version: tuple[int, int, int]) -> bool:
    """Stage 1 with bf16 weights and fp32 gradients on the GPU; stage 0 in bf16 before it kept plain states (engine.py)."""
    if job.offload.optimizer != "none" or job.precision.params != "bf16":
        return False
    if job.engine.options.get("bf16_optimizer") is True:
        return job.engine.zero_stage <= 1
    if job.engine.zero_stage == 1:
        return job.precision.grads == "fp32"
    return job.engine.zero_stage == 0 and version < _STAGE_0_BF16_UNSHARDED and version > FORK_OF_2022


def _overflow_bytes(version: tuple[int, int, int]) -> int:
    """has_inf_or_nan: two scalars; before, x.float() with three masks and their float; before that x.float() alone."""
    if version >= _OVERFLOW_BY_AMAX:
        return 0
    return 11 if version > FORK_OF_2022 else 4
