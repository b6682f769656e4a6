"""What is built of a job's ``recompute``, by name. No torch here: a command asks before it loads any."""

from __future__ import annotations

from ullage.job.job import Recompute

RECOMPUTE = ("none", "full", "selective", "every", "layers", "sqrt", "modules")
MODULES = ("mlp",)
"""Parts of a layer that {modules: ...} may name: those that are one module in transformers' classes."""


def not_built(how: Recompute) -> str | None:
    """The kind or the module that is not carried out; None: all of it is."""
    if how.kind not in RECOMPUTE:
        return how.kind
    return next((f"modules: {name}" for name in how.modules if name not in MODULES), None)
