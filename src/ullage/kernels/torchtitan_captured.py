"""What torchtitan's graph_trainer keeps of a layer between its forward and its backward, both in one graph.

Source: experiments/graph_trainer/memory_policy.py (which ops are saved), selective_activation_remat.py (the others are run again in front
of the first backward op that reads them). A graph lets go of a tensor after its last reader, so that of what may be saved only
what a backward needs stays.
"""

from __future__ import annotations

from ullage.kernels.step import Context, Segment, Step
from ullage.kernels.torchtitan_version import saves_attention

SAVED = ("matmul", "attention", "all_to_all", "topk")
"""Ops whose results the default policy saves: distributed/activation_checkpoint.py, _get_save_ops, beside sequence parallelism's
reduce-scatters. Grouped matmuls are not among torch's compute-intensive ones (_functorch/partitioners.py, get_default_op_list)."""

CAPTURES = ("graph_trainer", "simple_fsdp")
"""Options under which a graph is captured."""

POLICIES = {"full": "full", "default": "selective", "eager": "selective"}
"""--compile.memory_policy, and the job's word for each. eager: every second matmul is run again, counted anew in each layer."""


def is_captured(context: Context) -> bool:
    return any(map(context.option, CAPTURES))


def policy(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    """One segment, the layer; its output is saved as what another layer reads."""
    may_stay = _may_stay(steps, context)
    return (Segment(start=0, stop=len(steps), keep=_needed(steps, may_stay), early_stop=True),)


def _may_stay(steps: tuple[Step, ...], context: Context) -> frozenset[str]:
    """What the policy marks. The full one marks ops that could be random alone, as scaled_dot_product_attention could (dropout)."""
    named = context.option("memory_policy", "default")
    if named == "full":
        saved = [step for step in steps if step.op == "attention" and not _is_flex(context)]
    else:
        matmuls = [step for step in steps if step.op == "matmul"]
        again = matmuls[1::2] if named == "eager" else []
        scattered = [step for step in steps if context.sp and step.name.endswith(".reduce")]
        saved = [step for step in steps if step.op in SAVED and step not in again] + scattered
        if not saves_attention(context):
            saved = [step for step in saved if step.op != "attention"]
    return frozenset(buffer.name for step in saved for buffer in step.writes)


def _is_flex(context: Context) -> bool:
    """Flex attention is an op of higher order, which is not marked. DeepSeek's models run it (models/deepseek_v3/config_registry.py)."""
    return context.option("attention_backend", "flex" if "nope_dim" in context.sizes else None) == "flex"


def _needed(steps: tuple[Step, ...], may_stay: frozenset[str]) -> frozenset[str]:
    """Of what may stay, what a backward reads, or what it takes to make that again."""
    needed: set[str] = set()
    for step in reversed(steps):
        needed |= {*step.saves}
        if any(name in needed and name not in may_stay for name in step.made):
            needed |= {*step.reads}
    return may_stay & needed
