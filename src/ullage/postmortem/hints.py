"""Lines that tell of no failure and say why there was one: what libraries print where they do something else than they were asked to."""

from __future__ import annotations

from typing import NamedTuple

from ullage.postmortem.causes import Kind, Reason


class Hint(NamedTuple):
    """marker: a lower-case text that no other line has."""

    kind: Kind
    weight: float
    marker: bytes
    why: str


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
    Hint("foreign-process", 1.5, b"gpu_memory_utilization", "an inference engine with a share of a card is in this log"),
    Hint("foreign-process", 2.2, b"cumem_allocator.cpp",
         "the allocator of vLLM's sleep mode found no room: an engine was taking back what a training had of its share of the card"),
    Hint("foreign-process", 1.5, b"maximum concurrency for", "an inference engine, which told of its cache's size, is in this log"),
)  # fmt: skip


def seen(lower: bytes, start: int, stop: int, known: set[Hint]) -> None:
    """Adds to ``known`` what a part of a log shows; lower: the log in lower case."""
    for hint in HINTS:
        if hint not in known and lower.find(hint.marker, start, stop + len(hint.marker)) >= 0:
            known.add(hint)


def hinted(found: tuple[Hint, ...]) -> list[Reason]:
    return [Reason(kind=one.kind, weight=one.weight, why=one.why) for one in found]
