"""torch.distributed on fake tensors: DDP, FSDP2 and DTensor are the real code; only what needs contents or peers is left out.

What is left out makes no memory that stays: DDP compares the parameters' shapes among the ranks. What fake tensors add is not
counted: DTensor runs each op on tensors of the global shape to learn the result's, and beside a FakeTensorMode it does so in that
very mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ullage.trace.recorder import Recorder, replaced


@contextmanager
def as_in_a_run(recorder: Recorder) -> Iterator[None]:
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import distributed

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.paused += 1
        try:
            return propagate(self, *args, **kwargs)
        finally:
            recorder.paused -= 1

    with ExitStack() as stack:
        stack.enter_context(replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen))
        stack.enter_context(replaced(distributed, "_verify_param_shape_across_processes", lambda *_, **__: True))
        yield


def tag_gathered(recorder: Recorder, model: nn.Module) -> None:
    """Names what FSDP2 gathers: each parameter's unsharded tensor, whose storage it resizes to nothing and back."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for prefix, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for param in _params_of(module):
            name = ".".join(part for part in (prefix, param._param_fqn or "") if part)
            for tensor in getattr(param, "all_gather_outputs", []):
                recorder.tag(tensor, "gathered", name)


def _params_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [param for group in groups if group is not None for param in group.fsdp_params]
