"""``optimizer``: the short names, the mapping form, and which implementation an engine or a stack takes by itself."""

from __future__ import annotations

import re
from typing import Literal, TypeVar, cast

from ullage.errors import Contradiction, InvalidInput
from ullage.job import fields
from ullage.job.engine import OF_TRANSFORMERS
from ullage.job.fields import Section, hint
from ullage.job.job import Optimizer, Precision

NAMES = ("adamw", "adam", "sgd", "adafactor", "lion", "muon")
_PREFIX = "paged-"
_SUFFIXES = {"-8bit": "8bit", "-bf16": "bf16", "-fp32": "fp32"}
SPELLINGS = (*NAMES, *(f"{name}{suffix}" for name in NAMES for suffix in _SUFFIXES), "paged-adamw-8bit", "paged-adamw")

T = TypeVar("T")
Impl = Literal["fused", "foreach", "for-loop"]

_read_state = fields.choice("fp32", "bf16", "8bit")
_read_impl = cast(
    "fields.Read[Impl]",
    fields.choice("fused", "foreach", "for-loop", aliases={"forloop": "for-loop", "for_loop": "for-loop"}),
)

# torchtitan made fused its default on this day (its optimizer configuration, "fused" -> implementation).
_TITAN_FUSED_SINCE = "2025-02-24"
# Trainer's adamw_torch became adamw_torch_fused in this version.
_TRAINER_FUSED_SINCE = (4, 57)


def default_impl(engine: str, stack: str, stack_version: str | None) -> Impl:
    """What runs where nobody chose: Megatron's and DeepSpeed's own FusedAdam, else what the stack's trainer builds."""
    if engine in ("megatron", "deepspeed"):
        return "fused"
    if stack == "torchtitan":
        dated = stack_version is not None and re.fullmatch(r"\d{4}-\d{2}-\d{2}", stack_version)
        return "foreach" if dated and str(stack_version) < _TITAN_FUSED_SINCE else "fused"
    if stack in OF_TRANSFORMERS:
        version = re.match(r"(\d+)\.(\d+)", stack_version or "")
        old = version is not None and (int(version[1]), int(version[2])) < _TRAINER_FUSED_SINCE
        return "foreach" if old else "fused"
    if stack == "megatron":
        return "fused"  # its layers come with its FusedAdam
    return "foreach"  # torch's own choice on CUDA when neither flag is given


def read_optimizer(root: Section, precision: Precision, engine: str, stack: str, version: str | None) -> Optimizer:
    """``optimizer`` in either form; a name such as paged-adamw-8bit says state and paging too."""
    value = root.raw("optimizer")
    if value is None:
        root.note("optimizer", "adamw")
        value = "adamw"
    values = {"name": value} if isinstance(value, str) else fields.as_mapping(value, "optimizer")
    section = Section(values, "optimizer", root.defaults)
    key = "optimizer" if isinstance(value, str) else "optimizer.name"
    name, state, paged = _split(section.take("name", fields.text, "adamw"), key)
    eight_bit = (state or values.get("state")) == "8bit"
    impl: Impl = "fused" if eight_bit else default_impl(engine, stack, version)  # 8-bit kernels are fused per tensor
    pure_half = precision.master is None and precision.params != "fp32"
    # fp16 moments would underflow: they stay fp32
    own_state = "bf16" if pure_half and precision.params == "bf16" else "fp32"
    optimizer = Optimizer(
        name=name,
        impl=section.take("impl", _read_impl, impl),
        state=_said_once(section, "state", state) or section.take("state", _read_state, own_state),
        paged=bool(_said_once(section, "paged", paged) or section.take("paged", fields.flag, False)),
    )
    section.close()
    return optimizer


def _split(written: str, key: str) -> tuple[str, str | None, bool | None]:
    """paged-adamw-8bit -> adamw, 8bit, True."""
    name, paged = (written.removeprefix(_PREFIX), True) if written.startswith(_PREFIX) else (written, None)
    state = None
    for suffix, dtype in _SUFFIXES.items():
        if name.endswith(suffix):
            name, state = name.removesuffix(suffix), dtype
    if name not in NAMES:
        raise InvalidInput(
            "is no optimizer that is known",
            key=key,
            value=written,
            allowed=", ".join(NAMES) + ", each also with -8bit or -bf16 behind it and paged- before it",
            remedy=hint(written, SPELLINGS),
        )
    return name, state, paged


def _said_once(section: Section, name: str, said: T | None) -> T | None:
    """What the optimizer's name said of ``name``; Contradiction if the mapping says otherwise."""
    if said is None:
        return None
    written = section.raw(name)
    if section.written(name) and written != said:
        raise Contradiction(
            f"contradicts optimizer.name = {section.values['name']}",
            key=section.key(name),
            value=fields.show(written),
            remedy=f"leave {name} out, or write the plain name",
        )
    return said
