"""A layout bound to the named dimensions of a graph: what is left of each on one rank. The one place where degrees divide."""

from __future__ import annotations

import math
from functools import lru_cache

from ullage.frozen import FrozenMap
from ullage.job.job import Data, Layout
from ullage.model.graph import BATCH, ROUTED, SENT, SEQ, SEQ_SP, TARGET, Graph, Param

SCAN = ("ssm_heads", "ssm_groups", "ssm_inner", "ssm_conv", "ssm_in")
"""What tensor parallelism divides of a Mamba-2 mixer: whole heads, and whole groups of them."""
ADAPTERS = ("lora_rank", "lora_qkv", "lora_fc1", "lora_shared_fc1", "lora_hidden")
"""Of Megatron's adapters (adapted_megatron.py)."""
TENSOR_PARALLEL = ("heads", "kv_heads", "ffn", "vocab", "shared_ffn", "mtp_out", *SCAN, *ADAPTERS)
EXPERT_PARALLEL = ("experts",)
EXPERT_TENSOR_PARALLEL = ("expert_ffn",)


@lru_cache(maxsize=1024)
def local_sizes(graph: Graph, layout: Layout, data: Data, capacity: float | None = None) -> FrozenMap:
    """Every named dimension as one rank holds it.

    capacity: every expert is sent its even share of a rank's rows times this factor, rounded up, filled with zeros or cut off; None: as
    many rows as there are.
    Divisions that do not come out are rounded up: job/checks.py refuses those that no engine runs; what remains (kv heads
    below the tensor-parallel degree) is replicated.
    """
    tokens = _share(data.seq_len, layout.cp)
    tokens_sp = _share(tokens, layout.tp) if layout.sp else tokens
    sizes: dict[str, object] = {}
    for name, size in graph.sizes.items():
        assert isinstance(size, int), name
        sizes[name] = _share(size, _degree(name, layout))
    top_k = sizes.get("top_k", 0)
    assert isinstance(top_k, int)
    sent = data.micro_batch * tokens_sp * top_k
    if capacity is not None and top_k:
        experts = graph.size("router")
        sent = experts * math.ceil(sent / experts * capacity)
    if TARGET in sizes:
        sizes[TARGET] = sizes[TARGET] or tokens
    sizes |= {
        BATCH: data.micro_batch,
        SEQ: tokens,
        SEQ_SP: tokens_sp,
        SENT: sent,
        ROUTED: math.ceil(sent * layout.etp * data.expert_load),
    }
    return FrozenMap(sizes)


def _degree(name: str, layout: Layout) -> int:
    if name in TENSOR_PARALLEL:
        return layout.tp
    if name in EXPERT_PARALLEL:
        return layout.ep
    if name in EXPERT_TENSOR_PARALLEL:
        return layout.etp
    return 1


def _share(size: int, degree: int) -> int:
    return -(-size // degree) if degree > 1 else size


def is_expert(param: Param) -> bool:
    """Whether expert parallelism places the parameter: its gradients are reduced over the expert data-parallel group."""
    return "experts" in param.dims


def is_tensor_parallel(param: Param) -> bool:
    return any(dim in TENSOR_PARALLEL or dim in EXPERT_TENSOR_PARALLEL for dim in param.dims)


def local_numel(graph: Graph, param: Param, layout: Layout) -> int:
    """Elements of a parameter on one rank of the tensor- and expert-parallel groups, before any data-parallel sharding."""
    return math.prod(
        _share(graph.size(dim), _degree(dim, layout)) if isinstance(dim, str) else dim for dim in param.dims
    )
