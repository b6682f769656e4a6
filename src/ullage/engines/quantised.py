"""Weights as bitsandbytes keeps them, or torchao. In four bits (functional.py, quantize_4bit) two to a byte, with a scale for each 64.

Double quantisation keeps the scales in 8 bits, with an fp32 scale for 256 of those. Each weight has its tables of levels for itself.
torchao's NF4Tensor, torchtune's, has the same parts but for its second scales and levels, which are in the weight's own type.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ullage.dtypes import size_bytes
from ullage.engines.base import sized
from ullage.job.adapted import STORAGE
from ullage.job.job import Job
from ullage.kernels.transformers_quantised import BLOCK
from ullage.memory.program import Item
from ullage.memory.rank import LocalParam
from ullage.model.graph import Graph

FROZEN = "frozen parameters"
"""What a ledger calls the weights beside them."""
WEIGHTS = "4-bit weights"
_LONG = (WEIGHTS, "scales of 4-bit weights", "scales of scales")
AS_BYTES = "fp8"
"""An option's reader calls every type of eight bits so (job/options/spec.py)."""
SCALES = 256
"""Scales that share a scale (functional.py, quantize_4bit)."""
LEVELS = 16
"""Values that four bits tell apart."""


def held(params: Iterable[LocalParam], graph: Graph, *, torchao: bool = False) -> list[Item]:
    """What they are kept in: one Item for each kind of tensor, of one allocation a weight. graph: that knows the rows of each."""
    pieces: dict[tuple[str, str], list[int]] = {}
    for param in params:
        for what, numel, dtype in _nf4_tensor(param.numel) if torchao else _tensors(param, graph):
            pieces.setdefault((what, dtype), []).extend([numel] * param.copies)
    return [
        sized("parameters", what, sum(numels), dtype, pieces=numels, why=f"{len(numels)} tensors")
        for (what, dtype), numels in pieces.items()
    ]


def shards(job: Job) -> bool:
    """Whether FSDP2 shards packed weights: where their bytes are seen as floating numbers. accelerate leaves all others out, whole on every
    rank (utils/fsdp_utils.py, fsdp2_prepare_model). Recipes for FSDP say bf16, bitsandbytes' default is uint8."""
    return job.engine.options.get(STORAGE) != AS_BYTES


def sharded_bytes(job: Job, numel: int) -> int:
    """Of one packed weight, what FSDP2 shards and gathers: bitsandbytes' bytes; of torchao's NF4Tensor each tensor that is as long as the
    weight (nf4_tensor.py, fsdp_pre_all_gather)."""
    if job.stack != "torchtune":
        return -(-numel // 2)
    return sum(size_bytes(count, dtype) for what, count, dtype in _nf4_tensor(numel) if what in _LONG)


def beside(job: Job, params: Iterable[LocalParam], graph: Graph) -> list[Item]:
    """What a packed weight is read by and no engine shards: attributes of it."""
    torchao = job.stack == "torchtune"
    return [
        item for item in held(params, graph, torchao=torchao) if item.what not in (_LONG if torchao else (WEIGHTS,))
    ]


def _tensors(local: LocalParam, graph: Graph) -> list[tuple[str, int, str]]:
    """(what, elements, type) of one weight. In 8 bits: a scale for each output feature (nn/modules.py, Int8Params: CB and SCB)."""
    numel, base = local.numel, str(local.param.elements)
    if base == "int8":
        return [("8-bit weights", numel, "int8"), ("scales of 8-bit weights", _rows(local, graph), "fp32")]
    scales = -(-numel // BLOCK)
    packed = [(WEIGHTS, -(-numel // 2), "uint8"), ("4-bit levels", LEVELS, "fp32")]
    if base == "nf4":
        return [*packed, ("scales of 4-bit weights", scales, "fp32")]
    return [
        *packed,
        ("scales of 4-bit weights", scales, "uint8"),
        ("scales of scales", -(-scales // SCALES), "fp32"),
        ("mean scale", 1, "fp32"),
        ("8-bit levels", 256, "fp32"),
    ]


def _nf4_tensor(numel: int) -> list[tuple[str, int, str]]:
    """Of a bf16 weight (torchao quantization/quantize_/workflows/nf4/nf4_tensor.py)."""
    return [
        (WEIGHTS, numel // 2, "uint8"),
        (_LONG[1], numel // BLOCK, "int8"),
        (_LONG[2], numel // (BLOCK * SCALES), "bf16"),
        ("mean scale", 1, "bf16"),
        ("4-bit levels", LEVELS, "bf16"),
    ]


def _rows(local: LocalParam, graph: Graph) -> int:
    """Output features of a linear; of experts, which are one tensor, of all here (axolotl monkeypatch/moe_quant.py)."""
    (op,) = (one for one in local.block.ops if local.param in one.params)
    if op.kind == "grouped_linear":
        return local.numel // graph.size(local.param.dims[-1])
    inner = op.attrs["in"]
    assert isinstance(inner, tuple)
    return prod(graph.size(dim) for dim in local.param.dims[: -len(inner)])
