"""A job in the words that files for Hugging Face's Trainer share: the way back of trainer.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ullage.formats import accelerate, deepspeed
from ullage.formats.trainer import DEEPSPEED, FSDP, FSDP_CONFIG, OPTIMIZERS, precisions
from ullage.formats.tree import Path
from ullage.frozen import replace
from ullage.job.job import Job, Lora, Precision
from ullage.job.precision import SHORT_NAMES, resolve
from ullage.model.catalogue import find

CANNOT: Mapping[str, str] = {
    "cluster": "the launcher runs on the machines that there are",
    "data.padding_mask": "the data collator decides",
    "data.seq_len_mean": "the data set decides",
    "layout": "the launcher, and Accelerate's parallelism_config",
    "engine.name": "the nearest engine that the Trainer runs",
    "engine.shard_group": "Accelerate's parallelism_config",
    "engine.zero_stage": "FSDP knows stages 2 and 3",
    "engine.options": "an option of the code around the Trainer",
    "stack": "the script loads the layers",
    "stack_version": "what is installed decides",
    "precision": "the Trainer has no words for these element types",
    "optimizer": "no optimizer that the Trainer builds by name",
    "recompute": "the Trainer runs every layer again, or none",
    "attention": "attn_implementation knows no such kernel",
    "loss": "the layer code decides",
    "offload": "no key for this engine",
    "lora.dtype": "PEFT decides",
    "freeze": "the script sets requires_grad",
    "compile": "torch_compile",
}

CANONICAL: Mapping[str, Path] = {
    "recompute": ("gradient_checkpointing",),
    "data.grad_accum": ("gradient_accumulation_steps",),
    "optimizer": ("optim",),
    "grad_clip": ("max_grad_norm",),
    "compile": ("torch_compile",),
}

_ELSEWHERE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
)
"""Keys of DeepSpeed's that the Trainer's own arguments say."""


def optimizer_name(job: Job) -> str | None:
    """The first name that means the job's optimizer."""
    mine = job.optimizer
    torchao = job.engine.options.get("optimizer_library") == "torchao"
    for name, words in OPTIMIZERS.items():
        impl = words.get("impl", mine.impl)
        if (
            words["name"] == mine.name
            and impl == mine.impl
            and bool(words.get("paged", False)) == mine.paged
            and words.get("state", mine.state if mine.state != "8bit" else None) == mine.state
            and (not torchao or "torch_" in name)
        ):
            return name
    return None


def element_types(job: Job, *, upcast: bool = True) -> tuple[str, str | None] | None:
    """(type that the model is loaded in, type of autocast) which make the job's precision; None where nothing does."""
    for loaded, mixed in (
        ("fp32", "bf16"),
        ("bf16", "bf16"),
        ("fp32", "fp16"),
        ("fp16", "fp16"),
        ("bf16", None),
        ("fp32", None),
    ):
        value = precisions(loaded, mixed, adapters=job.lora is not None, upcast=upcast)[job.engine.name]
        if isinstance(value, Mapping):
            found = Precision(**{"autocast": False, "fp8_params": False, **value})
        else:
            assert value in SHORT_NAMES, value
            found = resolve(str(value), job.engine.name, job.engine.options, job.stack)
        if replace(found, reduce=job.precision.reduce) == job.precision:
            return loaded, mixed
    return None


def model_leaf(job: Job, name: str) -> dict[Path, object]:
    """The model's name, where it has one that others know."""
    found = find(job.model.name)
    return {} if found is None else {(name,): found.hugging_face_id}


def engine_leaves(job: Job) -> dict[Path, object]:
    """DeepSpeed's configuration inside the file, or FSDP's section; nothing for DDP and a single process."""
    if job.engine.name == "deepspeed":
        inner = deepspeed.leaves(job)
        return {(*DEEPSPEED, *path): value for path, value in inner.items() if path[0] not in _ELSEWHERE}
    if job.engine.name not in ("fsdp1", "fsdp2"):
        return {}
    strategy = {3: "full_shard", 2: "shard_grad_op", 0: "no_shard"}[job.engine.zero_stage]
    strategy = str(job.engine.options.get("sharding_strategy", strategy)).lower().removeprefix("_")
    offload = " offload" if job.offload.params == "cpu" else ""
    found: dict[Path, object] = {
        FSDP: f"{strategy}{offload} auto_wrap",
        (FSDP_CONFIG, "version"): 2 if job.engine.name == "fsdp2" else 1,
    }
    said = (
        "version",
        "sharding_strategy",
        "reshard_after_forward",
        "offload_params",
        "activation_checkpointing",
        "auto_wrap_policy",
    )
    for (_, name), value in accelerate.fsdp_leaves(job).items():
        short = name.removeprefix("fsdp_")
        if short not in said or (short == "auto_wrap_policy" and "auto_wrap_policy" in job.engine.options):
            found[FSDP_CONFIG, short] = value
    return found


def adapter_leaves(
    lora: Lora, *, rank: str, dora: str, saved: str, listed: Callable[[Sequence[str]], object] = list
) -> dict[Path, object]:
    """What all three have words for of adapters, but for targets and base. rank, dora, saved: their words; listed: how several are said."""
    found: dict[Path, object] = {
        (rank,): lora.rank,
        ("lora_alpha",): int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        ("lora_dropout",): lora.dropout,
    }
    if lora.dora:
        found[(dora,)] = True
    if lora.modules_to_save:
        found[(saved,)] = listed(lora.modules_to_save)
    return found


def step_leaves(job: Job) -> dict[Path, object]:
    """What all three call alike, but for micro-batch, optimizer and element types."""
    found: dict[Path, object] = {
        ("gradient_accumulation_steps",): job.data.grad_accum,
        ("gradient_checkpointing",): job.recompute.kind == "full",
        ("max_grad_norm",): 1.0 if job.grad_clip else 0.0,
    }
    if job.compile:
        found[("torch_compile",)] = True
    return found
