"""LLaMA-Factory's YAML: its own arguments around transformers' TrainingArguments.

Sources: src/llamafactory/hparams/*.py, model/adapter.py, model/patcher.py and model/model_utils/*.py at ff6d4d12. The model is loaded in
the compute type; what is trained is made fp32 unless pure_bf16 or ZeRO-3 keeps it; checkpointing is on unless it is disabled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ullage.errors import InvalidInput, UllageError
from ullage.formats import hf_text
from ullage.formats.foreign import reader_of
from ullage.formats.known import why_left
from ullage.formats.reading import Reading, lenient_flag, size
from ullage.formats.trainer import ENGINES, Recipe, precisions
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
from ullage.job import fields
from ullage.job.job import Job
from ullage.model.catalogue import model_config

NAME = "llamafactory"
TITLE = "LLaMA-Factory YAML"
SYNTAX = hf_text
__all__ = ["CANNOT", "ENGINES", "NAME", "SYNTAX", "TITLE"]
CANNOT: Mapping[str, str] = {
    **SHARED,
    "model": "a model of no name: write the path of its config.json",
    "stack": "enable_liger_kernel and use_unsloth alone",
    "lora": "finetuning_type: lora with other words",
    "freeze": "finetuning_type: freeze trains the first or the last layers",
    "precision": "pure_bf16, bf16 and fp16 alone",
}
_CANONICAL = {
    **CANONICAL,
    "data.micro_batch": ("per_device_train_batch_size",),
    "data.seq_len": ("cutoff_len",),
    "recompute": ("disable_gradient_checkpointing",),
}
_ATTENTION = {
    "disabled": "eager",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "auto": "auto",
}
_OTHER_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini")
_OF_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_OTHER_ENGINES = ("use_mca", "use_megatron_bridge", "use_kt", "use_hyper_parallel", *_OF_MEGATRON)
_OFF_WITHOUT_LOGITS = ("pt", "sft")
"""model_utils/liger_kernel.py: the other stages read the logits, so that the fused loss stays off."""


def detect(text: str, name: str) -> bool:
    return reader_of(text) == NAME


def read(text: str, place: str) -> Reading:
    keys = Recipe(hf_text.parse(text, place), place, "LLaMA-Factory")
    _other_trainers(keys)
    keys.model("model_name_or_path")
    stage = keys.take(("stage",), fields.choice("pt", "sft", "rm", "ppo", "dpo", "kto")) or "sft"
    method = keys.take(("finetuning_type",), fields.choice("lora", "oft", "freeze", "full")) or "lora"
    batch = keys.batch("per_device_train_batch_size", 8, per_row=2 if stage in ("dpo", "rm") else 1)
    _stage(keys, stage, method)
    pure = keys.flag("pure_bf16")
    fp16, bf16 = keys.flag("fp16"), keys.flag("bf16")
    mixed = "bf16" if bf16 else "fp16" if fp16 else None
    batch = keys.engine(batch, mixed, version=2 if keys.tree.leaves.get(("fsdp",)) in (True, "true") else 1)
    keys.clipping()
    _optimizer(keys)
    adapters = method == "lora"
    loaded = "fp16" if fp16 and not pure else "bf16"
    if adapters:
        _lora(keys, loaded)
    elif method == "oft":
        keys.find("error", "finetuning_type", "oft: adapters that no job holds", "use lora")
    if not adapters and not pure:
        loaded = "fp32"
    if pure:
        mixed = mixed if bf16 else None
    place_of_types: Path = ("pure_bf16",) if pure else ("fp16",) if fp16 else ("bf16",)
    if not (pure or bf16 or fp16):
        keys.tell("the weights in bfloat16, as most checkpoints are, without autocast")
    keys.element_types(precisions(loaded, mixed, adapters=adapters), place_of_types)
    if method == "freeze":
        _freeze(keys)
    _checkpointing(keys)
    if keys.move(("cutoff_len",), "data.seq_len", size) is None:
        keys.assume("data.seq_len", 2048, "cutoff_len: 2048")
    _layers(keys, stage)
    keys.compiled()
    keys.rest(_why_left())
    return keys.finished(NAME, batch, _CANONICAL)


def _stage(keys: Recipe, stage: str, method: str) -> None:
    reference = (
        method != "lora" and stage in ("dpo", "kto") and keys.tree.leaves.get(("pref_loss",)) not in ("orpo", "simpo")
    )
    rows = "a row is two sequences" if stage in ("dpo", "rm") else "a row is a sequence"
    if reference:
        keys.find(
            "warning", "stage", f"{stage}: {rows}; the reference model's weights come on top", "leave room for them"
        )
    elif stage in ("dpo", "rm", "kto"):
        keys.find(
            "advice", "stage", f"{stage}: {rows}; without its adapters the model is its own reference", "nothing to add"
        )
    elif stage == "ppo":
        what = "ppo: the account is of one model's training step alone; the reward model, the value head and generation come on top"
        keys.find("warning", "stage", what, "leave that much room")


def _other_trainers(keys: Recipe) -> None:
    """InvalidInput for recipes whose run is not the Trainer's."""
    for name in _OTHER_ENGINES:
        if keys.tree.leaves.get((name,)) is True or (name in _OF_MEGATRON and keys.written(name)):
            what = "says another engine of LLaMA-Factory's than the Trainer, which is not read"
            raise InvalidInput(what, key=name, remedy="write the job: docs/job.md", place=keys.where((name,)))


def _optimizer(keys: Recipe) -> None:
    for name in _OTHER_OPTIMIZERS:
        if keys.flag(name):
            keys.find("warning", name, "an optimizer that no job holds; that of optim stands for it", "take it out")
    if keys.flag("use_muon"):
        keys.put("optimizer", "muon", ("use_muon",))
        keys.leave(("optim",), "use_muon builds the optimizer")
        return
    keys.optimizer("optim", "adamw_torch_fused")


def _lora(keys: Recipe, loaded: str) -> None:
    """loaded: the type of the model's weights, which bitsandbytes' bytes are seen as under FSDP."""
    rank = keys.take(("lora_rank",), size)
    if rank is None:
        keys.tell("lora_rank: 8")
        rank = 8
    alpha = keys.take(("lora_alpha",), fields.number())
    if alpha is None:
        keys.tell(f"lora_alpha: {2 * rank}")
    targets = targets_of(keys, ("lora_target",))
    if targets is None:
        keys.tell("lora_target: all")
    keys.adapters(
        {
            "rank": (rank, ("lora_rank",)),
            "alpha": (alpha or float(2 * rank), ("lora_alpha",)),
            "dropout": (keys.take(("lora_dropout",), fields.number(0.0, 1.0)), ("lora_dropout",)),
            "targets": (targets or "all-linear", ("lora_target",)),
            "base": (_base(keys, loaded), ("quantization_bit",)),
            "dora": (keys.flag("use_dora") or None, ("use_dora",)),
            "modules_to_save": (words_of(keys, ("additional_target",)), ("additional_target",)),
        }
    )


def _base(keys: Recipe, loaded: str) -> str | None:
    bits = keys.take(("quantization_bit",), size)
    if bits is None:
        return None
    method = str(keys.raw(("quantization_method",)) or "bnb").lower()
    if bits not in (4, 8) or method not in ("bnb", "bitsandbytes"):
        what = f"{bits} bits of {method}: a base that no job holds; that of bitsandbytes stands for it"
        keys.find("warning", "quantization_bit", what, "use bnb, in 4 or 8 bits")
    kind = keys.raw(("quantization_type",))
    if kind not in (None, "nf4"):
        keys.put_option("bnb_4bit_quant_type", kind, ("quantization_type",))
    if bits == 4 and keys.named in ("fsdp1", "fsdp2"):
        keys.put_option("bnb_4bit_quant_storage", loaded, ("quantization_bit",))  # model_utils/quantization.py
    double = keys.flag("double_quantization", default=True)
    return "int8" if bits == 8 else "nf4-double" if double else "nf4"


def _freeze(keys: Recipe) -> None:
    """The embedding, the head and all layers but the last (or first) of freeze_trainable_layers."""
    path = ("freeze_trainable_layers",)
    written = keys.raw(path)
    count = 2 if written is None else written
    layers = _layers_of(keys)
    if not isinstance(count, int) or isinstance(count, bool) or layers is None or keys.flag("use_llama_pro"):
        what = "the layers that are trained cannot be told of this model; the account trains them all"
        keys.find("warning", "finetuning_type", what, "say the frozen ones: --set 'freeze=[model.layers.0.*]'")
        return
    if written is None:
        keys.tell("freeze_trainable_layers: 2")
    modules = words_of(keys, ("freeze_trainable_modules",))
    if modules not in (None, ["all"]):
        keys.find(
            "warning",
            "freeze_trainable_modules",
            "the account trains whole layers",
            "say the frozen ones: --set freeze=[...]",
        )
    extra = words_of(keys, ("freeze_extra_modules",)) or []
    frozen = range(layers - min(count, layers)) if count > 0 else range(min(-count, layers), layers)
    outside = [name for name in ("embed_tokens", "norm", "lm_head") if name not in extra]
    patterns = [f"model.{name}.*" if name != "lm_head" else "lm_head.*" for name in outside]
    keys.put(
        "freeze", patterns + [f"model.layers.{index}.*" for index in frozen], path if path in keys.tree.leaves else None
    )
    what = "the account keeps frozen layers in the type of the trained ones, fp32; LLaMA-Factory leaves them in 16 bits"
    if not keys.written("pure_bf16"):
        keys.find("advice", "finetuning_type", what, "pure_bf16: true has all in 16 bits")


def _layers_of(keys: Recipe) -> int | None:
    name = keys.job.get("model")
    try:
        found = model_config(name).keys.get("num_hidden_layers") if isinstance(name, str) else None
    except UllageError:
        return None
    return found if isinstance(found, int) else None


def _checkpointing(keys: Recipe) -> None:
    path = ("disable_gradient_checkpointing",)
    off = keys.take(path, lenient_flag)
    if off is None:
        keys.tell("disable_gradient_checkpointing: false")
    keys.checkpointing(not off, path)
    keys.leave(
        ("gradient_checkpointing",), "LLaMA-Factory turns it on by itself; disable_gradient_checkpointing decides"
    )
    for name in ("use_unsloth_gc", "use_unsloth"):
        if keys.tree.leaves.get((name,)) is True and not off:
            keys.put("offload.activations", "cpu", (name,))
    keys.flag("use_unsloth_gc")


def _layers(keys: Recipe, stage: str) -> None:
    written = keys.take(("flash_attn",), fields.choice(*_ATTENTION))
    keys.attention(("flash_attn",), None if written is None else _ATTENTION[written])
    if keys.flag("enable_liger_kernel"):
        keys.put("stack", "liger", ("enable_liger_kernel",))
        if stage in _OFF_WITHOUT_LOGITS:
            keys.put("loss", "fused-linear", ("enable_liger_kernel",))
    if keys.flag("use_unsloth"):
        keys.put("stack", "unsloth", ("use_unsloth",))


_OWN = {
    "upcast_layernorm": "norms alone in fp32, which no job says",
    "upcast_lmhead_output": "the logits are made fp32 in every account",
    "use_reentrant_gc": "which of torch's two ways of running again: both keep what a layer was given",
    "packing": "every sequence is as long as data.seq_len, packed or not",
    "neat_packing": "every sequence is as long as data.seq_len, packed or not",
}


def _why_left() -> Callable[[Path], str]:
    why = why_left(NAME, "LLaMA-Factory")
    return lambda path: _OWN.get(path[0]) or why(path)


def leaves(job: Job) -> dict[Path, object]:
    """The job in LLaMA-Factory's words."""
    found: dict[Path, object] = {
        **model_leaf(job, "model_name_or_path"),
        ("stage",): "sft",
        ("finetuning_type",): "full" if job.lora is None else "lora",
        ("cutoff_len",): job.data.seq_len,
        ("per_device_train_batch_size",): job.data.micro_batch,
        **step_leaves(job),
    }
    del found[("gradient_checkpointing",)]
    found[("disable_gradient_checkpointing",)] = job.recompute.kind != "full"
    types = element_types(job)
    if types is not None:
        loaded, mixed = types
        found |= {("bf16",): mixed == "bf16", ("fp16",): mixed == "fp16"}
        if loaded == "bf16" and job.lora is None:
            found[("pure_bf16",)] = True
    optimizer = optimizer_name(job)
    if optimizer == "muon":
        found[("use_muon",)] = True
    elif optimizer is not None:
        found[("optim",)] = optimizer
    if job.attention == "eager":
        found[("flash_attn",)] = "disabled"
    if job.stack == "liger":
        found[("enable_liger_kernel",)] = True
    if job.stack == "unsloth":
        found[("use_unsloth",)] = True
    elif job.offload.activations == "cpu":
        found[("use_unsloth_gc",)] = True
    return found | _lora_leaves(job) | engine_leaves(job)


def _lora_leaves(job: Job) -> dict[Path, object]:
    lora = job.lora
    if lora is None:
        return {}
    found = adapter_leaves(lora, rank="lora_rank", dora="use_dora", saved="additional_target", listed=",".join)
    found[("lora_target",)] = ",".join(lora.targets) if lora.targets != ("all-linear",) else "all"
    if lora.base != "bf16":
        found[("quantization_bit",)] = 8 if lora.base == "int8" else 4
        if lora.base != "int8":
            found[("double_quantization",)] = lora.base == "nf4-double"
    return found


def notes(job: Job) -> tuple[str, ...]:
    return ("dataset, template, learning_rate and output_dir: a job has none of them",)


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return hf_text.render(found, comments)
