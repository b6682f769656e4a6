"""What is recomputed, which loss runs, what is offloaded, and the adapters: short and mapping forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from ullage.errors import Contradiction, InvalidInput
from ullage.job import fields
from ullage.job.fields import Section, hint, show
from ullage.job.job import Lora, Loss, LossKind, Offload, Place, Recompute

_RECOMPUTE_WORDS = ("none", "full", "selective")
_RECOMPUTE_KEYS = ("every", "layers", "modules", "sqrt")
_RECOMPUTE_FORMS = "none, full, selective, {every: 2}, {layers: 12}, {modules: [core_attn, mlp]} or {sqrt: true}"

LOSSES = ("full", "chunked", "fused-linear", "vocab-parallel", "vocab-parallel-fused")
_CHUNKED_LOSSES = ("chunked", "fused-linear")
DEFAULT_CHUNKS = 8

ALL_LINEAR = "all-linear"
_Base = Literal["bf16", "nf4", "nf4-double", "int8"]


def read_recompute(root: Section) -> Recompute:
    """A word, or one of the mappings. Exactly one: each says all of what is recomputed."""
    value = root.raw("recompute")
    if value is None:
        root.note("recompute", "none")
        return Recompute()
    if isinstance(value, str) and value in _RECOMPUTE_WORDS:
        return Recompute(kind=cast(Literal["none", "full", "selective"], value))
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in _RECOMPUTE_KEYS:
        word = value if isinstance(value, str) else next(iter(value), "") if isinstance(value, Mapping) else ""
        raise InvalidInput(
            "is not known",
            key="recompute",
            value=show(value),
            allowed=_RECOMPUTE_FORMS,
            remedy=hint(word, (*_RECOMPUTE_WORDS, *_RECOMPUTE_KEYS)),
        )
    section = root.inner("recompute")
    match next(iter(value)):
        case "every":
            return Recompute(kind="every", every=section.take("every", fields.integer(1), 1))
        case "layers":
            return Recompute(kind="layers", layers=section.take("layers", fields.integer(0), 0))
        case "modules":
            return Recompute(kind="modules", modules=section.take("modules", fields.texts, ()))
        case _:
            return Recompute(kind="sqrt") if section.take("sqrt", fields.flag, True) else Recompute()


def read_loss(root: Section) -> Loss:
    """``chunks`` is left None where the kernel has a rule of its own (Liger's fused linear) and nobody set it."""
    value = root.raw("loss")
    if value is None:
        root.note("loss", "full")
        return Loss()
    values = {"kind": value} if isinstance(value, str) else fields.as_mapping(value, "loss")
    section = Section(values, "loss" if not isinstance(value, str) else "", root.defaults)
    if isinstance(value, str):
        kind = fields.choice(*LOSSES)(value, "loss")
        if kind == "chunked":
            root.note("loss.chunks", DEFAULT_CHUNKS)
        return Loss(kind=cast(LossKind, kind), chunks=DEFAULT_CHUNKS if kind == "chunked" else None)
    kind = section.take("kind", fields.choice(*LOSSES), "full")
    chunks: int | None = None
    if kind == "chunked":
        chunks = section.take("chunks", fields.integer(1), DEFAULT_CHUNKS)
    elif section.written("chunks"):
        chunks = section.take("chunks", fields.optional(fields.integer(1)), None)
        if chunks is not None and kind not in _CHUNKED_LOSSES:
            raise Contradiction(
                f"a {kind} loss has no chunks",
                key="loss.chunks",
                value=chunks,
                remedy=f"leave it out, or set loss.kind to {' or '.join(_CHUNKED_LOSSES)}",
            )
    section.close()
    return Loss(kind=cast(LossKind, kind), chunks=chunks)


def read_offload(root: Section) -> Offload:
    section = root.inner("offload")
    place = fields.choice("none", "cpu", "nvme", aliases={"disk": "nvme"})
    offload = Offload(
        optimizer=cast(Place, section.take("optimizer", place, "none")),
        params=cast(Place, section.take("params", place, "none")),
        activations=cast(Place, section.take("activations", place, "none")),
    )
    section.close()
    return offload


_TARGETS: Mapping[str, tuple[str, ...]] = {"megatron": ("all-linear",)}
"""Where nobody chooses, by stack: Megatron-Bridge's four (peft/lora.py); else those of the LoRA paper (arXiv 2106.09685, section 4.2)."""


def read_lora(root: Section, options: Mapping[str, object], stack: str) -> Lora | None:
    """``lora``; options that say one of its keys under PEFT's name (lora_dtype, use_dora, modules_to_save) are read into it."""
    if root.raw("lora") is None:
        if not root.written("lora"):
            root.note("lora", None)
        return None
    section = root.inner("lora")
    dtype = fields.choice("fp32", "bf16", "fp16")
    lora = Lora(
        rank=section.take("rank", fields.integer(1), 8),
        alpha=section.take("alpha", fields.number(0.0), 16.0),
        dropout=section.take("dropout", fields.number(0.0, 1.0), 0.0),
        targets=section.take("targets", _targets, _TARGETS.get(stack, ("q_proj", "v_proj"))),
        base=cast(_Base, section.take("base", fields.choice("bf16", "nf4", "nf4-double", "int8"), "bf16")),
        dtype=_from_option(section, "dtype", fields.optional(dtype), None, options, "lora_dtype"),
        dora=_from_option(section, "dora", fields.flag, False, options, "use_dora"),
        modules_to_save=_from_option(section, "modules_to_save", fields.texts, (), options, "modules_to_save"),
    )
    section.close()
    return lora


def _targets(value: object, key: str) -> tuple[str, ...]:
    if value == ALL_LINEAR or value == [ALL_LINEAR]:
        return (ALL_LINEAR,)
    if isinstance(value, str) or not value:
        raise InvalidInput(
            "is no list of modules", key=key, value=show(value), allowed=f"[q_proj, v_proj] or {ALL_LINEAR}"
        )
    return fields.texts(value, key)


def _from_option(
    section: Section,
    name: str,
    read: fields.Read[fields.T],
    default: fields.T,
    options: Mapping[str, object],
    option: str,
) -> fields.T:
    if option not in options:
        return section.take(name, read, default)
    said = options[option]
    meant = read(list(said) if isinstance(said, tuple) else said, section.key(name))
    if section.written(name) and section.take(name, read, default) != meant:
        raise Contradiction(
            f"contradicts engine.options.{option} = {show(said)}",
            key=section.key(name),
            value=show(section.values[name]),
            remedy="keep one of the two",
        )
    section.raw(name)
    return meant
