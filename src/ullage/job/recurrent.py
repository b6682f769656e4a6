"""The packages whose kernels transformers runs in the place of its own code for a recurrence, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.job.engine import OF_TRANSFORMERS
from ullage.job.fields import show
from ullage.job.job import Job

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models with layers of gated DeltaNet."""
RULE = "fla"
"""flash-linear-attention, for the gated delta rule."""
CONVOLUTION = "causal_conv1d"
"""causal-conv1d, for the convolution before it."""

DEFAULTS = {RULE: True, CONVOLUTION: True}
"""Taken as installed: transformers warns of its own code without them, and refuses packed sequences (integrations/hub_kernels.py,
use_kernel_func_from_hub_with_fallback). axolotl's recipes run FLA's own convolution in the place of causal-conv1d's
(monkeypatch/models/qwen3_next/modeling.py), which keeps its input alone as well."""


def defaults(job: Job) -> Iterator[str]:
    """``key = value`` of each that the job does not say."""
    if job.stack in OF_TRANSFORMERS and job.model.model_type in FAMILIES:
        for name, value in DEFAULTS.items():
            if name not in job.engine.options:
                yield f"engine.options.{name} = {show(value)} (taken as installed)"
