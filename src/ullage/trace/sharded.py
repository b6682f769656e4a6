"""torch.distributed on fake tensors: DDP, FSDP2 and DTensor are the real code; only what needs contents or peers is left out.

What is left out makes no memory: DDP compares the parameters' shapes among the ranks, and asks a finished all-reduce for its result,
which a fake process group has not. What fake tensors add is not counted: DTensor runs each op on tensors of the global shape to
learn the result's, and beside a FakeTensorMode it does so in that very mode.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.trace.lives import tensors_in
from ullage.trace.patch import replaced
from ullage.trace.recorder import COLLECT_EVERY, Recorder


@contextmanager
def unseen_looks(recorder: Recorder) -> Iterator[None]:
    """What DTensor makes on fake tensors to learn about shapes is not recorded, in a trace or in a run."""
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    propagated = count(1)

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.paused += 1
        try:
            return propagate(self, *args, **kwargs)
        finally:
            recorder.paused -= 1
            if not next(propagated) % COLLECT_EVERY:
                gc.collect(0)

    with replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
        yield


@contextmanager
def as_in_a_run(recorder: Recorder) -> Iterator[None]:
    """DDP and FSDP1 without their peers."""
    if not torch.distributed.is_available():
        yield
        return
    from torch.nn.parallel import distributed

    ready: Any = distributed.DistributedDataParallel._pre_forward

    def with_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._comm_hooks:
            self.register_comm_hook(recorder, _reduced_in_place)
        with _RealIndices():  # type: ignore[no-untyped-call]
            return ready(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(distributed, "_verify_param_shape_across_processes", lambda *_, **__: True))
        if torch.distributed.is_initialized():
            from torch.distributed.fsdp import _runtime_utils

            stack.enter_context(replaced(distributed.DistributedDataParallel, "_pre_forward", with_hook))
            stack.enter_context(replaced(_runtime_utils, "_catch_all_reshard", _reshard_what_is_whole))
        yield


def _reshard_what_is_whole(state: Any) -> None:
    """What FSDP1 does at a backward's end; it tells the whole from the shard by their addresses, which fake tensors have not."""
    from torch.distributed.fsdp import _runtime_utils as runtime

    handle = state._handle
    if handle is None:
        return
    whole, shard = (one.untyped_storage()._cdata for one in (handle.flat_param.data, handle.flat_param._local_shard))
    if whole != shard or handle._skipped_use_sharded_views:
        runtime._reshard(state, handle, runtime._should_free_in_backward(state, handle))


class _RealIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """DDP agrees on its buckets by sending their indices around and reading them back: small integers, made for real here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in(args, kwargs))
        integers = all(one.dtype == torch.int32 and type(one) is torch.Tensor for one in tensors)
        if integers and (tensors or kwargs.get("dtype") == torch.int32):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _reduced_in_place(recorder: Recorder, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """What DDP's own hook does: the bucket is divided and reduced where it lies (torch/csrc/distributed/c10d/default_comm_hooks.cpp)."""
    buffer: torch.Tensor = bucket.buffer()
    recorder.tag(buffer, "communication", "gradient bucket", only_new=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer.div_(torch.distributed.get_world_size()))
    return done


def tag_gathered(recorder: Recorder, model: nn.Module) -> None:
    """Names what FSDP2 gathers: each parameter's unsharded tensor, whose storage it resizes to nothing and back."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        for param in _params_of(module) if isinstance(module, FSDPModule) else ():
            owner = recorder.places.names.get(id(param._module_info.module), "")
            name = f"{owner}.{param._module_info.param_name}".removeprefix(".")
            for tensor in getattr(param, "all_gather_outputs", []):
                recorder.tag(tensor, "gathered", name)


def _params_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [param for group in groups if group is not None for param in group.fsdp_params]
