"""transformers' TrainingArguments as YAML or JSON, with TRL's arguments and ModelConfig beside them: SFT, DPO, GRPO and their kin.

Sources: transformers/training_args.py of 5.24.0; trl/trainer/{base,sft,dpo,grpo,model}_config.py, sft_trainer.py and utils.py at f2cd5771.
The rest is a script's own, and decides what it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ullage.errors import nearest
from ullage.formats import hf_text
from ullage.formats.foreign import reader_of
from ullage.formats.known import UNKNOWN, names, published
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
from ullage.formats.tree import Leaves, Path, dotted
from ullage.job import fields
from ullage.job.job import Job
from ullage.job.options.spec import DTYPE_ALIASES

NAME = "training-arguments"
TITLE = "arguments of transformers' Trainer and TRL (YAML)"
SYNTAX = hf_text
CANNOT: Mapping[str, str] = {
    **SHARED,
    "stack": "use_liger_kernel says Liger; the script loads the rest",
    "model": "a model of no name: write the path of its config.json",
    "lora": "load_in_4bit, load_in_8bit and ModelConfig's lora_* say no such adapters",
    "offload.activations": "TRL's activation_offloading goes with the card's host alone",
}
__all__ = ["CANNOT", "ENGINES", "NAME", "SYNTAX", "TITLE"]

_TRL = (
    "max_length",
    "max_seq_length",
    "packing",
    "use_peft",
    "num_generations",
    "max_completion_length",
    "max_prompt_length",
    "dataset_text_field",
    "assistant_only_loss",
    "completion_only_loss",
    "loss_type",
    "beta",
    "use_vllm",
    "dataset_kwargs",
    "dataset_num_proc",
    "use_bnb_nested_quant",
    "activation_offloading",
    "padding_free",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_mixture",
    "dataset_mixer",
    "chat_template",
    "use_liger",
)
"""Keys by which a script is TRL's, or made of its trainers."""
_ONLINE = ("num_generations", "max_completion_length", "max_new_tokens", "response_length")
_PAIRS = (
    "beta",
    "precompute_ref_log_probs",
    "rpo_alpha",
    "f_divergence_type",
    "desirable_weight",
    "center_rewards_coefficient",
)
_LENGTHS = ("max_length", "max_seq_length", "model_max_length", "block_size", "max_source_length")
_SUMS = (("max_prompt_length", "max_completion_length"), ("source_max_len", "target_max_len"))
_LIGER = ("use_liger_kernel", "use_liger")
_DTYPES = ("dtype", "torch_dtype")
_QUANTISED = ("load_in_4bit", "load_in_8bit")
_ALIASES = {**DTYPE_ALIASES, **{name: name for name in ("fp32", "bf16", "fp16")}}
_CLOSE = 0.9
"""A misspelt key, not a script's own that is like it: hub_model_revision of alignment-handbook."""
_CANONICAL = {**CANONICAL, "data.micro_batch": ("per_device_train_batch_size",), "data.seq_len": ("max_length",)}


def detect(text: str, name: str) -> bool:
    return reader_of(text) == NAME


def read(text: str, place: str) -> Reading:
    tree = hf_text.parse(text, place)
    trl = any((name,) in tree.leaves for name in _TRL)
    keys = Recipe(tree, place, "TRL" if trl else "transformers' Trainer")
    keys.model("model_name_or_path")
    per_row = _kind(keys)
    micro = next(
        (name for name in ("per_device_train_batch_size", "per_gpu_train_batch_size") if keys.written(name)), None
    )
    batch = keys.batch(micro or "per_device_train_batch_size", 8, per_row=per_row)
    mixed = _mixed(keys, trl)
    batch = keys.engine(batch, mixed, version=2 if keys.tree.leaves.get(("fsdp",)) in (True, "true") else 1)
    keys.clipping()
    keys.optimizer("optim", "adamw_torch_fused")
    _checkpointing(keys, trl)
    loaded = _loaded(keys, mixed)
    adapters = _adapters(keys, trl)
    if adapters and loaded == "fp32" and not _is_quantised(keys):
        what = "the adapters' base is loaded in fp32, 4 bytes a weight; the account has it in bf16"
        keys.find("warning", "dtype", what, "set dtype: bfloat16")
    keys.element_types(precisions(loaded, mixed, adapters=adapters), ("bf16",) if keys.written("bf16") else ("fp16",))
    _sequence(keys, trl)
    keys.attention(("attn_implementation",), _model_word(keys, "attn_implementation"))
    _liger(keys, trl)
    keys.compiled()
    if keys.flag("activation_offloading"):
        keys.put("offload.activations", "cpu", ("activation_offloading",))
    _buckets(keys)
    keys.rest(_why_left())
    return keys.finished(NAME, batch, _CANONICAL)


def _kind(keys: Recipe) -> int:
    """Sequences in a row of the data. What is no supervised step is told: a job has no word for it."""
    if any(keys.written(name) for name in _ONLINE):
        vllm = keys.tree.leaves.get(("vllm_gpu_memory_utilization",), 0.3)
        colocated = (
            keys.tree.leaves.get(("vllm_mode",), "colocate") == "colocate"
            and keys.tree.leaves.get(("use_vllm",)) is True
        )
        held = (
            f"vLLM holds {vllm} of the card beside it" if colocated else "what generates the completions comes on top"
        )
        keys.find(
            "warning", "num_generations", f"the account is of the training step alone: {held}", "leave that much room"
        )
        return 1
    if not any(keys.written(name) for name in _PAIRS):
        return 1
    unpaired = keys.written("desirable_weight")
    reference = keys.tree.leaves.get(("use_peft",)) is not True and not keys.written("center_rewards_coefficient")
    rows = "" if unpaired else "a row is two sequences; "
    model = (
        "the reference model's weights come on top" if reference else "the reference is the model without its adapters"
    )
    keys.find(
        "warning", "beta", f"preference training: {rows}{model}", "leave room for it" if reference else "nothing to add"
    )
    return 1 if unpaired else 2


def _mixed(keys: Recipe, trl: bool) -> str | None:
    fp16, bf16 = keys.flag("fp16"), keys.take(("bf16",), lenient_flag)
    if fp16 and bf16:
        keys.find("error", "fp16", "fp16 and bf16 are both on; the Trainer stops", "keep bf16", (("fp16",), False))
    if bf16 is None and trl and not fp16:
        keys.tell("bf16: true")
        return "bf16"
    return "bf16" if bf16 else "fp16" if fp16 else None


def _model_word(keys: Recipe, name: str) -> str | None:
    """A key of ModelConfig's, or one of the model's own among model_init_kwargs."""
    for path in ((name,), ("model_init_kwargs", name)):
        if keys.has(path):
            return keys.take(path, fields.text)
    return None


def _loaded(keys: Recipe, mixed: str | None) -> str:
    for name in _DTYPES:
        written = _model_word(keys, name)
        if written == "auto":
            keys.tell(f"{name}: auto as bfloat16, which most checkpoints are in")
            return "bf16"
        if written is not None:
            return fields.choice("fp32", "bf16", "fp16", aliases=_ALIASES)(written, name)
    if mixed:
        keys.tell("dtype: float32")
    return "fp32"


def _is_quantised(keys: Recipe) -> bool:
    return any(keys.tree.leaves.get((name,)) is True for name in _QUANTISED)


def _checkpointing(keys: Recipe, trl: bool) -> None:
    path = ("gradient_checkpointing",) if keys.written("gradient_checkpointing") else ("activation_checkpointing",)
    on = keys.take(path, lenient_flag)
    if on is None and trl:
        keys.tell("gradient_checkpointing: true")
    keys.checkpointing(trl if on is None else on, path)


def _adapters(keys: Recipe, trl: bool) -> bool:
    four, eight = (keys.flag(name) for name in _QUANTISED)
    wanted = keys.take(("use_peft",), lenient_flag)
    if wanted is None:
        wanted = keys.written("lora_r") or keys.written("lora_rank") or keys.flag("use_lora")
    if not wanted:
        if four or eight:
            keys.find("error", "use_peft", "a model in 4 or 8 bits is trained by adapters alone", "set use_peft: true")
        return False
    rank = "lora_rank" if keys.written("lora_rank") else "lora_r"
    base = "int8" if eight else None
    if four:
        base = "nf4-double" if keys.flag("use_bnb_nested_quant") or keys.flag("bnb_4bit_use_double_quant") else "nf4"
    quant = keys.raw(("bnb_4bit_quant_type",))
    if four and quant not in (None, "nf4"):
        keys.put_option("bnb_4bit_quant_type", quant, ("bnb_4bit_quant_type",))
    rank_of, alpha, dropout = (16, 32.0, 0.05) if trl else (8, 16.0, 0.0)
    keys.adapters(
        {
            "rank": (keys.take((rank,), size) or rank_of, (rank,)),
            "alpha": (_or(keys.take(("lora_alpha",), fields.number()), alpha), ("lora_alpha",)),
            "dropout": (_or(keys.take(("lora_dropout",), fields.number(0.0, 1.0)), dropout), ("lora_dropout",)),
            "targets": (targets_of(keys, ("lora_target_modules",)), ("lora_target_modules",)),
            "base": (base, _QUANTISED[eight:][:1]),
            "dora": (keys.flag("use_dora") or None, ("use_dora",)),
            "modules_to_save": (words_of(keys, ("lora_modules_to_save",)), ("lora_modules_to_save",)),
            "dtype": ("bf16" if trl and base else None, ()),
        }
    )
    parameters = words_of(keys, ("lora_target_parameters",))
    if parameters:
        keys.put_option("lora_target_parameters", parameters, ("lora_target_parameters",))
    storage = ("bnb_4bit_quant_storage",)
    if keys.has(storage) and keys.named in ("fsdp1", "fsdp2"):
        keys.put_option(storage[0], keys.raw(storage), storage)
    keys.leave(storage, "how bytes are seen matters under FSDP alone")
    return True


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def words_of(keys: Recipe, path: Path) -> list[str] | None:
    """A list of names, or one text with commas between them."""
    value = keys.raw(path)
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    return None if not value else list(fields.texts(value, dotted(path)))


def targets_of(keys: Recipe, path: Path) -> object:
    found = words_of(keys, path)
    return "all-linear" if found in (["all-linear"], ["all"]) else found


def _sequence(keys: Recipe, trl: bool) -> None:
    usual = published(NAME)["lengths"]
    assert isinstance(usual, dict)
    for pair in _SUMS:
        if keys.written(pair[1]):
            parts = [keys.take((name,), size) or int(usual.get(name, 0)) for name in pair]
            keys.put("data.seq_len", sum(parts), (pair[1],))
            return
    for name in _LENGTHS:
        if keys.written(name):
            keys.move((name,), "data.seq_len", size)
            return
    if any(keys.written(name) for name in _ONLINE):
        parts = [int(usual[name]) for name in _SUMS[0]]
        words = ", ".join(f"{name}: {length}" for name, length in zip(_SUMS[0], parts, strict=True))
        keys.assume("data.seq_len", sum(parts), words)
    elif trl:
        keys.assume("data.seq_len", usual["max_length"], f"max_length: {usual['max_length']}")


def _liger(keys: Recipe, trl: bool) -> None:
    for name in _LIGER:
        if keys.flag(name):
            keys.put("stack", "liger", (name,))
            fused = keys.take(("liger_kernel_config", "fused_linear_cross_entropy"), lenient_flag)
            if fused is not False:
                keys.put("loss", "fused-linear", (name,))
    path = ("loss_type",)
    if keys.tree.leaves.get(path) == "chunked_nll":
        keys.put("loss", "chunked", path)
        keys.raw(path)
    elif trl and not keys.written("loss_type") and "loss" not in keys.job:
        keys.tell("loss_type: nll (the newest TRL takes chunked_nll, which keeps no logits)")


def _buckets(keys: Recipe) -> None:
    path = ("ddp_bucket_cap_mb",)
    if keys.has(path) and keys.named is None:
        keys.leave(path, "DDP's: give --set engine.name=ddp --set engine.options.bucket_cap_mb=N")


def _why_left() -> Callable[[Path], str]:
    known = frozenset(names(NAME))

    def why(path: Path) -> str:
        if path[0] == "fsdp_transformer_layer_cls_to_wrap":
            return "each decoder layer is a unit, as in every job"
        if path[0] in known:
            return "the Trainer or TRL reads it, and no job says it"
        near = nearest(path[0], known, _CLOSE)
        if near:
            return f"{UNKNOWN} the Trainer or TRL reads; did you mean {near}?"
        return "a script's own, which no job says"

    return why


def leaves(job: Job) -> dict[Path, object]:
    """The job in the words of TrainingArguments, SFTConfig and ModelConfig."""
    found: dict[Path, object] = {
        **model_leaf(job, "model_name_or_path"),
        ("max_length",): job.data.seq_len,
        ("per_device_train_batch_size",): job.data.micro_batch,
        **step_leaves(job),
    }
    types = element_types(job)
    if types is not None:
        loaded, mixed = types
        found[("dtype",)] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[loaded]
        found |= {("bf16",): mixed == "bf16", ("fp16",): mixed == "fp16"}
    optimizer = optimizer_name(job)
    if optimizer is not None:
        found[("optim",)] = optimizer
    if job.attention == "eager":
        found[("attn_implementation",)] = "eager"
    if job.stack == "liger":
        found[("use_liger_kernel",)] = True
        if job.loss.kind != "fused-linear":
            found["liger_kernel_config", "fused_linear_cross_entropy"] = False
    if job.loss.kind == "chunked":
        found[("loss_type",)] = "chunked_nll"
    if job.offload.activations == "cpu":
        found[("activation_offloading",)] = True
    return found | _lora_leaves(job) | engine_leaves(job)


def _lora_leaves(job: Job) -> dict[Path, object]:
    lora = job.lora
    if lora is None:
        return {}
    found = adapter_leaves(lora, rank="lora_r", dora="use_dora", saved="lora_modules_to_save")
    every = lora.targets == ("all-linear",)
    found |= {("use_peft",): True, ("lora_target_modules",): "all-linear" if every else list(lora.targets)}
    if lora.base == "int8":
        found[("load_in_8bit",)] = True
    elif lora.base != "bf16":
        found |= {("load_in_4bit",): True, ("use_bnb_nested_quant",): lora.base == "nf4-double"}
    return found


def notes(job: Job) -> tuple[str, ...]:
    return ("learning_rate, output_dir and the data set: a job has none of them",)


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return hf_text.render(found, comments)
