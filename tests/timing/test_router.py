"""The router of Megatron's mixtures."""

from __future__ import annotations

from tests.timing.layers import GPT_OSS, in_megatron, layer_works

from ullage.timing.work import OpWork

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
