"""torchtitan's TOML, as its releases up to 0.2.2 read it; and the layouts before, where a section was renamed.

Which key means what: torchtitan/config/job_config.py of 0.2.2. On 2026-02-23 torchtitan went over to configurations in Python
(pytorch/torchtitan@9810191b); the same keys are options of its command line, ``--parallelism.tensor_parallel_degree 8``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ullage.formats import toml_text
from ullage.formats.known import why_left
from ullage.formats.reading import Batch, Keys, Reading, size
from ullage.formats.tree import Leaves, Path, Tree
from ullage.job import fields
from ullage.job.job import Job

NAME = "torchtitan"
TITLE = "torchtitan TOML"
ENGINES = ("fsdp2", "ddp")
SYNTAX = toml_text

CANNOT: Mapping[str, str] = {
    "model": "torchtitan has no flavor of it: add one to its model registry",
    "cluster": "torchrun names the machines",
    "data.seq_len_mean": "the data set decides",
    "data.padding_mask": "torchtitan packs its sequences",
    "data.micro_batch": "under a pipeline, pipeline_parallel_microbatch_size says it",
    "data.grad_accum": "under a pipeline, local_batch_size says it",
    "layout.cp_kind": "torchtitan rotates keys and values by all-gather or all-to-all",
    "layout.vpp": "follows from the schedule and the layers of a stage",
    "layout.schedule": "torch.distributed.pipelining has no such schedule",
    "layout.pp_split": "pipeline_parallel_layers_per_stage or module_fqns_per_model_part say it",
    "layout.sp": "torchtitan's tensor parallelism is always sequence-parallel",
    "engine.name": "the nearest engine that torchtitan runs",
    "engine.zero_stage": "fsdp_reshard_after_forward says it",
    "engine.options": "no key of torchtitan's, or its default",
    "stack": "torchtitan brings its own layers",
    "stack_version": "the checkout decides",
    "precision": "no keys for these element types",
    "optimizer": "torchtitan builds AdamW and Adam",
    "recompute": "activation_checkpoint knows full, selective and every n-th layer",
    "attention": "the model's flavor decides",
    "loss": "the loss is torchtitan's own",
    "offload": "enable_cpu_offload moves parameters and optimizer together",
    "lora": "not in torchtitan",
    "freeze": "not in torchtitan",
}

_LLAMA4 = {16: "llama-4-scout-17b-16e", 128: "llama-4-maverick-17b-128e"}
_FLAVORS: Mapping[tuple[str, str], str] = {
    **{("llama2", size): f"llama-2-{size.lower()}" for size in ("7B", "13B", "70B")},
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    **{
        ("qwen3", size): f"qwen3-{size.lower()}"
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
    },
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
    **{("llama4", f"17bx{count}e"): name for count, name in _LLAMA4.items()},
    **{("gpt_oss", size): f"gpt-oss-{size.lower()}" for size in ("20b", "120b", "20B", "120B")},
}
"""torchtitan/models/*/__init__.py at 238fa995, by the catalogue's names; Llama 2 was there in 2024, GPT-OSS in capitals in 2025."""

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_CP_KINDS = {"allgather": "allgather", "alltoall": "ring"}
_RENAMED: Mapping[str, str] = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "training.compile": "compile.enable",
    "training.enable_cpu_offload": "training.enable_cpu_offload",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
}
"""Where a key stood before (releases of 2024 and 2025)."""

_OPTIONS: Mapping[str, str] = {
    "parallelism.enable_async_tensor_parallel": "enable_async_tensor_parallel",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "enable_fsdp_float8_all_gather",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": "precompute_float8_dynamic_scale_for_fsdp",
    "quantize.linear.float8.recipe_name": "float8_recipe",
    "debug.deterministic": "deterministic",
    "debug.moe_force_load_balance": "force_load_balance",
    "parallelism.expert_parallel_comm_backend": "expert_parallel_comm_backend",
    "optimizer.early_step_in_backward": "optimizer_in_bwd",
    "activation_checkpoint.memory_budget": "activation_memory_budget",
}
_LAST_TOML = "2026-02-22"
_SEQ_LEN, _BATCH = 2048, 8
_DEGREES = {
    "tensor_parallel_degree": "layout.tp",
    "context_parallel_degree": "layout.cp",
    "pipeline_parallel_degree": "layout.pp",
    "expert_parallel_degree": "layout.ep",
    "expert_tensor_parallel_degree": "layout.etp",
}

_SECTIONS = "parallelism|activation_checkpoint|lr_scheduler|training|experimental|float8"
_MARKS = re.compile(rf"^\s*\[({_SECTIONS})\]|^\s*(flavor|local_batch_size|hf_assets_path)\s*=", re.M)


def detect(text: str, name: str) -> bool:
    return _MARKS.search(text) is not None and re.search(r"^\s*\[\w", text, re.M) is not None


def _path(name: str) -> Path:
    return tuple(name.split("."))


def read(text: str, place: str) -> Reading:
    tree = toml_text.parse(text, place)
    keys = Keys(_today(tree), place)
    keys.put("stack", "torchtitan")
    keys.put("stack_version", _LAST_TOML)
    _model(keys)
    _layout(keys)
    batch = _batch(keys)
    if keys.move(_path("training.seq_len"), "data.seq_len", size) is None:
        keys.put("data.seq_len", _SEQ_LEN)
    _precision(keys)
    _recipe(keys)
    _options(keys)
    keys.rest(why_left("torchtitan", "torchtitan"))
    return _as_written(keys.done(NAME, batch), tree)


def _today(tree: Tree) -> Tree:
    """The tree with each old key under its name of today; one that is written both ways keeps today's."""
    leaves = {(_path(_RENAMED.get(".".join(path), ".".join(path)))): value for path, value in tree.leaves.items()}
    lines = {(_path(_RENAMED.get(".".join(path), ".".join(path)))): line for path, line in tree.lines.items()}
    return Tree(leaves=leaves, lines=lines, complaints=tree.complaints)


def _as_written(reading: Reading, tree: Tree) -> Reading:
    """Where each key stands in the file as it is, for messages and edits."""
    written = {_path(_RENAMED.get(".".join(path), ".".join(path))): path for path in tree.leaves}
    origins = {key: written.get(path, path) for key, path in reading.origins.items()}
    return replace(reading, origins=origins, tree=tree, renamed=written)


def _model(keys: Keys) -> None:
    name, flavor = _path("model.name"), _path("model.flavor")
    found = _FLAVORS.get((str(keys.tree.leaves.get(name)), str(keys.tree.leaves.get(flavor))))
    if found is not None:
        keys.raw(name)
        keys.raw(flavor)
        keys.put("model", found, flavor)
    else:
        for path in (name, flavor):
            keys.leave(path, "no model of the catalogue; a flag says it")
        keys.elsewhere["model"] = "model.name and model.flavor name none that is known here; give it: --model"


def _degree(keys: Keys, name: str, default: int) -> int:
    value = keys.take(("parallelism", name), _whole)
    return default if value is None else value


def _whole(value: object, key: str) -> int:
    """-1 stands for what is left."""
    return -1 if value == -1 else size(value, key)


def _layout(keys: Keys) -> None:
    for name, key in _DEGREES.items():
        keys.move(("parallelism", name), key, size)
    tp = keys.tree.leaves.get(("parallelism", "tensor_parallel_degree"), 1)
    apart = keys.take(("parallelism", "disable_loss_parallel"), fields.flag)
    if tp != 1:
        keys.put("layout.sp", True)
        keys.put("loss", "full" if apart else "vocab-parallel")
    method = keys.take(("parallelism", "context_parallel_rotate_method"), fields.choice(*_CP_KINDS))
    if keys.tree.leaves.get(("parallelism", "context_parallel_degree"), 1) != 1:
        keys.put("layout.cp_kind", _CP_KINDS[method or "allgather"])
    replicate = _degree(keys, "data_parallel_replicate_degree", 1)
    shard = _degree(keys, "data_parallel_shard_degree", -1)
    path = ("parallelism", "data_parallel_shard_degree")
    keys.put("engine.name", "ddp" if shard == 1 and replicate > 1 else "fsdp2", path)
    if shard != -1:
        keys.put("layout.dp", replicate * shard, path)
    if replicate > 1 and shard > 1:
        cp = keys.tree.leaves.get(("parallelism", "context_parallel_degree"), 1)
        keys.put("engine.shard_group", shard * (cp if isinstance(cp, int) else 1), path)
    elif replicate > 1 and shard == -1:
        what = "-1 with a replicate degree: the size of a shard group follows from the number of GPUs"
        keys.find("warning", ".".join(path), what, "write the number, or give --shard-group")
    _schedule(keys)


def _schedule(keys: Keys) -> None:
    path = ("parallelism", "pipeline_parallel_schedule")
    names = {theirs.lower(): ours for ours, theirs in _SCHEDULES.items()}
    written = keys.tree.leaves.get(path)
    piped = keys.tree.leaves.get(("parallelism", "pipeline_parallel_degree"), 1) != 1
    if isinstance(written, str) and written.lower() in names:
        keys.raw(path)
        if piped:
            keys.put("layout.schedule", names[written.lower()], path)
    elif written is not None:
        keys.leave(path, f"no schedule that a job holds; allowed: {', '.join(_SCHEDULES.values())}")
    if piped and isinstance(written, str) and names.get(written.lower()) == "interleaved-1f1b":
        keys.put("layout.vpp", 2, path)


def _batch(keys: Keys) -> Batch:
    local = keys.take(_path("training.local_batch_size"), size) or _BATCH
    whole = keys.take(_path("training.global_batch_size"), _whole)
    micro = keys.take(("parallelism", "pipeline_parallel_microbatch_size"), size) or 1
    at = _path("training.local_batch_size")
    if (
        keys.tree.leaves.get(("parallelism", "pipeline_parallel_degree"), 1) != 1
    ):  # a local batch is one run of the pipeline
        return Batch(micro=(micro, at), accum=(max(1, local // micro), at))
    if whole is None or whole == -1:
        return Batch(micro=(local, at), accum=(1, at))
    return Batch(micro=(local, at), whole=(whole, _path("training.global_batch_size")))


def _precision(keys: Keys) -> None:
    choice = fields.choice("float32", "bfloat16")
    dtype = keys.take(_path("training.dtype"), choice) or "float32"
    compute = keys.take(_path("training.mixed_precision_param"), choice) or "bfloat16"
    converters = keys.tree.leaves.get(_path("model.converters"), [])
    names = converters if isinstance(converters, list) else str(converters).split(",")
    eight = any(name in ("float8", "quantize.linear.float8") for name in names)
    eight = eight or keys.take(_path("float8.enable_float8_linear"), fields.flag) is True
    if eight:
        keys.raw(_path("model.converters"))
    name = (
        "fp8-mixed" if eight else "bf16" if dtype == "bfloat16" else "bf16-mixed" if compute == "bfloat16" else "fp32"
    )
    keys.put("precision", name, _path("model.converters" if eight else "training.mixed_precision_param"))
    if keys.tree.leaves.get(_path("training.mixed_precision_reduce")) == "float32":
        keys.raw(_path("training.mixed_precision_reduce"))
    keys.leave(
        _path("training.mixed_precision_reduce"),
        "0.2.2 reduces in float32 alone; a flag says another: --set precision.reduce",
    )


def _recipe(keys: Keys) -> None:
    norm = keys.take(_path("training.max_norm"), fields.number())
    early = keys.tree.leaves.get(_path("optimizer.early_step_in_backward")) is True
    if early and norm:
        what = "clips nothing: early_step_in_backward has freed each gradient before"
        keys.find("warning", "training.max_norm", what, "take one of the two out")
    keys.put("grad_clip", not early and (norm is None or norm > 0), _path("training.max_norm"))
    if keys.take(_path("training.enable_cpu_offload"), fields.flag):
        keys.put("offload.optimizer", "cpu", _path("training.enable_cpu_offload"))
        keys.put("offload.params", "cpu", _path("training.enable_cpu_offload"))
    _recompute(keys)
    name = keys.tree.leaves.get(_path("optimizer.name"), "AdamW")
    if str(name).lower() in ("adamw", "adam"):
        keys.raw(_path("optimizer.name"))
        keys.put("optimizer.name", str(name).lower(), _path("optimizer.name"))
    impl = keys.take(_path("optimizer.implementation"), fields.choice("fused", "foreach", "for-loop"))
    if impl is not None:
        keys.put("optimizer.impl", impl, _path("optimizer.implementation"))
    enabled = keys.take(_path("compile.enable"), fields.flag)
    components = keys.take(_path("compile.components"), fields.texts)
    if enabled:
        keys.put("compile", "model" in (components or ("model", "loss")), _path("compile.enable"))
        keys.put_option("compile_loss", "loss" in (components or ("model", "loss")), _path("compile.components"))
    elif enabled is not None:
        keys.put("compile", False, _path("compile.enable"))


def _recompute(keys: Keys) -> None:
    path, option = _path("activation_checkpoint.mode"), _path("activation_checkpoint.selective_ac_option")
    mode = keys.take(path, fields.choice("selective", "full", "memory_budget", "none")) or "selective"
    selective = str(keys.raw(option) or "2")
    if mode == "selective" and selective != "op":
        keys.put("recompute", {"every": int(selective) if selective.isdigit() else 2}, path)
    elif mode == "memory_budget":
        keys.find(
            "warning", ".".join(path), "the compiler chooses what to recompute: no job says it", "estimated without"
        )
    else:
        keys.put("recompute", mode, path)


def _options(keys: Keys) -> None:
    reshard = ("parallelism", "fsdp_reshard_after_forward")
    word = keys.take(reshard, fields.choice("default", "always", "never"))
    if word is not None and keys.job["engine"] != {"name": "ddp"}:
        keys.put_option("reshard_after_forward", word, reshard)
    keys.move_options({_path(name): ours for name, ours in _OPTIONS.items()}, "fsdp2", "torchtitan")


def leaves(job: Job) -> dict[Path, object]:
    """The job in torchtitan's keys, with those that its own defaults would say otherwise."""
    found: dict[Path, object] = {}
    flavor = next((pair for pair, name in _FLAVORS.items() if name == job.model.name), None)
    if flavor is not None:
        found[_path("model.name")], found[_path("model.flavor")] = flavor
    eight = job.precision.compute == "fp8"
    if eight:
        found[_path("model.converters")] = ["quantize.linear.float8"]
    if job.optimizer.name in ("adamw", "adam"):
        found[_path("optimizer.name")] = {"adamw": "AdamW", "adam": "Adam"}[job.optimizer.name]
    found[_path("optimizer.implementation")] = job.optimizer.impl
    found |= _batch_leaves(job)
    found[_path("training.max_norm")] = 1.0 if job.grad_clip else 0.0
    found[_path("training.dtype")] = "bfloat16" if job.precision.params == "bf16" else "float32"
    found[_path("training.mixed_precision_param")] = "float32" if job.precision.compute == "fp32" else "bfloat16"
    if job.offload.params == "cpu":
        found[_path("training.enable_cpu_offload")] = True
    found |= _layout_leaves(job)
    found |= _recompute_leaves(job)
    if job.compile or job.engine.options.get("compile_loss"):
        loss = job.engine.options.get("compile_loss", False)
        found[_path("compile.enable")] = True
        found[_path("compile.components")] = [*(["model"] if job.compile else []), *(["loss"] if loss else [])]
    options = job.engine.options
    return found | {_path(name): options[ours] for name, ours in _OPTIONS.items() if ours in options}


def _batch_leaves(job: Job) -> dict[Path, object]:
    data = job.data
    found: dict[Path, object] = {_path("training.seq_len"): data.seq_len}
    if job.layout.pp > 1:
        found[_path("training.local_batch_size")] = data.micro_batch * data.grad_accum
        found["parallelism", "pipeline_parallel_microbatch_size"] = data.micro_batch
        return found
    found[_path("training.local_batch_size")] = data.micro_batch
    if data.grad_accum > 1:
        found[_path("training.global_batch_size")] = data.micro_batch * data.grad_accum * job.layout.dp
    return found


def _layout_leaves(job: Job) -> dict[Path, object]:
    layout, section = job.layout, "parallelism"
    group = job.engine.shard_group
    shard = layout.dp if group is None else max(1, group // layout.cp)
    if job.engine.name == "ddp":
        shard = 1
    found: dict[Path, object] = {
        (section, "data_parallel_replicate_degree"): layout.dp // shard,
        (section, "data_parallel_shard_degree"): shard,
    }
    for name, key in _DEGREES.items():
        degree = getattr(layout, key.removeprefix("layout."))
        if degree > 1 or name == "tensor_parallel_degree":
            found[section, name] = degree
    if layout.tp > 1 and job.loss.kind == "full":
        found[section, "disable_loss_parallel"] = True
    if layout.pp > 1 and layout.schedule in _SCHEDULES:
        found[section, "pipeline_parallel_schedule"] = _SCHEDULES[layout.schedule]
    if layout.cp > 1:
        kinds = {ours: theirs for theirs, ours in _CP_KINDS.items()}
        found[section, "context_parallel_rotate_method"] = kinds.get(layout.cp_kind, "allgather")
    if job.engine.name == "fsdp2":
        word = job.engine.options.get("reshard_after_forward")
        usual = 2 if layout.pp > 1 else 3
        by_stage = "default" if job.engine.zero_stage == usual else "never" if job.engine.zero_stage == 2 else "always"
        found[section, "fsdp_reshard_after_forward"] = word if isinstance(word, str) else by_stage
    return found


def _recompute_leaves(job: Job) -> dict[Path, object]:
    mode, option = _path("activation_checkpoint.mode"), _path("activation_checkpoint.selective_ac_option")
    if job.recompute.kind == "every":
        return {mode: "selective", option: str(job.recompute.every)}
    if job.recompute.kind == "selective":
        return {mode: "selective", option: "op"}
    return {mode: "full" if job.recompute.kind == "full" else "none"}


def notes(job: Job) -> tuple[str, ...]:
    return (
        "read by torchtitan up to 0.2.2; later ones take each key as --section.key",
        "data set, steps, learning rate and hf_assets_path: add your own",
    )


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return toml_text.render(found, comments)
