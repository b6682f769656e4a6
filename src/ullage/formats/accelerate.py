"""Accelerate's YAML: FSDP of both versions, DeepSpeed inline or by file, plain data parallelism.

Which key means what: accelerate/commands/launch.py and utils/dataclasses.py of 1.15.0. Batch sizes, the model and the optimizer are the
script's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath

from ullage.errors import InvalidInput
from ullage.formats import deepspeed, yaml_text
from ullage.formats.known import names, why_left
from ullage.formats.reading import Batch, Keys, Leftover, Reading, lenient_flag, size
from ullage.formats.tree import Leaves, Path
from ullage.frozen import replace
from ullage.job import fields
from ullage.job.job import Job
from ullage.job.precision import SHORT_NAMES, resolve
from ullage.job.text import read_text

NAME = "accelerate"
TITLE = "Accelerate YAML"
ENGINES = ("fsdp2", "fsdp1", "ddp", "single", "deepspeed")
SYNTAX = yaml_text

_SCRIPT = "the script decides"
CANNOT: Mapping[str, str] = {
    **dict.fromkeys(
        ("data", "stack", "stack_version", "attention", "loss", "lora", "freeze", "optimizer", "grad_clip"), _SCRIPT
    ),
    "model": "the script loads the model",
    "cluster": "the launcher runs on the machines that there are",
    "data.seq_len": "the tokenizer and the data set decide",
    "layout.pp": "the script splits the model",
    "layout.vpp": "the script splits the model",
    "layout.schedule": "the script splits the model",
    "layout.pp_split": "the script splits the model",
    "layout.sp": "the script's tensor-parallel plan decides",
    "layout.ep": "the script builds its MoE layers",
    "layout.etp": "the script builds its MoE layers",
    "layout.tp": "parallelism_config goes with FSDP2 alone",
    "layout.cp": "parallelism_config goes with FSDP2 alone",
    "layout.cp_kind": "Accelerate divides sequences by all-gather, all-to-all or Ulysses",
    "engine.name": "the nearest engine that Accelerate launches",
    "engine.shard_group": "parallelism_config goes with FSDP2 alone",
    "engine.zero_stage": "FSDP knows stages 2 and 3",
    "engine.options": "Accelerate has no key for it; DeepSpeed's stand in a file: --to deepspeed, then deepspeed_config_file",
    "precision": "the script loads the model in its own element type",
    "recompute": "the script calls model.gradient_checkpointing_enable()",
    "offload": "no key of Accelerate for this engine",
    "compile": _SCRIPT,
}

_OTHER_DEVICES = ("MULTI_NPU", "MULTI_XPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_NEURON")
"""Plain data parallelism on what is no GPU (utils/dataclasses.py, DistributedType)."""
_TYPES = {
    "NO": "single",
    "MULTI_GPU": "ddp",
    "FSDP": "fsdp1",
    "DEEPSPEED": "deepspeed",
    **dict.fromkeys(_OTHER_DEVICES, "ddp"),
}
_NAMES = {"single": "NO", "ddp": "MULTI_GPU", "fsdp1": "FSDP", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
_MIXED = {"no": "fp32", "fp16": "fp16-mixed", "bf16": "bf16-mixed", "fp8": "fp8-mixed"}
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""In the order of their numbers, from 1 (torch.distributed.fsdp.ShardingStrategy)."""
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
_FSDP_OPTIONS: Mapping[str, fields.Read[object]] = {
    "forward_prefetch": lenient_flag,
    "use_orig_params": lenient_flag,
    "sync_module_states": lenient_flag,
    "cpu_ram_efficient_loading": lenient_flag,
    "min_num_params": fields.integer(0),
}
_PER_LAYER = "TRANSFORMER_BASED_WRAP"
_AXES = {"tp_size": "layout.tp", "cp_size": "layout.cp"}
_CP_KINDS = {"allgather": "allgather", "alltoall": "ulysses"}

_MARKS = re.compile(r"^(distributed_type|fsdp_config|deepspeed_config|compute_environment|num_processes)\s*:", re.M)


def detect(text: str, name: str) -> bool:
    return _MARKS.search(text) is not None


def read(text: str, place: str) -> Reading:
    keys = Keys(yaml_text.parse(text, place), place)
    engine = _engine(keys)
    _mixed_precision(keys)
    batch = Batch()
    if engine in ("fsdp1", "fsdp2"):
        read_fsdp(keys, engine)
    elif engine == "deepspeed":
        batch = _deepspeed(keys)
    _layout(keys, engine)
    _compiled(keys)
    keys.raw(("num_machines",))  # the cluster says it too
    keys.raw(("distributed_type",))
    keys.rest(_why_left(engine))
    return keys.done(NAME, batch)


def _why_left(engine: str) -> Callable[[Path], str]:
    why = why_left("accelerate", "Accelerate")

    sections = {name.partition(".")[0] for name in names("accelerate") if "." in name}

    def of(path: Path) -> str:
        if path[:1] == ("fsdp_config",) and not path[-1].startswith("fsdp_") and len(path) == 2:
            path = (path[0], f"fsdp_{path[-1]}")  # the launcher puts the prefix before
        section = {"fsdp_config": ("fsdp1", "fsdp2"), "deepspeed_config": ("deepspeed",)}.get(path[0])
        if section is not None and engine not in section:
            return f"distributed_type is {_NAMES[engine]}, so Accelerate does not read this section"
        if len(path) == 1 and path[0] in sections:
            return "a section without keys"
        return why(path)

    return of


def _engine(keys: Keys) -> str:
    path = ("distributed_type",)
    written = keys.tree.leaves.get(path)
    if written is None:
        raise InvalidInput("is missing", key="distributed_type", allowed=", ".join(_TYPES), place=keys.place)
    name = "NO" if written in (False, "no") else str(written)
    try:
        engine = _TYPES[fields.choice(*_TYPES)(name, "distributed_type")]
    except InvalidInput as error:
        raise error.at(keys.where(path)) from None
    if engine == "fsdp1":
        version = next((found for found in fsdp_paths("version") if keys.has(found)), None)
        if version is not None and keys.take(version, fields.integer(1)) == 2:
            engine = "fsdp2"
    keys.put("engine.name", engine, path)
    return engine


def fsdp_paths(name: str) -> tuple[Path, Path]:
    """The launcher puts the prefix before a key that has none."""
    return ("fsdp_config", f"fsdp_{name}"), ("fsdp_config", name)


def _mixed_precision(keys: Keys) -> None:
    path = ("mixed_precision",)
    value = keys.raw(path)
    if value is None:
        return
    name = "no" if value is False else str(value).lower()
    if name not in _MIXED:
        raise InvalidInput(
            "is not known",
            key="mixed_precision",
            value=fields.show(value),
            allowed=", ".join(_MIXED),
            place=keys.where(path),
        )
    keys.put("precision", _MIXED[name], path)


def read_fsdp(keys: Keys, engine: str) -> None:
    """The section fsdp_config, which transformers' Trainer and axolotl have by the same names."""

    def taken(name: str, read: fields.Read[object]) -> tuple[object, Path]:
        path = next((found for found in fsdp_paths(name) if keys.has(found)), fsdp_paths(name)[0])
        return keys.take(path, read), path

    strategy, path = taken("sharding_strategy", _strategy)
    reshard, reshard_path = taken("reshard_after_forward", _reshard)
    if engine == "fsdp1" and (strategy or isinstance(reshard, str)):
        named, at = (strategy, path) if strategy else (reshard, reshard_path)
        if named in _STAGES:
            keys.put("engine.zero_stage", _STAGES[str(named)], at)
        else:
            keys.put_option("sharding_strategy", named, at)
    elif engine == "fsdp2" and (reshard is not None or strategy):
        sharded = reshard if reshard is not None else strategy
        keys.put("engine.zero_stage", 3 if sharded in (True, "FULL_SHARD", "HYBRID_SHARD") else 2, reshard_path)
        if strategy and reshard is not None:
            keys.leftovers.append(
                Leftover(path=path, value=strategy, why="FSDP1's word; reshard_after_forward decides")
            )
        if strategy and reshard is None:
            keys.find(
                "warning", ".".join(path), "is FSDP1's word", "FSDP2 reads fsdp_reshard_after_forward: true or false"
            )
    offload, path = taken("offload_params", lenient_flag)
    if offload:
        keys.put("offload", {"optimizer": "cpu", "params": "cpu"}, path)
        keys.origins |= {"offload.optimizer": path, "offload.params": path}
    checkpointing, path = taken("activation_checkpointing", lenient_flag)
    if checkpointing is not None:
        keys.put("recompute", "full" if checkpointing else "none", path)
    _fsdp_options(keys, taken)


def _fsdp_options(keys: Keys, taken: Callable[[str, fields.Read[object]], tuple[object, Path]]) -> None:
    for name, read in _FSDP_OPTIONS.items():
        value, path = taken(name, read)
        if value is not None:
            keys.put_option(name, value, path)
    prefetch, path = taken("backward_prefetch", fields.text)
    if prefetch is not None:
        keys.put_option("backward_prefetch", str(prefetch).lower(), path)
    for path in fsdp_paths("auto_wrap_policy"):
        if keys.tree.leaves.get(path) == _PER_LAYER:
            keys.leave(path, "each decoder layer is a unit, as in every job")
        elif keys.has(path):
            keys.put_option("auto_wrap_policy", keys.take(path, fields.text), path)
    for path in fsdp_paths("transformer_layer_cls_to_wrap"):
        keys.leave(path, "each decoder layer is a unit, as in every job")


def _strategy(value: object, key: str) -> object:
    """A name, or torch's number for it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _STRATEGIES[value - 1] if 1 <= value <= len(_STRATEGIES) else fields.choice(*_STRATEGIES)(value, key)
    aliases = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}
    return fields.choice(*_STRATEGIES, aliases=aliases)(str(value).upper(), key)


def _reshard(value: object, key: str) -> object:
    """true or false; FSDP1's files say the strategy here, as the launcher lets them."""
    if isinstance(value, str) and value.upper() in (*_STRATEGIES, "HYBRID_SHARD_ZERO2"):
        return _strategy(value, key)
    return lenient_flag(value, key)


def _deepspeed(keys: Keys) -> Batch:
    section = "deepspeed_config"
    file = keys.take((section, "deepspeed_config_file"), fields.text)
    if file is not None:
        return _deepspeed_file(keys, file)
    keys.move((section, "zero_stage"), "engine.zero_stage", fields.integer(0))
    if "engine.zero_stage" not in keys.origins:
        keys.put("engine.zero_stage", 2)  # utils/dataclasses.py, DeepSpeedPlugin
    for part, key in (("offload_optimizer_device", "offload.optimizer"), ("offload_param_device", "offload.params")):
        keys.move((section, part), key, fields.text)
    clipping = (section, "gradient_clipping")
    if keys.tree.leaves.get(clipping) not in (None, "auto"):
        value = keys.take(clipping, fields.number())
        keys.put("grad_clip", bool(value), clipping)
    accum = (section, "gradient_accumulation_steps")
    if keys.tree.leaves.get(accum) not in (None, "auto"):
        steps = keys.take(accum, size)
        assert steps is not None
        return Batch(accum=(steps, accum))
    return Batch()


def _deepspeed_file(keys: Keys, file: str) -> Batch:
    """The other file, where it is; its keys stand there, so that no edit of this one is offered for them."""
    path = ("deepspeed_config", "deepspeed_config_file")
    beside = FilePath(keys.place).parent / file
    same_folder = FilePath(keys.place).parent / FilePath(file).name
    found = next((one for one in (beside, same_folder) if is_file(one)), None)
    if found is None:
        keys.find("warning", ".".join(path), f"{file} is not here", "check that file itself, or put it beside this one")
        return Batch()
    inner = deepspeed.read(read_text(found, "DeepSpeed's configuration"), str(found))
    for key, value in inner.keys.items():
        if not (key == "precision" and key in keys.job):
            keys.job[key] = value
    keys.leftovers += [Leftover(path=(*path, *one.path), value=one.value, why=one.why) for one in inner.leftovers]
    keys.findings += inner.findings
    return inner.batch


def is_file(path: FilePath) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def _layout(keys: Keys, engine: str) -> None:
    """num_processes is the number of all GPUs; the degrees of parallelism_config divide it."""
    degrees = {
        name: _degree(keys, name) for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    }
    for name, key in _AXES.items():
        if degrees[name] > 1:
            keys.put(key, degrees[name], _degree_path(keys, name))
    if degrees["sp_size"] > 1:
        keys.put("layout.cp", degrees["sp_size"], _degree_path(keys, "sp_size"))
        keys.put("layout.cp_kind", "ulysses", _degree_path(keys, "sp_size"))
    elif degrees["cp_size"] > 1:
        strategy = _degree_path(keys, "cp_comm_strategy")
        kind = _CP_KINDS.get(str(keys.raw(strategy)), "allgather")
        keys.put("layout.cp_kind", kind, strategy)
    if degrees["dp_replicate_size"] > 1 and engine == "fsdp2":
        keys.put(
            "engine.shard_group", degrees["dp_shard_size"] * degrees["cp_size"], _degree_path(keys, "dp_shard_size")
        )
    processes = keys.take(("num_processes",), size)
    if processes is not None and engine != "single":
        others = degrees["tp_size"] * degrees["cp_size"] * degrees["sp_size"]
        keys.put("layout.dp", max(1, processes // others), ("num_processes",))


def _degree_path(keys: Keys, name: str) -> Path:
    paths = ("parallelism_config", f"parallelism_config_{name}"), ("parallelism_config", name)
    return next((path for path in paths if path in keys.tree.leaves), paths[0])


def _degree(keys: Keys, name: str) -> int:
    return keys.take(_degree_path(keys, name), size) or 1


def _compiled(keys: Keys) -> None:
    for path in (("dynamo_config", "dynamo_backend"), ("dynamo_backend",)):
        value = keys.raw(path)
        if value is not None:
            keys.put("compile", str(value).lower() not in ("no", "false"), path)


def leaves(job: Job) -> dict[Path, object]:
    """The job in Accelerate's keys, with the launcher's own that every file needs."""
    found: dict[Path, object] = {
        ("compute_environment",): "LOCAL_MACHINE",
        ("distributed_type",): _NAMES[job.engine.name],
        ("mixed_precision",): _mixed(job),
        ("num_machines",): job.cluster.nodes,
        ("num_processes",): job.layout.world,
        ("machine_rank",): 0,
        ("main_training_function",): "main",
        ("rdzv_backend",): "c10d" if job.cluster.nodes > 1 else "static",
        ("same_network",): True,
        ("use_cpu",): False,
    }
    if job.engine.name == "deepspeed":
        found |= _deepspeed_leaves(job)
    elif job.engine.name in ("fsdp1", "fsdp2"):
        found |= fsdp_leaves(job)
    if job.engine.name == "fsdp2":
        found |= _degree_leaves(job)
    if job.compile:
        found["dynamo_config", "dynamo_backend"] = "INDUCTOR"
    return found


def _mixed(job: Job) -> str:
    """The type of the reduction goes with the word: what reads the file again says where the job's is another."""
    for word, name in _MIXED.items():
        found = resolve(name, job.engine.name, job.engine.options, job.stack)
        if replace(found, reduce=job.precision.reduce) == job.precision:
            return word
    assert len(SHORT_NAMES) > len(_MIXED)  # bf16 throughout is no mixed precision
    return "no"


def _deepspeed_leaves(job: Job) -> dict[Path, object]:
    section = "deepspeed_config"
    return {
        (section, "zero_stage"): job.engine.zero_stage,
        (section, "offload_optimizer_device"): job.offload.optimizer,
        (section, "offload_param_device"): job.offload.params,
        (section, "gradient_accumulation_steps"): job.data.grad_accum,
        (section, "gradient_clipping"): 1.0 if job.grad_clip else 0.0,
        (section, "zero3_init_flag"): job.engine.zero_stage == 3,
    }


def fsdp_leaves(job: Job) -> dict[Path, object]:
    section, options = "fsdp_config", job.engine.options
    found: dict[Path, object] = {(section, "fsdp_version"): 2 if job.engine.name == "fsdp2" else 1}
    if job.engine.name == "fsdp2":
        found[section, "fsdp_reshard_after_forward"] = job.engine.zero_stage == 3
    else:
        by_stage = {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 0: "NO_SHARD"}
        strategy = str(options.get("sharding_strategy", by_stage[job.engine.zero_stage]))
        found[section, "fsdp_sharding_strategy"] = strategy.removeprefix("_")
    found[section, "fsdp_auto_wrap_policy"] = options.get("auto_wrap_policy", _PER_LAYER)
    found[section, "fsdp_offload_params"] = job.offload.params == "cpu"
    found[section, "fsdp_activation_checkpointing"] = job.recompute.kind == "full"
    if "backward_prefetch" in options:
        found[section, "fsdp_backward_prefetch"] = str(options["backward_prefetch"]).upper()
    return found | {(section, f"fsdp_{name}"): options[name] for name in _FSDP_OPTIONS if name in options}


def _degree_leaves(job: Job) -> dict[Path, object]:
    layout, section = job.layout, "parallelism_config"
    group = job.engine.shard_group
    if layout.tp == layout.cp == 1 and group is None:
        return {}
    shard = layout.dp if group is None else max(1, group // layout.cp)
    sequence = {"sp_size": layout.cp} if layout.cp_kind == "ulysses" else {"cp_size": layout.cp}
    sizes = {"dp_replicate_size": layout.dp // shard, "dp_shard_size": shard, "tp_size": layout.tp, **sequence}
    return {(section, f"parallelism_config_{name}"): value for name, value in sizes.items()}


def notes(job: Job) -> tuple[str, ...]:
    if job.cluster.nodes > 1:
        return ("several machines: set main_process_ip, main_process_port and machine_rank on each",)
    return ()


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return yaml_text.render(found, comments)
