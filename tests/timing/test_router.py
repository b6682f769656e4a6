"""The router of Megatron's mixtures."""

from __future__ import annotations

import pytest
from tests.timing.layers import GPT_OSS, in_megatron, layer_works

from ullage.hardware.catalogue import device
from ullage.timing.machine import traffic_s
from ullage.timing.work import OpWork, Traffic

TOKENS, HIDDEN = 1024, 2880


def _works(**options: object) -> dict[str, OpWork]:
    return layer_works(in_megatron(GPT_OSS, **options))


def _types(work: OpWork) -> list[str]:
    return [one.dtype for one in (*work.forward.matmuls, *work.backward.matmuls)]


def test_logits_of_fp32_are_multiplied_from_16_bits_forward_and_in_tf32_back() -> None:
    """moe_utils.py, RouterGatingLinearFunction: the input cast up for the weight's gradient, its own gradient cast down."""
    router = _works(moe_router_dtype="fp32")["router"]
    assert _types(router) == ["bf16", "tf32", "tf32"]
    assert [one.bytes for one in router.backward.traffic] == [6 * TOKENS * HIDDEN] * 2


def test_logits_of_16_bits_are_multiplied_in_16_bits() -> None:
    router = _works()["router"]
    assert _types(router) == ["bf16"] * 3
    assert not router.backward.traffic


def test_scores_are_kernels_of_torchs_own() -> None:
    """topk_routing_with_score_function in 16 bits: up, topk, softmax, two of zeros, int, two scattered, bool, cast down; back:
    gathered, softmax, topk's zeros and scattered, two casts. Each of 128 fp32 scores a token; the dispatcher counts for experts."""
    work = _works(moe_permute_fusion=True)["router.scores"]
    routed, counts = work.forward.traffic
    (back,) = work.backward.traffic
    assert (routed.kernels, back.kernels) == (10, 6)
    assert (routed.bytes, back.bytes) == (10 * 8 * 128 * TOKENS, 6 * 8 * 128 * TOKENS)
    assert (counts.bytes, counts.kernels) == (8 * 128 * counts.kernels, 10)


def test_a_fused_router_is_a_kernel_each_way() -> None:
    work = _works(moe_permute_fusion=True, moe_router_fusion=True, moe_router_force_load_balancing=False)[
        "router.scores"
    ]
    assert [one.kernels for one in (work.forward.traffic[0], *work.backward.traffic)] == [1, 1]


def test_every_kernel_starts() -> None:
    h100 = device("H100-SXM-80GB")
    one, many = (traffic_s(h100, Traffic(bytes=1 << 20, kernels=kernels), backward=False) for kernels in (1, 11))
    assert many - one == pytest.approx(10 * 3e-6)
