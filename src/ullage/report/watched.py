"""What a watched loop held, in a few lines."""

from __future__ import annotations

from ullage.report import words
from ullage.train.watched import Watched
from ullage.units import format_bytes


def watched_text(found: Watched) -> str:
    """``allocated 22.91 GiB, predicted 23.06 GiB (+0.7 %): backward of head``; a line each for reserved and device where they are known."""
    lines = [f"ullage: rank {found.rank} on {found.device}, {words.plural(found.steps, 'step')}"]
    if found.actual is None:
        lines.append("nothing was measured: no GPU, and no model was given whose storages could be followed")
    for name in ("allocated", "reserved", "device"):
        actual, predicted = (getattr(side, f"{name}_bytes", None) for side in (found.actual, found.predicted))
        told = [] if actual is None else [format_bytes(actual)]
        if predicted is not None:
            off = f" ({words.error(predicted / actual - 1)})" if actual else ""
            told.append(f"predicted {format_bytes(predicted)}{off}")
        if told:
            at = f": {found.moment}" if name == "allocated" and predicted is not None else ""
            lines.append(f"{name} {', '.join(told)}{at}")
    if found.unmodelled is not None:
        lines.append(f"no prediction: {found.unmodelled}")
    return "\n  ".join([*lines, *found.notes])
