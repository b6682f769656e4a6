"""What encoders, and models that read images, cannot be run with."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.errors import UllageError
from ullage.job.architecture import Architecture
from ullage.job.checks import Violation, contradiction, infeasible, warning
from ullage.job.job import Job
from ullage.model.hf_config import decoder_spec
from ullage.model.spec import DecoderSpec

_STACK = "transformers"


def _spec(job: Job) -> DecoderSpec | None:
    """Of an encoder; None of any other model."""
    try:
        spec = decoder_spec(job.model)
    except UllageError:  # refused where it is read, in its own words
        return None
    return spec if spec.task is not None else None


def _encoder(job: Job, arch: Architecture) -> Iterator[Violation]:
    spec = _spec(job)
    if spec is None or job.stack == "traced":
        return
    what = f"has no code for model_type {spec.family}"
    if job.stack != _STACK:
        yield contradiction("stack", job.stack, what, f"use stack {_STACK}, under another engine than megatron")
    for axis in ("tp", "cp", "pp"):
        degree = getattr(job.layout, axis)
        if degree > 1:
            what = f"transformers has no plan for {spec.family} to be cut so"
            yield infeasible(f"layout.{axis}", degree, what, "use dp, with ZeRO or FSDP where it must be smaller")
    if job.loss.kind != "full":
        yield contradiction("loss", job.loss.kind, f"is no loss of {spec.family}'s classes", "use full")
    if job.recompute.kind == "modules" and spec.patches is None:
        names = ", ".join(job.recompute.modules)
        yield contradiction("recompute", names, f"{spec.family}'s layers are run again whole", "use full")
    named = job.model.keys.get("architectures")
    if isinstance(named, tuple) and named and str(named[0]).endswith("Model"):
        taken = "hidden tokens are taken to be told" if spec.patches is None else "images are taken to be classified"
        what = f"names no head: {taken}"
        yield warning("model.architectures", named[0], what, "name the class that is trained")
    if job.lora is not None:
        what = "is not modelled beside an encoder's head, which PEFT trains in full"
        yield contradiction("lora", "set", what, "leave it out: all of the model is trained then")


def _images(job: Job, arch: Architecture) -> Iterator[Violation]:
    spec = _spec(job)
    if spec is None or spec.patches is None:
        return
    (height, width), patch, tokens = spec.patches.image, spec.patches.patch, spec.patches.tokens
    if job.data.seq_len != tokens:
        what = (
            f"model.image_size {height} x {width} in patches of {patch[0]} x {patch[1]} (model.patch_size) is "
            f"{spec.patches.count} tokens and one for the whole, {tokens}"
        )
        yield contradiction("data.seq_len", job.data.seq_len, what, f"use {tokens}, or leave it out")
    if job.data.seq_len_mean is not None:
        what = "images are all of one size"
        yield contradiction("data.seq_len_mean", job.data.seq_len_mean, what, "leave it out")
    if job.data.padding_mask:
        yield contradiction("data.padding_mask", True, "images have no padding", "leave it out")


CHECKS = (_encoder, _images)
