"""What a snapshot's blocks say by themselves: what the card is filled with, told from the call stacks that made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ullage.postmortem.causes import Kind, Reason
from ullage.postmortem.evidence import Block, Evidence
from ullage.postmortem.snapshot_frames import Frame
from ullage.postmortem.tracebacks import Called, phases
from ullage.units import format_bytes

_LEAST = 0.1
"""Of all that is held: less fills no card."""
_WEIGHT = 2.4
"""Five sixths of what is held make a cause likely by themselves."""
_OF_CATEGORY: dict[str, Kind] = {
    "parameters": "states",
    "buffers": "states",
    "gradients": "states",
    "optimizer": "states",
    "gathered": "states",
    "activations": "activations",
    "input": "activations",
    "communication": "communicators",
}
_OF_PHASE: dict[str, Kind] = {
    "loss": "logits",
    "attention": "attention-scores",
    "clipping": "clipping",
    "optimizer": "optimizer-step",
    "save": "save",
    "evaluation": "evaluation",
}


def filled(evidence: Evidence) -> Iterator[Reason]:
    """A reason for each kind that holds more than a little."""
    blocks = evidence.highest or evidence.blocks
    total = sum(block.bytes * block.count for block in blocks)
    sizes: Counter[Kind] = Counter()
    largest: dict[Kind, Block] = {}
    for block in blocks:
        kind = _kind(block)
        if kind is not None:
            sizes[kind] += block.bytes * block.count
            largest.setdefault(kind, block)
    when = "at the highest point of its history" if evidence.highest else "in the snapshot"
    for kind, size in sizes.items():
        if size >= _LEAST * total:
            most = largest[kind]
            where = f", the largest {most.category} of {most.where}" if most.where else ""
            yield Reason(
                kind=kind,
                weight=_WEIGHT * size / total,
                why=f"{format_bytes(size)} of {format_bytes(total)} held {when} ({size / total:.0%}){where}",
            )


def _kind(block: Block) -> Kind | None:
    """By the function that made it where that says more than the category; None where neither says anything."""
    usual = _OF_CATEGORY.get(block.category)
    if usual == "states":
        return usual
    if "logits" in block.where:
        return "logits"
    file, _, function = block.where.partition(" ")
    called = Called(Frame(file.partition(":")[0], function), "")
    spoken = next((_OF_PHASE[phase] for phase in phases((called,), "") if phase in _OF_PHASE), None)
    return spoken or usual
