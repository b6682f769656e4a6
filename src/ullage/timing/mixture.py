"""What Python issues for a mixture of Megatron-Core beside the ops that its steps are: for scores, maps, losses and counts.

Counted in megatron/core/transformer/moe at NVIDIA/Megatron-LM@d98e8a64 (router.py, moe_utils.py, token_dispatcher.py, experts.py), an op
for each call that runs a kernel; views are none. What a job does not name is as Megatron has it unasked: no loss, no fusion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from ullage import dtypes
from ullage.frozen import frozen
from ullage.kernels.megatron_moe import gathers, pads_to_capacity, probabilities_type, weighted_after
from ullage.kernels.step import Context
from ullage.model.graph import BATCH, SEQ_SP, Block, Op
from ullage.timing.dispatch import gathers_maps, pads_rows, sends_once
from ullage.timing.work import OpWork, Pass, Traffic


@frozen
class Calls:
    """torch: ops of torch's own, whose backward autograd runs by itself. functions: of Python, forward and backward."""

    torch: int = 0
    functions: int = 0

    def __add__(self, other: Calls) -> Calls:
        return Calls(torch=self.torch + other.torch, functions=self.functions + other.functions)


@lru_cache(maxsize=1024)
def calls(block: Block, context: Context) -> Mapping[str, Calls]:
    """Of a block's work, by its name (timing/work.py), forward."""
    return dict(_calls(block, context))


def _calls(block: Block, context: Context) -> Iterator[tuple[str, Calls]]:
    if context.stack != "megatron":
        return
    everybody = gathers(context)
    for op in block.ops:
        if op.kind == "router":
            yield op.name, routing(op, context)
        elif op.kind == "dispatch":
            yield ("dispatch" if everybody else "permute"), dispatching(context)
        elif op.kind == "combine":
            yield ("unpermute" if everybody else "combine"), combining(context)
        elif pads_rows(op, context):
            yield "experts.padding", Calls(functions=1)  # of the probabilities


def waits(block: Block, context: Context) -> bool:
    """Whether the host waits for counts of rows, so that it issues nothing ahead: but where rows are padded to a capacity or a budget of a
    rank, whose number it knows (_maybe_dtoh_and_synchronize; _HybridEPManager.setup_metadata)."""
    if context.stack != "megatron" or not any(op.kind == "dispatch" for op in block.ops):
        return False
    return not pads_to_capacity(context) and context.option("moe_expert_rank_capacity_factor") is None


def scores(block: Block, context: Context) -> Iterator[OpWork]:
    """The kernels of those calls that are torch's own, and a fused router's: the router's read and write about an fp32 number of every
    token and expert each, the dispatcher's one of every expert. Backward, of the probabilities and the losses."""
    counted = calls(block, context)
    for op in block.ops:
        if op.kind != "router" or op.name not in counted:
            continue
        experts = context.size("router")
        tokens = context.numel((BATCH, SEQ_SP))
        fused = 1 if context.option("moe_router_fusion") else 0
        routed = counted[op.name].torch + fused
        counts = sum(one.torch for name, one in counted.items() if name != op.name)
        yield OpWork(
            name=f"{op.name}.scores",
            module=op.module,
            forward=Pass(
                traffic=(_kernels(routed, tokens * experts), *((_kernels(counts, experts),) if counts else ()))
            ),
            backward=Pass(traffic=(_kernels(_back(op, context), tokens * experts),)),
        )


def _kernels(count: int, numbers: int) -> Traffic:
    return Traffic(bytes=count * 2 * dtypes.size_bytes(numbers, "fp32"), kernels=count)


def _back(op: Op, context: Context) -> int:
    """Kernels of the router's backward that autograd runs by itself."""
    losses = (
        2 if context.option("moe_router_fusion") else 5
    )  # scale, coefficient, product, softmax; added to the others
    found = losses * len(_balanced(context))
    if context.option("moe_z_loss_coeff"):
        found += 7  # scale, mean, square (2), exponential of a difference (2), product
    if context.option("moe_router_fusion"):
        return found + 1
    found += (
        1 + 2 * _widened(context) + (1 if context.option("moe_router_topk_scaling_factor") else 0)
    )  # gathered; casts
    if not _sigmoid(op, context):
        return found + 3  # softmax; topk: zeros, and scattered to
    picked = 2 + 1  # zeros, scattered to; sigmoid
    return found + picked + (6 if context.size("top_k") > 1 else 0)  # the quotient's two, the sum's


# -- the router


def routing(op: Op, context: Context) -> Calls:
    """Past its matmul: the loss of its logits, random logits, choice and maps, a capacity, the losses of balance, the bias' counts."""
    found = _scored(op, context)
    if context.option("moe_z_loss_coeff"):
        found += Calls(torch=6, functions=1)  # logsumexp, square, mean, coefficient; divided and added to the log
    if context.option("moe_router_force_load_balancing"):
        found += Calls(torch=1, functions=1)  # apply_random_logits: a clone, normal_
    if context.option("moe_expert_capacity_factor") is not None:
        kept = 0 if pads_to_capacity(context) else 1
        found += Calls(torch=5 + kept)  # topk, zeros, scatter, bool; [and]; the probabilities masked
    for kind in _balanced(context):
        found += _loss(kind, op, context)
    if _biased(op, context):
        found += Calls(torch=2)  # the map summed, added to the counts
    return found


def _balanced(context: Context) -> tuple[str, ...]:
    """The losses that there are: moe_router_load_balancing_type with moe_aux_loss_coeff, one each or lists."""
    kinds, shares = (
        context.option("moe_router_load_balancing_type", "aux_loss"),
        context.option("moe_aux_loss_coeff", 0.0),
    )
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    shares = shares if isinstance(shares, tuple) else (shares,) * len(kinds)
    return tuple(str(kind) for kind, share in zip(kinds, shares, strict=False) if share and "aux_loss" in str(kind))


def _biased(op: Op, context: Context) -> bool:
    named = any(param.name.endswith("score_bias") for param in op.params)
    return named or bool(context.option("moe_router_enable_expert_bias"))


def _sigmoid(op: Op, context: Context) -> bool:
    return context.option("moe_router_score_function", "sigmoid" if _biased(op, context) else "softmax") == "sigmoid"


def _widened(context: Context) -> int:
    """A cast of logits up, or of probabilities down, is an op where the router is not fp32 itself."""
    return 0 if probabilities_type(context) == "fp32" else 1


def _scored(op: Op, context: Context) -> Calls:
    """topk_routing_with_score_function."""
    if context.option("moe_router_load_balancing_type") == "sinkhorn":
        return Calls(torch=27 + _widened(context))  # of its loop once, 15, which goes on until it converges
    if context.option("moe_router_fusion"):
        return Calls(functions=1)
    maps = (
        7 if context.option("deterministic_mode") else 6
    )  # two of zeros, int, two scattered, bool; or arange and ones in place
    found = maps + 2 * _widened(context)  # up, and down again
    if context.option("moe_router_topk_scaling_factor"):
        found += 1
    found += 9 if context.option("moe_router_group_topk") else 0  # a group's scores, its choice, its mask over experts
    if not _sigmoid(op, context):
        return Calls(torch=found + 2)  # softmax, topk
    found += 2 + (2 if _biased(op, context) else 0)  # sigmoid, topk; the bias added, scores gathered
    return Calls(torch=found + (3 if context.size("top_k") > 1 else 0))  # sum, epsilon, division


def _loss(kind: str, op: Op, context: Context) -> Calls:
    """Scores anew, counts of all ranks, switch_load_balancing_loss_func, and what attaches and logs it."""
    logged = Calls(torch=2, functions=1)
    counted = Calls(torch=1 + (3 if kind == "global_aux_loss" else 0), functions=1)
    over = Calls(torch=1 if kind == "seq_aux_loss" else 0)
    if context.option("moe_router_fusion"):
        return Calls(functions=2) + counted + over + logged
    scored = 5 + _widened(context) + (4 if _sigmoid(op, context) else 1)  # topk and a map; sigmoid normed, or softmax
    return Calls(torch=scored + 4) + counted + over + logged


# -- the dispatcher


def dispatching(context: Context) -> Calls:
    """Counts and maps before rows are sent, and what is permuted beside the rows."""
    sorting = 0 if context.option("moe_permute_fusion") else _sorting(context)
    if gathers(
        context
    ):  # the map and probabilities gathered; own experts' cut out, counted, copied to the host; probabilities masked
        return Calls(torch=7 + sorting, functions=2)
    if sends_once(context):
        return _sent_once(context) + Calls(torch=0 if gathers_maps(context) else sorting)
    spread = context.ep * context.etp > 1
    found = _counted(context, spread=spread)
    if sorting and context.size("experts") > 1 and spread and not weighted_after(context):
        found += Calls(torch=1)  # and sorted by the experts of a rank
    return found + Calls(torch=sorting)


def _counted(context: Context, *, spread: bool) -> Calls:
    """MoEAlltoAllTokenDispatcher.preprocess beside its gather (timing/exchanges.py), and each count's copy to the host."""
    if pads_to_capacity(context):
        return Calls(torch=2)
    copies = 1 + (3 if spread else 0)
    if context.option("moe_expert_capacity_factor") is not None:
        copies += 2  # the rows that are left: a sum
    if context.size("experts") > 1 and not context.option("moe_permute_fusion"):
        copies += 1
    return Calls(torch=copies + (6 if spread else 1))


def _sorting(context: Context) -> int:
    """moe_utils.permute without Transformer Engine, past the rows themselves: the map turned and sorted, and the probabilities taken."""
    alone = weighted_after(context) or gathers(context)  # rows without probabilities
    if pads_to_capacity(context):
        return 4 if alone else 9
    return 3 if alone else 5


def _sent_once(context: Context) -> Calls:
    """HybridEP is given the map; DeepEP indices, which it makes a map again without Megatron's experimental kernels."""
    if gathers_maps(context):
        return Calls(torch=2 + _widened(context))
    turned = 2 if context.tp > 1 else 0
    dropped = 2 if context.option("moe_expert_capacity_factor") is not None else 0
    return Calls(torch=turned + 1 + dropped + _widened(context) + 11)


def combining(context: Context) -> Calls:
    """moe_utils.unpermute, past the sum itself: zeros to add to, weights where the rows are weighted here."""
    if context.option("moe_permute_fusion") or sends_once(context):
        return Calls()
    return Calls(torch=1 + (4 if weighted_after(context) else 0))
