"""What a cause is: its kind, how sure it is, and what speaks for it."""

from __future__ import annotations

from typing import Literal

from ullage.frozen import frozen

Kind = Literal[
    "states", "replica-not-shard", "logits", "attention-scores", "padding-mask", "activations", "outlier-length",
    "unsynced-accumulation", "optimizer-first-step", "optimizer-step", "clipping", "load", "save", "evaluation", "pipeline-end",
    "expert-imbalance", "fragmentation", "communicators", "foreign-process", "leak", "host-memory", "config",
    "unknown",
]  # fmt: skip
Certainty = Literal["certain", "likely", "possible"]


@frozen
class Tensor:
    """A tensor whose allocation is what failed. shape: empty where the account knows only its size; moment: when it is made."""

    what: str
    shape: tuple[int, ...]
    bytes: int
    moment: str


@frozen
class Cause:
    kind: Kind
    certainty: Certainty
    why: str
    tensor: Tensor | None = None


@frozen
class Reason:
    """One thing that speaks for a kind of cause. weight: 1 speaks for it, 2 makes it likely by itself, 5 leaves no doubt."""

    kind: Kind
    weight: float
    why: str
    tensor: Tensor | None = None


LIKELY = 2.0
CERTAIN = 5.0


def judged(reasons: list[Reason], *, most: int = 6) -> tuple[Cause, ...]:
    """Causes in the order of what speaks for them, each with its reasons; ``unknown`` where nothing does.

    A second weak reason adds to a first; only a reason that leaves no doubt by itself makes a cause certain.
    """
    kinds: dict[Kind, list[Reason]] = {}
    for reason in reasons:
        kinds.setdefault(reason.kind, []).append(reason)
    ranked = sorted(kinds.items(), key=lambda entry: -_weight(entry[1]))
    return tuple(_cause(kind, found) for kind, found in ranked[:most])


def _weight(reasons: list[Reason]) -> float:
    """The weightiest counts whole, each other one half."""
    weights = sorted((reason.weight for reason in reasons), reverse=True)
    return weights[0] + sum(weights[1:]) / 2


def _cause(kind: Kind, reasons: list[Reason]) -> Cause:
    reasons = sorted(reasons, key=lambda reason: -reason.weight)
    certainty: Certainty = "likely" if _weight(reasons) >= LIKELY else "possible"
    if reasons[0].weight >= CERTAIN:
        certainty = "certain"
    tensor = next((reason.tensor for reason in reasons if reason.tensor is not None), None)
    why = "; ".join(dict.fromkeys(reason.why for reason in reasons))
    return Cause(kind=kind, certainty=certainty, why=why, tensor=tensor)
