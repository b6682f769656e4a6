"""``data``, ``layout`` and ``engine``: degrees, and what an engine makes of a stage that nobody wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ullage.errors import Contradiction, InvalidInput
from ullage.frozen import FrozenMap
from ullage.hardware.cluster import Cluster
from ullage.job import fields
from ullage.job.fields import Section, show
from ullage.job.job import CpKind, Data, Engine, EngineName, Layout, ScheduleName
from ullage.job.options import read_options

ENGINES = ("single", "ddp", "zero1", "fsdp1", "fsdp2", "deepspeed", "megatron")
OF_TRANSFORMERS = ("transformers", "liger", "unsloth")
"""Stacks that run transformers' own models under its Trainer, as they are or with kernels put in place of theirs."""
_COMPOSERS_WORDS = ("FULL", "DEFAULT", "PURE")
"""What ``mixed_precision`` may be in Composer's fsdp_config (composer/distributed/mosaic_parallelism.py, get_mixed_precision)."""
STACKS = ("transformers", "liger", "unsloth", "torchtitan", "torchtune", "litgpt", "megatron")
CP_KINDS = ("ring", "ulysses", "allgather")
SCHEDULES = (
    "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe", "dualpipev",
)  # fmt: skip
# Two chunks per rank, down the ranks and back up: the shape of the schedule fixes vpp.
V_SCHEDULES = frozenset({"zbv", "v-half", "v-min", "dualpipev"})

STAGES: dict[str, tuple[int, ...]] = {
    "single": (0,),
    "ddp": (0,),
    "zero1": (1,),
    "fsdp1": (2, 3),
    "fsdp2": (2, 3),
    "deepspeed": (0, 1, 2, 3),
    "megatron": (0, 1, 2, 3),
}
# torch.distributed.fsdp.ShardingStrategy
_FSDP1_STAGE = {
    "FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0,
}  # fmt: skip
_MEGATRON_FSDP_STAGE = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def composer(options: Mapping[str, object]) -> bool:
    """Whether Composer's trainer runs the job, llm-foundry's: the engine's options say so."""
    return options.get("mixed_precision") in _COMPOSERS_WORDS


def under_accelerate(stack: str, options: Mapping[str, object]) -> bool:
    """Whether accelerate wraps the model, as transformers' Trainer has it do. options: the engine's."""
    return stack in OF_TRANSFORMERS and not composer(options)


def read_layout(root: Section, gpus: int, engine: str) -> Layout:
    """``dp`` left out takes the GPUs that the other degrees leave; checks.py says so where they leave none."""
    section = root.inner("layout")
    degree = fields.integer(1)
    others = {name: section.take(name, degree, 1) for name in ("tp", "cp", "pp")}
    dp = section.take("dp", fields.optional(degree), None) if section.values.get("dp") is not None else None
    section.raw("dp")
    if dp is None:
        single = engine == "single"
        dp = 1 if single else max(1, gpus // (others["tp"] * others["cp"] * others["pp"]))
        section.note("dp", dp, "" if single else f"{gpus} GPUs / (tp x cp x pp)")
    schedule = section.take("schedule", fields.choice(*SCHEDULES), "1f1b")
    if not section.written("pp_split"):
        section.note("pp_split", "even")
    layout = Layout(
        dp=dp,
        **others,
        sp=section.take("sp", fields.flag, False),
        cp_kind=cast(CpKind, section.take("cp_kind", fields.choice(*CP_KINDS), "ring")),
        vpp=section.take("vpp", degree, 2 if schedule in V_SCHEDULES else 1),
        schedule=cast(ScheduleName, schedule),
        pp_split=_split(section.raw("pp_split"), section.key("pp_split")),
        ep=section.take("ep", degree, 1),
        etp=section.take("etp", degree, 1),
    )
    section.close()
    return layout


def _split(value: object, key: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        fields.choice("even")(value, key)
        return None
    return fields.integers(0)(value, key)


SEQ_LEN = 4096


def read_data(root: Section, dp: int, seq_len: int = SEQ_LEN) -> Data:
    """``global_batch`` becomes grad_accum: sequences per step over dp x micro_batch. seq_len: where the section has none."""
    section = root.inner("data")
    count = fields.integer(1)
    seq_len = section.take("seq_len", count, seq_len)
    micro_batch = section.take("micro_batch", count, 1)
    if section.values.get("global_batch") is not None:
        grad_accum = _accumulation(section, micro_batch, dp)
    else:
        section.raw("global_batch")
        grad_accum = section.take("grad_accum", count, 1)
    data = Data(
        seq_len=seq_len,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        padding_mask=section.take("padding_mask", fields.flag, False),
        seq_len_mean=section.take("seq_len_mean", fields.optional(count), None),
    )
    section.close()
    if data.seq_len_mean is not None and data.seq_len_mean > data.seq_len:
        raise Contradiction(
            f"the mean is longer than the longest sequence, data.seq_len = {data.seq_len}",
            key="data.seq_len_mean",
            value=data.seq_len_mean,
            allowed=f"1 to {data.seq_len}",
            remedy="seq_len is the longest sequence",
        )
    return data


def _accumulation(section: Section, micro_batch: int, dp: int) -> int:
    global_batch = section.take("global_batch", fields.integer(1), 1)
    section.raw("grad_accum")
    if section.values.get("grad_accum") is not None:
        raise Contradiction(
            "says how many micro-batches a step has, and so does data.grad_accum",
            key="data.global_batch",
            value=global_batch,
            remedy="keep one of the two",
        )
    per_micro_step = micro_batch * dp
    if global_batch % per_micro_step:
        below = max(1, global_batch // per_micro_step) * per_micro_step
        raise Contradiction(
            f"does not divide by micro_batch x dp = {micro_batch} x {dp} = {per_micro_step}",
            key="data.global_batch",
            value=global_batch,
            allowed=f"multiples of {per_micro_step}",
            remedy=f"use {below} or {below + per_micro_step}",
        )
    return global_batch // per_micro_step


def read_stack(root: Section, engine: str) -> tuple[str, str | None]:
    """The stack and its version. Megatron brings its own layers."""
    if engine == "megatron" and not root.written("stack"):
        root.note("stack", "megatron", "engine megatron brings its own layers")
        root.raw("stack")
        stack = "megatron"
    else:
        stack = root.take("stack", fields.choice(*STACKS), "transformers")
    return stack, root.take("stack_version", fields.optional(fields.text), None)


def read_engine(section: Section, name: str, stack: str, layout: Layout, cluster: Cluster) -> Engine:
    """The rest of ``engine``, its name being known."""
    written = fields.as_mapping(section.raw("options") or {}, section.key("options"))
    options = read_options(written, section.key("options"), name, stack)
    return Engine(
        name=cast(EngineName, name),
        zero_stage=_zero_stage(section, name, stack, options, layout),
        shard_group=_shard_group(section, name, options, cluster),
        options=options,
    )


def _zero_stage(section: Section, name: str, stack: str, options: FrozenMap, layout: Layout) -> int:
    allowed = STAGES[name]
    strategy = options.get("sharding_strategy")
    unsharded = name == "fsdp1" and strategy == "NO_SHARD"
    stage, why = default_stage(name, stack, options, layout.pp)
    if section.values.get("zero_stage") is None:
        section.raw("zero_stage")
        section.note("zero_stage", stage, why)
        return stage
    written = section.take("zero_stage", fields.integer(0), stage)
    if unsharded:
        return 0  # FSDP1 knows no stage for it, so the strategy alone decides
    if written not in allowed:
        raise InvalidInput(
            f"is no stage of {name}",
            key=section.key("zero_stage"),
            value=written,
            allowed=" or ".join(map(str, allowed)),
            remedy="leave it out" if len(allowed) == 1 else None,
        )
    if name == "megatron" and options.get("use_megatron_fsdp") is True:
        return max(written, stage)  # stage 1 with Megatron-FSDP's options is what the options say
    return written


def default_stage(name: str, stack: str, options: FrozenMap, pp: int) -> tuple[int, str]:
    """The stage of a job that writes none, and why: the contract's 3, unless the engine or its options say otherwise."""
    if name in ("single", "ddp", "zero1"):
        return STAGES[name][0], ""
    if name == "fsdp1" and isinstance(strategy := options.get("sharding_strategy"), str):
        return _FSDP1_STAGE.get(strategy.upper(), 3), f"sharding_strategy {strategy}"
    if name == "fsdp2":
        reshard = options.get("reshard_after_forward", "default")
        if reshard in (False, "never"):
            return 2, f"reshard_after_forward {show(reshard)}"
        if reshard == "default" and stack == "torchtitan" and pp > 1:
            return 2, "torchtitan does not reshard under a pipeline"
    if name == "megatron":
        strategy = options.get("data_parallel_sharding_strategy", "optim_grads_params")
        if options.get("use_megatron_fsdp") is True:
            return _MEGATRON_FSDP_STAGE.get(str(strategy), 3), f"Megatron-FSDP, {strategy}"
        if options.get("use_distributed_optimizer") is True:
            return 1, "use_distributed_optimizer"
        return 0, "Megatron shards nothing by itself"
    return 3, ""


def _shard_group(section: Section, name: str, options: FrozenMap, cluster: Cluster) -> int | None:
    """Engines say it in words of their own too: hpZ's partition, HYBRID_SHARD (one node), optimizer instances."""
    read = fields.optional(fields.integer(1))
    if section.values.get("shard_group") is not None:
        return section.take("shard_group", read, None)
    section.raw("shard_group")
    group: int | None = None
    why = ""
    partition = options.get("zero_hpz_partition_size")
    if isinstance(partition, int) and partition > 1:
        group, why = partition, "zero_hpz_partition_size"
    elif name == "fsdp1" and str(options.get("sharding_strategy", "")).upper() in (
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    ):
        group, why = cluster.gpus_per_node, "HYBRID_SHARD shards over one node"
    if not section.written("shard_group") or group is not None:
        section.note("shard_group", group, why)
    return group
