"""Recipes of trainers, recognised by a key: what they are, so that none is taken for another's file. Some are read, most are not."""

from __future__ import annotations

import re
from typing import NamedTuple


class Foreign(NamedTuple):
    """title: whose file it is. marks: a key at the start of a line, or an argument, that no file above it has. reader: the format."""

    title: str
    marks: re.Pattern[str]
    reader: str | None = None


def _foreign(title: str, keys: str, *, anywhere: bool = False, reader: str | None = None) -> Foreign:
    """anywhere: in sections too, not at the top alone."""
    start = r"^\s*[\"'{-]*\s*" if anywhere else r"^(?:\s{0,2}|\s{4}(?=\"))[\"']?"
    return Foreign(title, re.compile(rf"{start}(?:{keys})[\"']?\s*:|--(?:{keys})(?=[ =])", re.MULTILINE), reader)


_KNOWN = (
    _foreign("a torchtune recipe", "_component_", anywhere=True),
    _foreign("a recipe of hydra's, as NeMo's are", "_target_", anywhere=True),
    _foreign("a recipe of Lightning's", "class_path", anywhere=True),
    _foreign("a configuration of verl or EasyR1", "actor_rollout_ref|worker"),
    _foreign("an axolotl recipe", "base_model|sample_packing|lora_target_linear|pad_to_sequence_len", reader="axolotl"),
    _foreign("a file of ms-swift's arguments", "train_type|tuner_type|rlhf_type|sft_type"),
    _foreign("a configuration of LLaMA-Factory's v1 trainer", "dist_config|kernel_config|sample_backend"),
    _foreign("a LLaMA-Factory recipe", "finetuning_type|cutoff_len|quantization_bit|template", reader="llamafactory"),
    _foreign("a file of OpenRLHF's arguments", "micro_train_batch_size|micro_rollout_batch_size|zpg"),
    _foreign(
        "a file of arguments of transformers' Trainer, as TRL's are",
        "per_device_train_batch_size|gradient_accumulation_steps|num_train_epochs|load_in_[48]bit|per_gpu_train_batch_size"
        "|model_name_or_path|per_device_eval_batch_size",
        reader="training-arguments",
    ),
    _foreign("a model's config.json", "architectures|model_type"),
)
_DEEPSPEED = re.compile(r"\"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)\"\s*:")
"""Its JSON says gradient_accumulation_steps too."""
_ENGINE_SECTIONS = re.compile(r"^(deepspeed_config|distributed_type|compute_environment)\s*:", re.MULTILINE)
"""An Accelerate file has one of these at the top, and in its sections keys of the engines."""


_YAML_KEY = re.compile(r"^\s{0,4}[\"']?[A-Za-z_]\w*[\"']?\s*:(\s|$)", re.MULTILINE)
"""A key of YAML or JSON: what has none is a command."""


def foreign(text: str) -> Foreign | None:
    """Whose file it is; None where it may be an engine's or a launcher's."""
    if _DEEPSPEED.search(text) or _ENGINE_SECTIONS.search(text):
        return None
    return next((one for one in _KNOWN if one.marks.search(text)), None)


def reader_of(text: str) -> str | None:
    """The format that reads a trainer's file, or the command that starts it; axolotl's are files alone."""
    found = foreign(text)
    return None if found is None or (found.reader == "axolotl" and _YAML_KEY.search(text) is None) else found.reader


def remedy(title: str) -> str:
    if "config.json" in title:
        return "give it as the model: --model FILE, with --cluster and what else the job says"
    if any(title == one.title and one.reader for one in _KNOWN):
        return "give the YAML file itself, or write the job: docs/job.md"
    return "give the file of its engine (DeepSpeed's JSON, Accelerate's YAML) and the rest by options, or write the job: docs/job.md"
