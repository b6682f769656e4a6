"""Lines that tell of no failure and say why there was one: what libraries print where they do something else than they were asked to."""

from __future__ import annotations

import re
from typing import NamedTuple

from ullage.postmortem.causes import Kind, Reason


class Hint(NamedTuple):
    """marker: a lower-case text that no other line has. beside: others, of which one must be there too. share: of a card, where it is
    told that another process was given it."""

    kind: Kind
    weight: float
    marker: bytes
    why: str
    beside: tuple[bytes, ...] = ()
    share: float = 0.0


_ENGINES_SHARE = b"gpu_memory_utilization"
"""vLLM's and SGLang's trainers' name; the engine takes so much of a card as it starts, whatever it will need (vllm/config/cache.py)."""
_SHARE = re.compile(rb"gpu_memory_utilization\W{1,4}(0?\.\d{1,4}|1\.0)")
_HALF = 0.5
_HALF_WEIGHT = 2.2
"""As of what was neither free nor torch's, where no number tells."""

HINTS = (
    Hint("config", 1.5, b"upcasted low precision parameters in",
         "accelerate made fp32 of 16-bit parameters that FSDP shards under mixed precision: states take twice as much and more"),
    Hint("logits", 1.5, b"no liger kernels supported for model type",
         "Liger's kernels were asked for and are not there for this model: its loss is the library's own, with whole logits"),
    Hint("activations", 1.5, b"disabling sequence parallelism because",
         "Megatron put sequence parallelism out of work: without tensor parallelism each rank has whole sequences"),
    Hint("attention-scores", 1.5, b"falling back to the manual attention", "transformers fell back to attention that makes its scores"),
    Hint("attention-scores", 1.5, b"falling back to eager attention", "attention fell back to the eager one, which makes its scores"),
    Hint("fragmentation", 1.0, b"pytorch allocator cache flushes since last step",
         "the allocator had to give back its cache in steps before: what was free lay in pieces, or the card was all but full"),
    Hint("config", 1.0, b"distributed_type: fsdp",
         "accelerate keeps in fp32 what FSDP trains under mixed precision (0.30 and later): states of a model loaded in 16 bits take twice "
         "as much", (b"mixed_precision: bf16", b"mixed_precision: fp16")),
    Hint("foreign-process", 1.5, _ENGINES_SHARE, "an inference engine with a share of a card is in this log"),
    Hint("foreign-process", 2.2, b"cumem_allocator.cpp",
         "the allocator of vLLM's sleep mode found no room: an engine was taking back what a training had of its share of the card"),
    Hint("foreign-process", 1.5, b"maximum concurrency for", "an inference engine, which told of its cache's size, is in this log"),
)  # fmt: skip


def seen(lower: bytes, start: int, stop: int, known: set[Hint]) -> None:
    """Adds to ``known`` what a part of a log shows; lower: the log in lower case."""
    markers = {hint.marker for hint in known}
    for hint in HINTS:
        if hint.marker in markers:
            continue
        at = lower.find(hint.marker, start, stop + len(hint.marker))
        if at >= 0 and (not hint.beside or any(one in lower for one in hint.beside)):
            known.add(_with_share(hint, lower, at) if hint.marker == _ENGINES_SHARE else hint)


def _with_share(hint: Hint, lower: bytes, at: int) -> Hint:
    told = _SHARE.match(lower, at)
    if told is None:
        return hint
    share = float(told[1])
    return hint._replace(share=share, why=f"an inference engine with {share:.0%} of a card is in this log")


def hinted(found: tuple[Hint, ...], *, seen_by_numbers: bool) -> list[Reason]:
    """seen_by_numbers: whether the message tells what of the card others held, which then says more than a setting."""
    return [
        Reason(kind=one.kind, weight=one.weight if seen_by_numbers or one.share < _HALF else _HALF_WEIGHT, why=one.why)
        for one in found
    ]
