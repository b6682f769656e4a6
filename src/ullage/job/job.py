"""The job: everything that an estimate depends on, as frozen values. The file format is docs/job.md; read.py reads it.

Sizes are bytes, counts are plain integers. A value here is complete: every default has been taken.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ullage.frozen import FrozenMap, frozen, hash_once
from ullage.hardware.cluster import Cluster
from ullage.model.config import ModelConfig

CpKind = Literal["ring", "ulysses", "allgather"]
ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "zb-h2",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe",
    "dualpipev",
]
EngineName = Literal["single", "ddp", "zero1", "fsdp1", "fsdp2", "deepspeed", "megatron"]
AttentionKernel = Literal["flash", "mem-efficient", "math", "eager"]
LossKind = Literal["full", "chunked", "fused-linear", "vocab-parallel", "vocab-parallel-fused"]
RecomputeKind = Literal["none", "full", "selective", "every", "layers", "modules", "sqrt"]
Place = Literal["none", "cpu", "nvme"]


@frozen
class Data:
    """seq_len: tokens of one sequence; micro_batch: sequences per forward of one data-parallel rank.

    expert_load: rows that this rank's experts compute, over the mean. No key of a file, which says nothing of one step's routing.
    """

    seq_len: int
    micro_batch: int = 1
    grad_accum: int = 1
    padding_mask: bool = False
    seq_len_mean: int | None = None
    expert_load: float = 1.0


@frozen
class Layout:
    """Degrees of parallelism; dp * tp * cp * pp is the number of GPUs, ep lies inside dp * cp (* tp when etp is 1)."""

    dp: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: CpKind = "ring"
    pp: int = 1
    vpp: int = 1
    schedule: ScheduleName = "1f1b"
    pp_split: tuple[int, ...] | None = None  # None: even
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts: the data-parallel degree of expert parameters."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)


@frozen
class Engine:
    """``options`` holds the engine's own knobs under the engine's own names, as written in the job (no defaults put in)."""

    name: EngineName = "single"
    zero_stage: int = 0
    shard_group: int | None = None
    options: FrozenMap = field(default_factory=FrozenMap)


@frozen
class Precision:
    """Element types by role. params == master == fp32 is one copy (FSDP, autocast); bf16 params and fp32 master are two."""

    params: str
    compute: str
    grads: str
    master: str | None  # None: the optimizer steps the parameters themselves in their own type
    reduce: str
    autocast: bool = False
    fp8_params: bool = False


@frozen
class Optimizer:
    """state: element type of each moment (fp32 | bf16 | 8bit ...)."""

    name: str = "adamw"
    impl: Literal["fused", "foreach", "for-loop"] = "fused"
    state: str = "fp32"
    paged: bool = False


@frozen
class Recompute:
    """every: n of {every: n}; layers: n of {layers: n}; modules: names of {modules: [...]}, in the stack's own words."""

    kind: RecomputeKind = "none"
    every: int = 1
    layers: int = 0
    modules: tuple[str, ...] = ()


@frozen
class Loss:
    kind: LossKind = "full"
    chunks: int | None = None  # None: the kernel has a rule of its own, or the loss has no chunks


@frozen
class Offload:
    optimizer: Place = "none"
    params: Place = "none"
    activations: Place = "none"


@frozen
class Lora:
    """targets: module names; ("all-linear",) means every linear of the decoder layers. dtype None: see the stack."""

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    base: Literal["bf16", "nf4", "nf4-double", "int8"] = "bf16"
    dtype: str | None = None
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()


@frozen
class Job:
    """One training job, complete and checked. ``defaults`` lists, as ``key = value``, every default that was taken."""

    model: ModelConfig
    cluster: Cluster
    data: Data
    layout: Layout
    engine: Engine
    precision: Precision
    stack: str = "transformers"
    stack_version: str | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    grad_clip: bool = True
    recompute: Recompute = field(default_factory=Recompute)
    attention: AttentionKernel = "flash"
    loss: Loss = field(default_factory=Loss)
    offload: Offload = field(default_factory=Offload)
    lora: Lora | None = None
    freeze: tuple[str, ...] = ()
    compile: bool = False
    defaults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(
            self,
            self.model,
            self.cluster,
            self.data,
            self.layout,
            self.engine,
            self.precision,
            self.stack,
            self.stack_version,
            self.optimizer,
            self.recompute,
            self.attention,
            self.loss,
            self.compile,
        )
