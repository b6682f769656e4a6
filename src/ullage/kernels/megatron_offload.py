"""--fine-grained-activation-offloading: what chosen modules save goes to the host and comes back one layer ahead of its use.

Source: megatron/core/pipeline_parallel/fine_grained_activation_offload.py (min_offloaded_tensor_size, the offload margin).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.kernels.step import Buffer, Context, Step
from ullage.units import MIB

MODULES = {
    "attn_norm": ("input_norm",),
    "mlp_norm": ("post_attention_norm",),
    "qkv_linear": ("qkv", "q_proj", "q_a_proj", "kv_a_proj", "q_b_proj", "kv_b_proj"),
    "attn_proj": ("o_proj",),
    "expert_fc1": ("expert_gate_up", "experts.up_proj"),
}
"""--offload-modules by the names of the steps here; core_attn and moe_act are modules of their own."""

LEAST_BYTES = 2 * MIB
"""min_offloaded_tensor_size: 1024 x 1024 elements, in bf16."""


def offloaded(steps: tuple[Step, ...], context: Context) -> tuple[Step, ...]:
    """The steps, with what they send to the host named."""
    modules = context.option("offload_modules")
    if not isinstance(modules, tuple):
        return steps
    names = {step for module in modules for step in MODULES.get(str(module), ())}
    sizes = _sizes(steps)
    return tuple(
        replace(step, offloads=tuple(name for name in step.saves if sizes.get(name, LEAST_BYTES) >= LEAST_BYTES))
        if step.name in names or step.module in modules
        else step
        for step in steps
    )


def one_layer_bytes(steps: tuple[Step, ...]) -> int:
    """What a layer sends to the host: as much is back on the device ahead of each layer's backward."""
    return sum(sent(steps))


def sent(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Bytes of each tensor that a layer sends to the host."""
    sizes = _sizes(steps)
    return tuple(sizes.get(name, 0) for name in dict.fromkeys(name for step in steps for name in step.offloads))


def _sizes(steps: tuple[Step, ...]) -> dict[str, int]:
    """Bytes of every tensor that a step makes; of a view, its own."""
    sizes = {buffer.name: buffer.bytes for step in steps for buffer in step.writes}
    for step in steps:
        for view, tensor in step.aliases:
            sizes[view.name if isinstance(view, Buffer) else view] = (
                view.bytes if isinstance(view, Buffer) else sizes[tensor]
            )
    return sizes
