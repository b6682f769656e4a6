"""Recipes of trainers that are recognised and not read: what they are, so that none is taken for another's file."""

from __future__ import annotations

import re
from typing import NamedTuple


class Foreign(NamedTuple):
    """title: whose file it is. marks: a key at the start of a line, or an argument, that no file that is read has."""

    title: str
    marks: re.Pattern[str]


def _foreign(title: str, keys: str, *, anywhere: bool = False) -> Foreign:
    """anywhere: in sections too, not at the top alone."""
    start = r"^\s*[\"'{-]*\s*" if anywhere else r"^\s{0,2}[\"']?"
    return Foreign(title, re.compile(rf"{start}(?:{keys})[\"']?\s*:|--(?:{keys})(?=[ =])", re.MULTILINE))


_KNOWN = (
    _foreign("a torchtune recipe", "_component_", anywhere=True),
    _foreign("a recipe of hydra's, as NeMo's are", "_target_", anywhere=True),
    _foreign("a recipe of Lightning's", "class_path", anywhere=True),
    _foreign("a configuration of verl or EasyR1", "actor_rollout_ref|worker"),
    _foreign("an axolotl recipe", "base_model|sample_packing|lora_target_linear|pad_to_sequence_len"),
    _foreign("a LLaMA-Factory recipe", "finetuning_type|cutoff_len|quantization_bit|template"),
    _foreign("a file of ms-swift's arguments", "train_type|tuner_type|rlhf_type|sft_type"),
    _foreign("a file of OpenRLHF's arguments", "micro_train_batch_size|micro_rollout_batch_size|zpg"),
    _foreign(
        "a file of arguments of transformers' Trainer, as TRL's are",
        "per_device_train_batch_size|gradient_accumulation_steps|num_train_epochs|load_in_[48]bit|per_gpu_train_batch_size",
    ),
    _foreign("a model's config.json", "architectures|model_type"),
)
_DEEPSPEED = re.compile(r"\"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)\"\s*:")
"""Its JSON says gradient_accumulation_steps too."""
_ENGINE_SECTIONS = re.compile(r"^(deepspeed_config|distributed_type|compute_environment)\s*:", re.MULTILINE)
"""An Accelerate file has one of these at the top, and in its sections keys of the engines."""


def foreign(text: str) -> str | None:
    """Whose file it is, in words; None where it may be one that is read."""
    if _DEEPSPEED.search(text) or _ENGINE_SECTIONS.search(text):
        return None
    return next((one.title for one in _KNOWN if one.marks.search(text)), None)


def remedy(title: str) -> str:
    if "config.json" in title:
        return "give it as the model: --model FILE, with --cluster and what else the job says"
    return "give the file of its engine (DeepSpeed's JSON, Accelerate's YAML) and the rest by options, or write the job: docs/job.md"
