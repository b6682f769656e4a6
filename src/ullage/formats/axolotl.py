"""axolotl's YAML.

Sources: src/axolotl/utils/schemas/*.py, loaders/model.py, core/builders/base.py, integrations/*/args.py and monkeypatch/accelerate/fsdp2.py
at 067b021c. The model is loaded in 16 bits; norms and embedding, made fp32 on the way, are made 16 bits again beside adapters; its own
FSDP2 leaves weights in the type that they were loaded in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ullage.formats import yaml_text
from ullage.formats.foreign import reader_of
from ullage.formats.known import why_left
from ullage.formats.reading import Batch, Leftover, Reading, lenient_flag, size
from ullage.formats.trainer import ENGINES, FSDP, FSDP_CONFIG, Recipe, precisions
from ullage.formats.trainer_leaves import CANNOT as SHARED
from ullage.formats.trainer_leaves import (
    CANONICAL,
    adapter_leaves,
    element_types,
    engine_leaves,
    model_leaf,
    optimizer_name,
    step_leaves,
)
from ullage.formats.training_arguments import targets_of, words_of
from ullage.formats.tree import Leaves, Path
from ullage.frozen import replace
from ullage.job import fields
from ullage.job.job import Job

NAME = "axolotl"
TITLE = "axolotl YAML"
SYNTAX = yaml_text
__all__ = ["CANNOT", "ENGINES", "NAME", "SYNTAX", "TITLE"]
CANNOT: Mapping[str, str] = {
    **SHARED,
    "model": "a model of no name: write the path of its config.json",
    "layout": "the GPUs that the other degrees leave",
    "stack": "the plugin of Liger alone",
    "lora": "adapter: lora or qlora with other words",
    "precision": "bf16, fp16 and bfloat16 alone",
    "layout.cp_kind": "ring_attn_func",
    "lora.base": "qlora is nf4 with double quantisation",
}
_CANONICAL = {
    **CANONICAL,
    "data.micro_batch": ("micro_batch_size",),
    "data.seq_len": ("sequence_len",),
    "optimizer": ("optimizer",),
}
_ATTENTION = {
    "xformers_attention": "flash_attention_2",
    "sage_attention": "flash_attention_2",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
"""schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL; xformers and sage keep what flash attention keeps."""
_LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_layer_norm")
_LIGER_LOSS = ("liger_fused_linear_cross_entropy",)
_CCE = "cut_cross_entropy"
_TYPES = ("bf16", "bfloat16", "fp16", "float16")
_REGULAR = re.compile(r"[()\[\]|\\*+?^$]")
_ALTERNATIVES = re.compile(r"\(([\w|]+)\)(\w*)$")


def detect(text: str, name: str) -> bool:
    return reader_of(text) == NAME


def read(text: str, place: str) -> Reading:
    keys = Recipe(yaml_text.parse(text, place), place, "axolotl")
    keys.model("base_model")
    method = _method(keys)
    batch = _batch(keys, _kind(keys, method))
    loaded, mixed, path = _types(keys)
    batch = keys.engine(batch, mixed, version=1)
    _degrees(keys)
    keys.clipping()
    keys.optimizer("optimizer", "adamw_torch_fused")
    if method:
        _lora(keys, method)
    upcast = keys.named != "fsdp2"
    keys.element_types(precisions(loaded, mixed, adapters=bool(method), upcast=upcast), path)
    _checkpointing(keys)
    if keys.move(("sequence_len",), "data.seq_len", size) is None:
        keys.assume("data.seq_len", 512, "sequence_len: 512")
    _attention(keys)
    _plugins(keys)
    keys.compiled()
    if keys.flag("quantize_moe_experts"):
        keys.put_option("quantize_moe_experts", True, ("quantize_moe_experts",))
    if keys.under(("unfrozen_parameters",)):
        what = "a part of the model is trained; the account trains all of it"
        keys.find("warning", "unfrozen_parameters", what, "say the frozen ones: --set 'freeze=[model.layers.0.*]'")
    keys.rest(_why_left())
    return keys.finished(NAME, batch, _CANONICAL)


def _method(keys: Recipe) -> str | None:
    """lora or qlora; None: all of the model is trained."""
    path = ("adapter",)
    written = keys.take(path, fields.text)
    if written in (None, "lora", "qlora"):
        return written
    keys.find("warning", "adapter", f"{written}: adapters that no job holds; lora stands for them", "use lora or qlora")
    return "lora"


def _kind(keys: Recipe, method: str | None) -> int:
    """Sequences in a row of the data."""
    kind = keys.raw(("rl",))
    if kind is None and not keys.flag("reward_model"):
        return 1
    what = f"{kind or 'reward_model'}: "
    if kind in ("grpo", "gdpo", "ebft"):
        keys.find(
            "warning",
            "rl",
            f"{what}the account is of the training step alone; what generates comes on top",
            "leave that much room",
        )
        return 1
    pairs = kind != "kto"
    reference = "" if method or kind in ("orpo", "simpo", None) else "; the reference model's weights come on top"
    rows = "a row is two sequences" if pairs else "a row is a sequence"
    keys.find(
        "warning" if reference else "advice",
        "rl",
        f"{what}{rows}{reference}",
        "leave room for it" if reference else "nothing to add",
    )
    return 2 if pairs else 1


def _batch(keys: Recipe, per_row: int) -> Batch:
    """``batch_size`` says micro-batch times accumulation."""
    whole = keys.take(("batch_size",), size)
    accum = ("gradient_accumulation_steps",)
    written = keys.written(accum[0])
    found = keys.batch("micro_batch_size", 1, per_row=per_row)
    if whole is None or written or found.micro is None:
        return found
    steps = max(1, whole * per_row // found.micro[0])
    return replace(found, accum=(steps, ("batch_size",)))


def _types(keys: Recipe) -> tuple[str, str | None, Path]:
    """(what the model is loaded in, autocast's type, the key that says so). utils/config/__init__.py, resolve_dtype."""
    values = {name: keys.raw((name,)) for name in _TYPES}
    on = {name: value in (True, "true", "auto", "full") for name, value in values.items()}
    if (
        values["bf16"] is None
        and not on["fp16"]
        and not on["float16"]
        and not on["bfloat16"]
        and not keys.flag("float32")
    ):
        keys.tell("bf16: auto")
        on["bf16"] = True
    if on["fp16"] and values["bf16"] == "auto":
        on["bf16"] = False
    if on["bf16"] and on["fp16"]:
        keys.find("error", "fp16", "fp16 and bf16 are both on; axolotl stops", "keep bf16", (("fp16",), False))
    if on["bf16"] or on["bfloat16"]:
        mixed = None if values["bf16"] == "full" else "bf16"
        return "bf16", mixed, ("bf16",) if values["bf16"] is not None else ("bfloat16",)
    if on["fp16"] or on["float16"] or keys.tree.leaves.get(("load_in_8bit",)) is True:
        return "fp16", "fp16" if on["fp16"] else None, ("fp16",) if on["fp16"] else ("float16",)
    return "fp32", None, ("bf16",)


def _degrees(keys: Recipe) -> None:
    keys.move(("tensor_parallel_size",), "layout.tp", size)
    for name in ("context_parallel_size", "sequence_parallel_degree"):
        if (keys.move((name,), "layout.cp", size) or 1) > 1:
            packed = keys.tree.leaves.get(("sample_packing",)) is True
            ring = keys.raw(("ring_attn_func",)) or ("varlen_llama3" if packed else "batch_ring")
            keys.put("layout.cp_kind", "allgather" if ring == "varlen_llama3" else "ring", (name,))
    replicas, shards = (keys.take((name,), size) for name in ("dp_replicate_size", "dp_shard_size"))
    if shards is not None and (replicas or 1) > 1 and keys.named == "fsdp2":
        context = keys.job.get("layout", {})
        keys.put(
            "engine.shard_group",
            shards * (context.get("cp", 1) if isinstance(context, dict) else 1),
            ("dp_shard_size",),
        )
    if shards is None and replicas is not None:
        why = "decides with dp_shard_size, which is not written"
        keys.leftovers.append(Leftover(path=("dp_replicate_size",), value=replicas, why=why))
    if shards is not None:
        keys.put("layout.dp", shards * (replicas or 1), ("dp_shard_size",))
    if (keys.take(("expert_parallel_size",), size) or 1) > 1:
        keys.find(
            "error",
            "expert_parallel_size",
            "experts divided by axolotl's plugin, which no engine here has",
            "leave it out",
        )


def _lora(keys: Recipe, method: str) -> None:
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if method == "qlora" and not (four or eight):
        keys.find("error", "load_in_4bit", "qlora without a base in 4 bits: axolotl stops", "set load_in_4bit: true")
    base = "nf4-double" if four else "int8" if eight else None
    if keys.take(("bnb_config_kwargs", "bnb_4bit_use_double_quant"), lenient_flag) is False and four:
        base = "nf4"
    rank = keys.take(("lora_r",), size)
    keys.adapters(
        {
            "rank": (rank, ("lora_r",)),
            "alpha": (keys.take(("lora_alpha",), fields.number()), ("lora_alpha",)),
            "dropout": (keys.take(("lora_dropout",), fields.number(0.0, 1.0)), ("lora_dropout",)),
            "targets": _targets(keys),
            "base": (base, ("load_in_8bit",) if eight else ("load_in_4bit",)),
            "dora": (keys.flag("peft_use_dora") or None, ("peft_use_dora",)),
            "modules_to_save": (words_of(keys, ("lora_modules_to_save",)), ("lora_modules_to_save",)),
        }
    )
    if keys.flag("peft_use_rslora"):
        keys.put_option("use_rslora", True, ("peft_use_rslora",))
    if four and keys.named in ("fsdp1", "fsdp2"):
        keys.put_option("bnb_4bit_quant_storage", "bf16", ("load_in_4bit",))  # loaders/model.py, bnb_config
    parameters = words_of(keys, ("lora_target_parameters",))
    if parameters:
        keys.put_option("lora_target_parameters", parameters, ("lora_target_parameters",))


def _targets(keys: Recipe) -> tuple[object, Path]:
    """All linears, a list, or a pattern over whole names, whose last part says the modules."""
    path = ("lora_target_modules",)
    if keys.flag("lora_target_linear"):
        if keys.has(path):
            keys.leave(path, "lora_target_linear says all of them")
        return "all-linear", ("lora_target_linear",)
    written = keys.tree.leaves.get(path)
    if not isinstance(written, str) or not _REGULAR.search(written):
        return targets_of(keys, path), path
    alternatives = _ALTERNATIVES.search(written)
    keys.raw(path)
    if alternatives is None:
        keys.find(
            "warning",
            path[0],
            "a pattern that is not read; all linears stand for it",
            "write the modules' names in a list",
        )
        return "all-linear", path
    return [f"{one}{alternatives[2]}" for one in alternatives[1].split("|")], path


def _checkpointing(keys: Recipe) -> None:
    path = ("gradient_checkpointing",)
    written = keys.raw(path)
    offloads = isinstance(written, str) and written not in ("true", "false")
    on = offloads or (written is not None and lenient_flag(written, path[0]))
    keys.checkpointing(on, path)
    activations = ("activation_offloading",)
    moved = keys.raw(activations)
    if offloads or moved not in (None, False, "false"):
        keys.put("offload.activations", "cpu", path if offloads else activations)
    if "disk" in (moved, str(written).removeprefix("offload_")):
        keys.find(
            "advice", activations[0], "the account has on the host what axolotl writes to disk", "leave that much disk"
        )


def _attention(keys: Recipe) -> None:
    written = keys.take(("attn_implementation",), fields.text)
    keys.attention(("attn_implementation",), written)
    for name, meaning in _ATTENTION.items():
        if keys.flag(name) and written is None:
            keys.attention((name,), meaning)


def _plugins(keys: Recipe) -> None:
    """Liger's kernels and its loss, and cut cross entropy: the plugin must be there for its keys to be read."""
    plugins = [str(one).lower() for one in words_of(keys, ("plugins",)) or ()]
    liger = [name for name in _LIGER if keys.flag(name)]
    loss = [name for name in _LIGER_LOSS if keys.flag(name)]
    if liger:
        keys.put("stack", "liger", (liger[0],))
    if loss:
        keys.put("stack", "liger", (loss[0],))
        keys.put("loss", "fused-linear", (loss[0],))
    others = [one for one in plugins if "liger" not in one and _CCE not in one and "cutcrossentropy" not in one]
    if others:
        keys.leftovers.append(Leftover(path=("plugins",), value=others, why="plugins that no job says"))
    if (liger or loss) and not any("liger" in one for one in plugins):
        what = "without the plugin axolotl does not read it"
        keys.find("warning", (liger + loss)[0], what, "plugins: [axolotl.integrations.liger.LigerPlugin]")
    cut = any(_CCE in one or "cutcrossentropy" in one for one in plugins)
    if keys.flag(_CCE, default=cut):
        keys.put("loss", "fused-linear", (_CCE,) if keys.written(_CCE) else ("plugins",))
    if keys.flag("chunked_cross_entropy"):
        chunks = keys.take(("chunked_cross_entropy_num_chunks",), size)
        keys.put("loss", {"kind": "chunked", "chunks": chunks or 8}, ("chunked_cross_entropy",))


_OWN = {
    "sample_packing": "every sequence is as long as data.seq_len, packed or not",
    "pad_to_sequence_len": "every sequence is as long as data.seq_len",
    "lora_mlp_kernel": "axolotl's own kernels of adapters, which keep less than PEFT's code; no job says them",
    "lora_qkv_kernel": "axolotl's own kernels of adapters, which keep less than PEFT's code; no job says them",
    "lora_o_kernel": "axolotl's own kernels of adapters, which keep less than PEFT's code; no job says them",
    "load_in_4bit": "the adapter decides: qlora",
    "load_in_8bit": "the adapter decides: lora",
}


def _why_left() -> Callable[[Path], str]:
    why = why_left(NAME, "axolotl")

    def of(path: Path) -> str:
        if path[0] in _OWN:
            return _OWN[path[0]]
        if path[0] == FSDP_CONFIG:
            return "Accelerate's FSDP reads it, and no job says it"
        return why(path)

    return of


def leaves(job: Job) -> dict[Path, object]:
    """The job in axolotl's words."""
    found: dict[Path, object] = {
        **model_leaf(job, "base_model"),
        ("sequence_len",): job.data.seq_len,
        ("micro_batch_size",): job.data.micro_batch,
        **step_leaves(job),
    }
    types = element_types(job, upcast=job.engine.name != "fsdp2")
    if types is not None:
        loaded, mixed = types
        if mixed is None and loaded == "bf16":
            found |= {("bf16",): "full", ("fp16",): False}  # core/builders/base.py: without autocast
        else:
            found |= {("bf16",): mixed == "bf16", ("fp16",): mixed == "fp16"}
    optimizer = optimizer_name(job)
    if optimizer is not None:
        found[("optimizer",)] = optimizer
    if job.attention == "eager":
        found[("eager_attention",)] = True
    if job.layout.tp > 1:
        found[("tensor_parallel_size",)] = job.layout.tp
    if job.layout.cp > 1:
        found[("context_parallel_size",)] = job.layout.cp
        found[("ring_attn_func",)] = "batch_ring" if job.layout.cp_kind == "ring" else "varlen_llama3"
    found |= _plugin_leaves(job) | _lora_leaves(job) | engine_leaves(job)
    if job.offload.activations != "none":
        found[("activation_offloading",)] = True
    if isinstance(found.get(FSDP), str):
        found[FSDP] = str(found[FSDP]).split()
    return found


def _plugin_leaves(job: Job) -> dict[Path, object]:
    if job.stack == "liger":
        names = [*_LIGER[:3], *(_LIGER_LOSS if job.loss.kind == "fused-linear" else ())]
        return {("plugins",): ["axolotl.integrations.liger.LigerPlugin"], **{(name,): True for name in names}}
    if job.loss.kind == "fused-linear":
        return {("plugins",): ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], (_CCE,): True}
    if job.loss.kind == "chunked":
        return {("chunked_cross_entropy",): True, ("chunked_cross_entropy_num_chunks",): job.loss.chunks}
    return {}


def _lora_leaves(job: Job) -> dict[Path, object]:
    lora = job.lora
    if lora is None:
        return {}
    found = adapter_leaves(lora, rank="lora_r", dora="peft_use_dora", saved="lora_modules_to_save")
    found[("adapter",)] = "qlora" if lora.base.startswith("nf4") else "lora"
    if lora.targets == ("all-linear",):
        found[("lora_target_linear",)] = True
    else:
        found[("lora_target_modules",)] = list(lora.targets)
    if lora.base != "bf16":
        found[("load_in_8bit",) if lora.base == "int8" else ("load_in_4bit",)] = True
    return found


def notes(job: Job) -> tuple[str, ...]:
    return ("datasets, learning_rate, num_epochs and output_dir: a job has none of them",)


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return yaml_text.render(found, comments)
