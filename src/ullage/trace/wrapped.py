"""A job's engine around its model, as the libraries' own code builds it: tensor parallelism, DDP, FSDP2, the optimizer, clipping.

Tensor parallelism is transformers' (distributed/tensor_parallel.py): DTensor parameters by the model's own plan, made on the meta
device and given memory once they are cut, as from_pretrained does. FSDP wraps what accelerate wraps: each layer, then the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ullage.engines.fsdp2.policy import resharding, reshards
from ullage.errors import Unsupported
from ullage.job.adapted import is_adapter, saved_type
from ullage.job.job import Job

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_IMPLS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
_OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
OPTIMIZERS = tuple(_OPTIMIZERS)
_PARTIAL_GRADIENTS = "replicated_with_grad_allreduce"
_OF_DDP = ("gradient_as_bucket_view", "bucket_cap_mb")


def mesh_of(job: Job, device: str = "cpu") -> Any:
    """The device mesh of a job under FSDP2: dimensions pp, replicate, shard and tp, where they are more than one rank; None for DDP
    and its like. replicate: groups that hold the same shards (HSDP). Of a pipeline, whose stages are all wrapped, shard may be one rank.
    """
    shard = job.engine.shard_group or job.layout.dp
    degrees = {"pp": job.layout.pp, "replicate": job.layout.dp // shard, "shard": shard, "tp": job.layout.tp}
    sizes = {name: size for name, size in degrees.items() if size > 1 or (name == "shard" and job.layout.pp > 1)}
    if job.engine.name != "fsdp2" or not sizes:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def cut(model: Any, mesh: Any, *, along_the_sequence: bool = False) -> None:
    """Cuts a model by its own plan of tensor parallelism, its stream by tokens too where it goes along the sequence: each rank keeps its
    part of what it has whole. One that is on the meta device is given memory."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    try:
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    except ValueError as error:
        raise Unsupported(f"has no plan in transformers: {error}", key="layout.tp", value=mesh.size()) from None
    if along_the_sequence:
        from ullage.trace import sequence

        plan = sequence.plan_of(model, layers_of(model), plan)
    for name in model.all_tied_weights_keys:  # each is cut by itself, and tied again
        place, _, param = name.rpartition(".")
        module = model.get_submodule(place)
        module._parameters[param] = nn.Parameter(torch.empty_like(module._parameters[param]))
    partial = {name for name, style in plan.items() if style == _PARTIAL_GRADIENTS}
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name not in partial})
    for name, module in model.named_modules():
        if name in partial:
            _sum_gradients(module, mesh.get_group())
    _allocate(model)
    model.tie_weights()


def _sum_gradients(module: nn.Module, group: Any) -> None:
    """Over the ranks' heads, of which each gives a part. transformers' own style sums what ``.grad`` holds, earlier micro-batches too."""
    hooked: dict[str, nn.Parameter] = {}

    def summed(grad: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(grad, group=group)
        return grad

    def hook(module: nn.Module, _: object) -> None:
        for name, param in module.named_parameters(recurse=False):  # FSDP2 puts another in its place
            if torch.is_grad_enabled() and hooked.get(name) is not param:
                hooked[name] = param
                param.register_hook(summed)  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(hook)


def _allocate(model: nn.Module) -> None:
    """Each parameter and buffer as a tensor of its own, which keeps no whole one alive; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(_own(param.detach()))
                module._parameters[name] = made[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _own(buffer)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()


def wrapped(job: Job, model: nn.Module, mesh: Any) -> nn.Module:
    """The model under its engine's data parallelism."""
    if job.engine.options.get("cast_once"):
        from ullage.trace.cast_once import cast_once

        cast_once(model)
    if job.layout.dp == job.layout.pp == 1:
        return model
    if job.engine.name == "fsdp2":
        return _sharded(job, model, mesh)
    if job.engine.name == "fsdp1":
        return _flattened(job, model)
    if job.engine.options.get("reduce_in_place"):
        from ullage.trace.replicas import Replica

        return Replica(model, layers_of(model))
    from torch.nn.parallel import DistributedDataParallel

    given: dict[str, Any] = {name: job.engine.options[name] for name in _OF_DDP if name in job.engine.options}
    return DistributedDataParallel(model, **given)


def _sharded(job: Job, model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    precision = job.precision
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce])
    if job.lora is None and precision.compute == precision.reduce == (precision.master or precision.params):
        policy = MixedPrecisionPolicy()  # else each layer's input would be looked through for what is to be cast
    offloads = job.offload.params != "none"  # and the optimizer's states with them; nothing is pinned without a GPU
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offloads else OffloadPolicy()
    groups = tuple(name for name in ("replicate", "shard") if name in mesh.mesh_dim_names)
    said, kept_shards = resharding(job)
    for name, param in model.named_parameters() if job.lora is not None and job.lora.modules_to_save else ():
        if param.requires_grad and not is_adapter(name):
            param.data = param.data.to(DTYPES[saved_type(job)])
    for module in (*layers_of(model), model):
        again: Any = kept_shards if kept_shards and module is not model else reshards(job)
        if module is model and said == "default":
            again = None  # torch's own choice for a root: kept, since its backward is what comes next
        fully_shard(module, mesh=mesh[groups], mp_policy=policy, reshard_after_forward=again, offload_policy=offload)
    return model


def _flattened(job: Job, model: nn.Module) -> nn.Module:
    """FSDP1, with PEFT's policy beside adapters (transformers distributed/fsdp.py, update_fsdp_plugin_peft)."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    compute, reduce = DTYPES[job.precision.compute], DTYPES[job.precision.reduce]
    policy: Any = ModuleWrapPolicy({type(layer) for layer in layers_of(model)})
    if job.lora is not None:
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(model)  # type: ignore[no-untyped-call]
    made = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD if reshards(job) else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(param_dtype=compute, reduce_dtype=reduce, buffer_dtype=compute),
        use_orig_params=bool(job.engine.options.get("use_orig_params")),
        device_id=torch.device("cpu"),
    )
    for module in FullyShardedDataParallel.fsdp_modules(made) if job.precision.master == "fp32" else ():
        flat = module._flat_param
        if flat is not None and flat.requires_grad and module._handle is not None:
            flat.data = flat.data.float()  # as accelerate's prepare_model does
            module._handle._orig_param_dtype = torch.float32
    return made


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that FSDP wraps: transformers names their classes in ``_no_split_modules``; none whose weight another module has too."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    uses = Counter(param for module in model.modules() for param in module.parameters(recurse=False))
    found = (module for module in model.modules() if type(module).__name__ in names)
    return (module for module in found if all(uses[param] == 1 for param in module.parameters()))


def unsynced(job: Job, model: Any, *, last: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced in the last micro-batch alone, as accelerate does (Accelerator.no_sync), unless sync_each_batch."""
    if job.layout.dp == 1:
        return nullcontext()
    if job.engine.options.get("reduce_in_place"):
        reduced: AbstractContextManager[Any] = model.reduced() if last else nullcontext()
        return reduced
    if last:
        return nullcontext()
    if job.engine.name == "fsdp2":
        return nullcontext() if job.engine.options.get("sync_each_batch") else _unreduced(model)
    context: AbstractContextManager[Any] = model.no_sync()
    return context


@contextmanager
def _unreduced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """One group of parameters for each mesh, as transformers' Trainer makes them: DTensors of two cannot be stepped together."""
    kind = _OPTIMIZERS[job.optimizer.name]
    settings: dict[str, Any] = {"lr": 1e-4, **_IMPLS[job.optimizer.impl]}
    if job.optimizer.name == "sgd":
        settings["momentum"] = job.engine.options.get("momentum") or 0.0
    if job.engine.name == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        zero: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **settings)
        return zero
    made: torch.optim.Optimizer = kind([{"params": group} for group in _by_mesh(model)], **settings)
    return made


def clip(model: nn.Module, pipeline: Any = None, copies: Collection[nn.Parameter] = ()) -> torch.Tensor:
    """Clips to a norm of 1 over all meshes (transformers' Trainer, ``_mixed_mesh_grad_norm``) and all ranks of a pipeline's group;
    returns the norm before. copies: parameters that are counted elsewhere.

    The norm is reduced over ranks before it is used: as it comes, a part on each, clip_grad_norm_ and its caller would each reduce it.
    """
    groups = _by_mesh(model)
    passed = set(map(id, copies))
    counted = [[one.grad for one in group if one.grad is not None and id(one) not in passed] for group in groups]
    norms = [whole(torch.nn.utils.get_total_norm(grads)) for grads in counted]
    total: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pipeline is not None:
        squares = total.square()
        torch.distributed.all_reduce(squares, group=pipeline)
        total = squares.sqrt()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, total)
    return total


def whole(tensor: Any) -> torch.Tensor:
    """A DTensor's whole contents on every rank; any other tensor as it is."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def _by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for param in model.parameters():
        groups[getattr(param, "device_mesh", None)].append(param)
    return list(groups.values())
