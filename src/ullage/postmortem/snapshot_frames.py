"""What a block is, guessed from the call stack that allocated it.

A stack is innermost first. The first frame, from the inside out, that a rule knows decides; a stack that no rule knows is
``unknown``, which is an answer. A snapshot that ullage wrote itself names the category in the place of a file.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ullage.memory.ledger import CATEGORIES

UNKNOWN = "unknown"
LONGEST = 96


class Frame(NamedTuple):
    """One call: the file, the function, and the line (0: not known)."""

    file: str
    function: str
    line: int = 0


class Rule(NamedTuple):
    """A frame whose file contains ``file`` and whose function is one of ``functions``, or a member of that C++ class (empty: any)."""

    category: str
    file: str
    functions: tuple[str, ...] = ()

    def knows(self, frame: Frame) -> bool:
        if self.file not in frame.file:
            return False
        return not self.functions or any(
            frame.function == name or frame.function.startswith(f"{name}::") for name in self.functions
        )


# Files and functions of torch 2.13, deepspeed 0.18.2 and megatron-core; deepspeed's ZeRO-3 makes buckets and gradients in one function,
# which therefore is in no rule.
RULES = (
    Rule("optimizer", "torch/optim/", ("_init_group",)),
    Rule("transient", "torch/optim/"),
    Rule("transient", "torch/nn/utils/clip_grad.py"),
    Rule("gathered", "/_fsdp_collectives.py", ("foreach_all_gather", "foreach_all_gather_copy_out")),
    Rule("gathered", "/_fsdp_param.py", ("init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param")),
    Rule("gradients", "/_fsdp_param.py", ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")),
    Rule("gradients", "/_fsdp_collectives.py", ("foreach_reduce",)),
    Rule("communication", "/_fsdp_collectives.py"),
    Rule("parameters", "/_fsdp_param.py"),
    Rule("gathered", "fsdp/_flat_param.py", ("_alloc_padded_unsharded_flat_param", "_all_gather_flat_param")),
    Rule("parameters", "fsdp/_flat_param.py"),
    Rule("gathered", "deepspeed/runtime/zero/partition_parameters.py", ("all_gather_coalesced", "_all_gather_dtype", "_allgather_params")),
    Rule("parameters", "deepspeed/runtime/zero/partition_parameters.py"),
    Rule("gathered", "deepspeed/runtime/zero/partitioned_param_coordinator.py"),
    Rule("optimizer", "deepspeed/runtime/zero/", ("initialize_optimizer_states", "_create_fp32_partitions")),
    Rule("communication", "deepspeed/runtime/zero/", ("allreduce_bucket", "backward_prologue", "reduce_gradients")),
    Rule("gradients", "deepspeed/runtime/zero/", ("get_flat_partition", "get_all_grad_tensors", "copy_grads_in_partition")),
    Rule("optimizer", "deepspeed/ops/adam/"),
    Rule("gradients", "megatron/core/distributed/param_and_grad_buffer.py"),
    Rule("optimizer", "megatron/core/optimizer/"),
    Rule("communication", "torch/nn/parallel/distributed.py", ("__init__", "_ddp_init_helper")),
    Rule("communication", "torch/distributed/distributed_c10d.py"),
    Rule("parameters", "torch/nn/modules/module.py", ("_apply", "convert", "to_empty")),
    Rule("parameters", "torch/nn/parameter.py"),
    Rule("parameters", "transformers/modeling_utils.py", ("from_pretrained", "_load_pretrained_model")),
    Rule("parameters", "torch/nn/modules/", ("__init__", "reset_parameters")),
    Rule("activations", "torch/nn/modules/", ("forward", "_conv_forward")),
    Rule("activations", "torch/nn/functional.py"),
    Rule("activations", "", ("forward",)),
    Rule("gradients", "torch/autograd/graph.py", ("_engine_run_backward",)),
    Rule("gradients", "torch/_tensor.py", ("backward",)),
    Rule("gradients", "torch/autograd/__init__.py", ("backward",)),
    Rule("gradients", "", ("torch::autograd::Engine",)),  # a device's backward runs on a thread of its own, in C++
    Rule("input", "torch/utils/data/"),
)  # fmt: skip


@lru_cache(maxsize=4096)
def category_of(frames: tuple[Frame, ...]) -> str:
    """The category of what a stack allocated."""
    if frames and frames[0].file in CATEGORIES:
        return frames[0].file
    for frame in frames:
        for rule in RULES:
            if rule.knows(frame):
                return rule.category
    return UNKNOWN


def words(frames: tuple[Frame, ...]) -> str:
    """The stack in one line: the innermost Python frame that is not torch's own, printable whatever the file held."""
    if not frames:
        return ""
    if frames[0].file in CATEGORIES:
        return _printable(frames[0].function)
    python = [frame for frame in frames if frame.file.endswith(".py")] or list(frames)
    chosen = next((frame for frame in python if "/torch/" not in frame.file), python[0])
    line = f":{chosen.line}" if chosen.line > 0 else ""
    return _printable(f"{chosen.file.rpartition('/')[2]}{line} {chosen.function}")


def _printable(text: str) -> str:
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return text if text.isprintable() else repr(text)[1:-1]
