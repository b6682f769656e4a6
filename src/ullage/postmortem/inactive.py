"""What a job asks for and its run shows no sign of: sequences that are cut among ranks, and tensors as large as whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ullage.frozen import replace
from ullage.job.job import Layout
from ullage.memory.program import Item, round_up
from ullage.postmortem.causes import Reason
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.tensors import Made
from ullage.units import format_bytes

_WEIGHT = 2.6
_LEAST = 0.2
"""Of all that a snapshot holds: fewer blocks have such a size by chance."""
_CUT = ("activations", "input")


def uncut(layout: Layout, tensors: Iterable[Made]) -> Iterator[Made]:
    """Activations as they are where no rank cuts its sequences, whatever the job says; one of each size, as all say the same.

    Under Megatron's sequence parallelism every layer gathers whole sequences, so that their size tells nothing.
    """
    if layout.cp == 1:
        return
    for one in {one.bytes: one for one in tensors if one.category in _CUT}.values():
        yield replace(
            one,
            kind="replica-not-shard",
            what=f"{one.what} of whole sequences",
            bytes=round_up(one.bytes * layout.cp),
            low_bytes=None,
            high_bytes=None,
            note=f"{layout.cp} x what it is under the context parallelism of this job, which is then not in effect",
        )


def held_whole(layout: Layout, evidence: Evidence, live: Iterable[Item]) -> Iterator[Reason]:
    """Blocks of a snapshot that have no tensor of the account's size, and have the size of one of whole sequences."""
    if layout.cp == 1:
        return
    blocks = evidence.highest or evidence.blocks
    total = sum(block.bytes * block.count for block in blocks)
    sizes = {size for item in live if item.category in _CUT for size in item.pieces or (item.bytes,)}
    whole = {round_up(size * layout.cp) for size in sizes} - sizes
    found = sum(block.bytes * block.count for block in blocks if round_up(block.requested_bytes) in whole)
    if total and found >= _LEAST * total:
        yield Reason(
            kind="replica-not-shard",
            weight=_WEIGHT,
            why=f"{format_bytes(found)} of {format_bytes(total)} in the snapshot are in blocks {layout.cp} x as large as what this job "
            "keeps of a sequence: context parallelism is asked for and not in effect",
        )
