"""Which tensors of a job have the size of the request that failed, and how likely each is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ullage.frozen import frozen
from ullage.memory.allocator_blocks import segment_bytes
from ullage.postmortem.causes import Kind
from ullage.postmortem.messages import Numbers
from ullage.postmortem.tensors import Made
from ullage.postmortem.tracebacks import Phase
from ullage.units import MIB

SAYS_NOTHING = 20 * MIB
"""What is asked of the driver for any tensor of 1 to 10 MiB (kLargeBuffer), and 2 MiB for any smaller one (kSmallBuffer): a
request of that size speaks for no tensor."""
_ELSEWHERE = 0.2
"""How much less likely a tensor is that the modelled step does not make."""
_SPREAD = 0.15
"""Predicted and measured allocations agree to some percent (docs/accuracy.md), and a micro-batch may be a short one."""
_FLOOR = 0.02
_NAMED = 5.0
_SPOKEN: dict[str, tuple[Kind, ...]] = {
    "loss": ("logits",),
    "attention": ("attention-scores", "padding-mask"),
    "mask": ("padding-mask",),
    "optimizer": ("optimizer-step",),
    "optimizer-first-step": ("optimizer-first-step", "states"),
    "clipping": ("clipping",),
    "load": ("load", "replica-not-shard"),
    "engine-init": ("states", "replica-not-shard"),
    "gather": ("states",),
}


@frozen
class Candidate:
    """likelihood: among the candidates, which add up to 1."""

    made: Made
    likelihood: float


def candidates(
    tensors: Iterable[Made], numbers: Numbers, phases: tuple[Phase, ...], *, most: int = 8
) -> tuple[Candidate, ...]:
    """Tensors whose request has the size that failed, within what print rounded, the likeliest first.

    The allocator asks the driver for 2 MiB for a small tensor, 20 MiB for a middle one, else for the next multiple of 2 MiB.
    Equal tensors of one kind at one moment are one candidate.
    """
    tried = numbers.tried_bytes
    if tried is None or tried <= SAYS_NOTHING:
        return ()
    found: dict[tuple[str, int, str], Made] = {}
    for one in tensors:
        if has_size(one.bytes, numbers):
            found.setdefault((one.what, one.bytes, one.moment), one)
    within = {one.bytes for one in found.values() if one.in_step}
    weights = {
        key: _weight(one, numbers, phases)
        for key, one in found.items()
        if one.in_step or one.bytes not in within or _speaks(one, phases)
    }
    total = sum(weights.values())
    ranked = sorted(weights, key=lambda key: -weights[key])
    return tuple(Candidate(made=found[key], likelihood=weights[key] / total) for key in ranked[:most])


def has_size(size: int, numbers: Numbers) -> bool:
    """Whether a tensor of this size is what was tried, within what print rounded."""
    assert numbers.tried_bytes is not None
    return abs(segment_bytes(size) - numbers.tried_bytes) <= numbers.tried_within_bytes


def _weight(one: Made, numbers: Numbers, phases: tuple[Phase, ...]) -> float:
    weight = _agreement(one, numbers) if one.in_step else _ELSEWHERE
    return weight * _NAMED if _speaks(one, phases) else weight


def _speaks(one: Made, phases: tuple[Phase, ...]) -> bool:
    return any(one.kind in _SPOKEN.get(phase, ()) for phase in phases)


def _agreement(one: Made, numbers: Numbers) -> float:
    """How well what is live before the tensor is made agrees with what was allocated, 1 to a small floor."""
    allocated = numbers.allocated_bytes
    if allocated is None or one.low_bytes is None or one.high_bytes is None:
        return 0.5
    nearest = min(max(allocated, one.low_bytes), one.high_bytes)
    off = (nearest - allocated) / max(allocated, 1) / _SPREAD
    return max(_FLOOR, math.exp(-off * off))
