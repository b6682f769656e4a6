"""DeepSpeed's JSON configuration.

Which key means what: deepspeed/runtime/config.py and runtime/zero/config.py of 0.19.8. ``auto`` is the word of Hugging Face's
Trainer for a value that its own arguments hold (transformers/integrations/deepspeed.py); DeepSpeed drops it and takes its default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ullage.formats import jsonc
from ullage.formats.known import why_left
from ullage.formats.reading import Batch, Keys, Reading, size
from ullage.formats.tree import Leaves, Path, Tree
from ullage.job import fields
from ullage.job.job import Job
from ullage.job.precision import SHORT_NAMES, resolve

NAME = "deepspeed"
TITLE = "DeepSpeed JSON"
ENGINES = ("deepspeed",)
SUFFIX = ".json"
SYNTAX = jsonc

CANNOT: Mapping[str, str] = {
    "model": "the script loads the model",
    "cluster": "the launcher names the machines",
    "data.seq_len": "the tokenizer and the data set decide",
    "data.seq_len_mean": "the data set decides",
    "data.padding_mask": "the data collator decides",
    "layout.dp": "the GPUs that the other degrees leave",
    "layout.sp": "the model's own code",
    "layout.cp_kind": "DeepSpeed divides sequences by Ulysses alone",
    "layout.pp": "the script builds a PipelineModule",
    "layout.vpp": "the script builds a PipelineModule",
    "layout.schedule": "the script builds a PipelineModule",
    "layout.pp_split": "the script builds a PipelineModule",
    "layout.ep": "the script builds its MoE layers",
    "layout.etp": "the script builds its MoE layers",
    "engine.name": "the file is DeepSpeed's",
    "engine.options": "an option of the code around DeepSpeed",
    "stack": "the script loads the layers",
    "stack_version": "the script loads the layers",
    "precision": "DeepSpeed has no words for these element types",
    "optimizer.name": "no optimizer that DeepSpeed builds by name",
    "optimizer.impl": "DeepSpeed chooses it",
    "optimizer.state": "the script passes such an optimizer to deepspeed.initialize",
    "optimizer.paged": "the script passes such an optimizer to deepspeed.initialize",
    "recompute": "the script calls model.gradient_checkpointing_enable()",
    "attention": "the script passes attn_implementation",
    "loss": "the layer code decides",
    "offload.activations": "the script decides",
    "lora": "the script wraps the model (PEFT)",
    "freeze": "the script sets requires_grad",
    "compile": "the script calls engine.compile()",
}

_ZERO: Path = ("zero_optimization",)
_OFFLOAD_OPTIMIZER: Path = (*_ZERO, "offload_optimizer")
_OFFLOAD_PARAM: Path = (*_ZERO, "offload_param")
_LEGACY_OFFLOAD = {
    "cpu_offload": ("offload.optimizer", "offload_optimizer"),
    "cpu_offload_param": ("offload.params", "offload_param"),
}
_CLIPPING: Path = ("gradient_clipping",)
_OPTIMIZER_TYPE: Path = ("optimizer", "type")
_TORCH_ADAM: Path = ("optimizer", "params", "torch_adam")
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "muon": "Muon", "sgd": "SGD", "adafactor": "Adafactor"}
_MICRO: Path = ("train_micro_batch_size_per_gpu",)
_ACCUM: Path = ("gradient_accumulation_steps",)
_WHOLE: Path = ("train_batch_size",)


# What transformers/integrations/deepspeed.py fills in where it finds ``auto``, besides the sizes that follow the hidden size.
_FILLED = frozenset(
    {
        (name,)
        for name in (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
            "gradient_clipping",
        )
    }
    | {("optimizer", "params", name) for name in ("lr", "betas", "eps", "weight_decay")}
    | {("scheduler", "params", f"warmup_{name}") for name in ("min_lr", "max_lr", "num_steps")}
    | {("scheduler", "params", "total_num_steps"), ("fp16", "enabled"), ("bf16", "enabled")}
)
_BY_TRAINER = "auto: the Trainer's own arguments say it, and a flag does here"
_FILLED_BY_ACCELERATE = frozenset(
    {(*_ZERO, "stage"), (*_ZERO, "stage3_gather_16bit_weights_on_model_save")}
    | {(*section, name) for section in (_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM) for name in ("device", "nvme_path")}
)
"""accelerate/utils/dataclasses.py, DeepSpeedPlugin."""
_BY_ACCELERATE = "auto: Accelerate's own configuration says it, and a flag does here"
_DROPPED = "auto: nothing fills it in, and DeepSpeed takes its default"


def _options() -> dict[Path, str]:
    """Where each option of a job stands in the file."""
    zero = """
        overlap_comm round_robin_gradients reduce_bucket_size sub_group_size stage3_prefetch_bucket_size
        stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_model_persistence_threshold zero_hpz_partition_size contiguous_gradients reduce_scatter
        memory_efficient_linear zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
        stage3_use_all_reduce_for_fetch_params stage3_module_granularity_threshold
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save ignore_unused_parameters
        elastic_checkpoint load_from_fp32_weights legacy_stage1 allgather_partitions use_multi_rank_bucket_allreduce
        override_module_apply log_trace_cache_warnings allgather_bucket_size"""
    top = """
        communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
        sparse_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown dump_state
        memory_breakdown steps_per_print"""
    checkpointing = """
        partition_activations cpu_checkpointing contiguous_memory_optimization synchronize_checkpoint_boundary
        number_checkpoints"""
    sections: dict[Path, str] = {
        _ZERO: zero,
        (): top,
        ("activation_checkpointing",): checkpointing,
        ("bf16",): "bf16_master_weights_and_grads bf16_optimizer_states immediate_grad_update check_grad_overflow",
        (
            "fp16",
        ): "fp16_master_weights_and_grads initial_scale_power loss_scale_window min_loss_scale hysteresis loss_scale",
        ("data_types",): "grad_accum_dtype buffer_dtype keep_in_fp32_modules",
        ("compile",): "deepcompile",
        _OFFLOAD_OPTIMIZER: "ratio pipeline_read pipeline_write fast_init",
        _OFFLOAD_PARAM: "buffer_count buffer_size max_in_cpu",
    }
    return {(*section, name): name for section, words in sections.items() for name in words.split()}


OPTIONS: Mapping[Path, str] = _options()
_PATHS: Mapping[str, Path] = {name: path for path, name in OPTIONS.items()}
_FIELDS: Mapping[Path, str] = {
    (*_ZERO, name.removeprefix("stage3_")): name for (*_, name) in OPTIONS if name.startswith("stage3_")
}
"""Pydantic takes the names of its own fields as well (runtime/config_utils.py, populate_by_name)."""


_MARKS = re.compile(
    r'"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size|gradient_clipping|fp16|bf16|zero_allow_untested_optimizer)"\s*:'
)


def detect(text: str, name: str) -> bool:
    """JSON, whole or broken, with a key that only DeepSpeed has."""
    start = text.lstrip()
    return start.startswith(("{", "/", "#")) and not start.startswith("#!") and _MARKS.search(text) is not None


def read(text: str, place: str) -> Reading:
    return read_tree(jsonc.parse(text, place), place)


def read_tree(tree: Tree, place: str) -> Reading:
    """A tree in DeepSpeed's keys: of its own file, or of the section that another format embeds."""
    keys = Keys(tree, place)
    keys.put("engine.name", "deepspeed")
    _complaints(keys)
    _auto(keys)
    _zero(keys)
    _precision(keys)
    _optimizer(keys)
    _degrees(keys)
    _clipping(keys)
    keys.move_options({**OPTIONS, **_FIELDS}, "deepspeed", "transformers")
    batch = Batch(
        **{name: _batch(keys, path) for name, path in (("whole", _WHOLE), ("micro", _MICRO), ("accum", _ACCUM))}
    )
    keys.rest(why_left("deepspeed", "DeepSpeed"))
    return keys.done(NAME, batch)


def _batch(keys: Keys, path: Path) -> tuple[int, Path] | None:
    value = keys.take(path, size)
    return None if value is None else (value, path)


def _complaints(keys: Keys) -> None:
    kinds = dict.fromkeys(what for _, what in keys.tree.complaints)
    for kind in kinds:
        line = next(line for line, what in keys.tree.complaints if what == kind)
        what = f"{kind}: DeepSpeed reads it, and the Trainer of transformers and Accelerate stop at it (strict JSON)"
        keys.find("warning", f"line {line}", what, "take it out, unless DeepSpeed alone reads the file")


def _auto(keys: Keys) -> None:
    """``auto`` says that a value is said elsewhere; sizes that follow the hidden size stay, since a job knows the word too."""
    for path in list(keys.tree.leaves):
        if keys.tree.leaves[path] == "auto" and not _follows_hidden(path):
            by = _BY_TRAINER if path in _FILLED else _BY_ACCELERATE if path in _FILLED_BY_ACCELERATE else _DROPPED
            keys.leave(path, by)


def _follows_hidden(path: Path) -> bool:
    return path[:1] == _ZERO and path[-1] in (
        *("reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    )


def _zero(keys: Keys) -> None:
    stage = (*_ZERO, "stage")
    if not keys.under(_ZERO):
        keys.put("engine.zero_stage", 0)
    elif keys.move(stage, "engine.zero_stage", fields.integer(0)) is None:
        keys.put("engine.zero_stage", 0)  # DeepSpeed's default
    for section, key in ((_OFFLOAD_OPTIMIZER, "offload.optimizer"), (_OFFLOAD_PARAM, "offload.params")):
        keys.move((*section, "device"), key, fields.text)
    for name, (key, now) in _LEGACY_OFFLOAD.items():
        path = (*_ZERO, name)
        if keys.has(path):
            on = keys.take(path, fields.flag)
            keys.find("warning", f"zero_optimization.{name}", "is the old form", f'write "{now}": {{"device": "cpu"}}')
            if on and key not in keys.origins:
                keys.put(key, "cpu", path)
    _pinned(keys)


def _pinned(keys: Keys) -> None:
    """One option stands for both sections, where they agree."""
    both = [(*section, "pin_memory") for section in (_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM)]
    legacy = (*_ZERO, "cpu_offload_use_pin_memory")
    written = [path for path in (*both, legacy) if keys.has(path)]
    values = {path: keys.take(path, fields.flag) for path in written}
    if not written:
        return
    keys.put_option("pin_memory", values[written[0]], written[0])
    if len(written) > 1 and values[written[1]] != values[written[0]]:
        keys.put_option("offload_param_pin_memory", values[written[1]], written[1])


def _precision(keys: Keys) -> None:
    if keys.under(("bfloat16",)):
        keys.find("warning", "bfloat16", "is the old form", "write bf16")
    on = {}
    for name in ("bf16", "bfloat16", "fp16"):
        path = (name, "enabled")
        written = path in keys.tree.leaves
        value = keys.take(path, fields.flag)
        on[name] = (value is True, path, written and value is None)
    half = on["bf16"] if on["bf16"][0] else on["bfloat16"]
    if half[0] and on["fp16"][0]:
        what = "fp16 and bf16 are both on; DeepSpeed refuses that"
        keys.find("error", "fp16.enabled", what, "keep bf16", (on["fp16"][1], False))
    autocast = keys.take(("torch_autocast", "enabled"), fields.flag)
    if autocast:
        keys.put_option("torch_autocast", True, ("torch_autocast", "enabled"))
        dtype = keys.raw(("torch_autocast", "dtype"))
        keys.put(
            "precision", "fp16-mixed" if str(dtype).endswith("float16") and "b" not in str(dtype) else "bf16-mixed"
        )
    elif half[0]:
        keys.put("precision", "bf16-mixed", half[1])
    elif on["fp16"][0]:
        keys.put("precision", "fp16-mixed", on["fp16"][1])
    elif not any(is_auto for _, _, is_auto in on.values()):
        keys.put("precision", "fp32")  # DeepSpeed's default
    if keys.take(("data_types", "grad_accum_dtype"), fields.text) is not None:
        keys.put_option(
            "grad_accum_dtype", keys.tree.leaves[("data_types", "grad_accum_dtype")], ("data_types", "grad_accum_dtype")
        )


def _optimizer(keys: Keys) -> None:
    known = {written.lower(): name for name, written in _OPTIMIZERS.items()}
    written = keys.tree.leaves.get(_OPTIMIZER_TYPE)
    if isinstance(written, str) and written.lower() in known:
        keys.put("optimizer.name", known[written.lower()], _OPTIMIZER_TYPE)
        keys.raw(_OPTIMIZER_TYPE)
    elif keys.has(_OPTIMIZER_TYPE):
        keys.leave(_OPTIMIZER_TYPE, f"an optimizer that no job holds; allowed: {', '.join(_OPTIMIZERS.values())}")
    if keys.take(_TORCH_ADAM, fields.flag):
        keys.put("optimizer.impl", "foreach", _TORCH_ADAM)
        keys.job.setdefault("optimizer", {})


def _degrees(keys: Keys) -> None:
    keys.move(("tensor_parallel", "autotp_size"), "layout.tp", fields.integer(0))
    if keys.origins.get("layout.tp") and keys.tree.leaves[("tensor_parallel", "autotp_size")] == 0:
        keys.put("layout.tp", 1)
    ulysses = ("sequence_parallel_size",)
    if (keys.move(ulysses, "layout.cp", size) or 1) > 1:
        keys.put("layout.cp_kind", "ulysses", ulysses)


def _clipping(keys: Keys) -> None:
    """0, DeepSpeed's default, is off; where nothing is written, the Trainer's max_grad_norm clips all the same."""
    value = keys.take(_CLIPPING, fields.number())
    if value is not None:
        keys.put("grad_clip", value > 0, _CLIPPING)
        if value not in (0, 1):
            keys.put_option("gradient_clipping", value, _CLIPPING)


def leaves(job: Job) -> dict[Path, object]:
    """The job in DeepSpeed's keys: all that they can say."""
    data, options = job.data, job.engine.options
    found: dict[Path, object] = {
        _WHOLE: data.micro_batch * data.grad_accum * job.layout.dp,
        _MICRO: data.micro_batch,
        _ACCUM: data.grad_accum,
        _CLIPPING: options.get("gradient_clipping", 1.0) if job.grad_clip else 0.0,
        (*_ZERO, "stage"): job.engine.zero_stage,
    }
    found |= _offloaded(job)
    found |= _element_types(job)
    if job.optimizer.name in _OPTIMIZERS:
        found[_OPTIMIZER_TYPE] = _OPTIMIZERS[job.optimizer.name]
    if job.optimizer.impl == "foreach" and job.optimizer.name in ("adam", "adamw") and job.offload.optimizer == "none":
        found[_TORCH_ADAM] = True
    if job.layout.tp > 1:
        found["tensor_parallel", "autotp_size"] = job.layout.tp
    if job.layout.cp > 1:
        found[("sequence_parallel_size",)] = job.layout.cp
    if job.engine.shard_group is not None and "zero_hpz_partition_size" not in options:
        found[*_ZERO, "zero_hpz_partition_size"] = job.engine.shard_group
    written = {_PATHS[name]: value for name, value in options.items() if name in _PATHS}
    return found | {path: list(value) if isinstance(value, tuple) else value for path, value in written.items()}


def _offloaded(job: Job) -> dict[Path, object]:
    found: dict[Path, object] = {}
    for section, place in ((_OFFLOAD_OPTIMIZER, job.offload.optimizer), (_OFFLOAD_PARAM, job.offload.params)):
        pinned = job.engine.options.get("pin_memory")
        if section == _OFFLOAD_PARAM:
            pinned = job.engine.options.get("offload_param_pin_memory", pinned)
        if place == "none" and (pinned is None or section == _OFFLOAD_PARAM):
            continue
        found[*section, "device"] = place
        if pinned is not None:
            found[*section, "pin_memory"] = pinned
    if job.offload.activations == "cpu" and job.stack == "megatron":
        found[_PATHS["cpu_checkpointing"]] = True
    return found


def _element_types(job: Job) -> dict[Path, object]:
    """The switch whose meaning is the job's element types; with the accumulator's and the wire's type where those differ."""
    options, precision = dict(job.engine.options), job.precision
    half = precision.params if precision.params != "fp32" else precision.compute
    for extra in ({}, {"grad_accum_dtype": precision.grads, "communication_data_type": precision.reduce}):
        for name in SHORT_NAMES:
            if (
                name in ("bf16", "fp8-mixed")
                or resolve(name, "deepspeed", {**options, **extra}, job.stack) != precision
            ):
                continue
            found: dict[Path, object] = {_PATHS[option]: value for option, value in extra.items()}
            if options.get("torch_autocast") is True and name != "fp32":
                dtype = "bfloat16" if half == "bf16" else "float16"
                return {("torch_autocast", "enabled"): True, ("torch_autocast", "dtype"): dtype}
            return found if name == "fp32" else {(name.removesuffix("-mixed"), "enabled"): True, **found}
    if half in ("bf16", "fp16"):  # the nearest; what differs is told
        return {(half, "enabled"): True}
    return {}


def notes(job: Job) -> tuple[str, ...]:
    """What a reader of the text must still fill in."""
    found = ["optimizer.params.lr: a job has no learning rate; without it DeepSpeed takes 1e-3"]
    if "nvme" in (job.offload.optimizer, job.offload.params):
        found.append("nvme_path: add it to each section that offloads to NVMe")
    return tuple(found)


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return jsonc.render(found)
