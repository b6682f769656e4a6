"""Arguments of Hugging Face's parsers as people keep them: YAML or JSON, or the command that starts a run; edited in place.

A leaf's path is the argument's name: ("bf16",), of ``--bf16 True`` too. HfArgumentParser takes a dash for each underscore.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ullage.formats import shell_text, yaml_text
from ullage.formats.tree import Leaves, Path, Tree
from ullage.frozen import replace

_KEY = re.compile(r"^\s{0,4}[\"']?[A-Za-z_]\w*[\"']?\s*:(\s|$)|^\s*\{", re.MULTILINE)
_KINDS: Mapping[str, str] = {
    f"--{name}": kind
    for kind, names in (
        (
            "words",
            "lora_target_modules lora_modules_to_save lora_target_parameters loss_type report_to label_names include_for_metrics",
        ),
        ("value", "model_name_or_path deepspeed fsdp fsdp_config output_dir"),
        ("maybe", "bf16 fp16 per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing"),
    )
    for name in names.split()
}
"""How many values follow; of an argument that is not here one may."""


def is_command(text: str) -> bool:
    return _KEY.search(text) is None


def parse(text: str, place: str) -> Tree:
    if not is_command(text):
        return yaml_text.parse(text, place)
    tree = shell_text.parse(text, place, _KINDS)
    named = {(_name(path[0]),): value for path, value in tree.leaves.items()}
    return replace(tree, leaves=named, lines={(_name(path[0]),): line for path, line in tree.lines.items()})


def render(leaves: Leaves, comments: tuple[str, ...] = ()) -> str:
    return yaml_text.render(leaves, comments)


def put(text: str, path: Path, value: object) -> str:
    """A section has no place in a command, which is then left as it is."""
    if not is_command(text):
        return yaml_text.put(text, path, value)
    return text if len(path) > 1 else shell_text.put(text, _flag(text, path[0]), value, _KINDS)


def drop(text: str, path: Path) -> str:
    if not is_command(text):
        return yaml_text.drop(text, path)
    return shell_text.drop(text, _flag(text, path[0]), _KINDS)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _flag(text: str, name: str) -> Path:
    """The argument as the text writes it."""
    dashed = f"--{name.replace('_', '-')}"
    return (dashed if re.search(rf"{dashed}(?=[ =\n])", text) else f"--{name}",)
