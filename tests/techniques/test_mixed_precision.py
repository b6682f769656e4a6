"""Copies of a parameter by engine, and where types change."""

import pytest
from tests.techniques.conftest import BASE, MEGATRON

import ullage

HALF = ("bf16", "fp32")


@pytest.mark.parametrize(
    ("base", "changes", "copies", "casts"),
    [
        # one fp32 copy, cast around a block; gradients reduced in fp32
        (BASE, {"engine": {"name": "fsdp2"}}, (4, 4, 4, 4), [("fp32", "bf16"), ("bf16", "fp32")]),
        (BASE, {"engine": {"name": "ddp"}}, (4, 4, 4, 4), [("fp32", "bf16")]),
        (BASE, {"engine": {"name": "deepspeed"}}, (2, 2, 4, 4, 4), [("bf16", "fp32"), ("fp32", "bf16")]),
        (MEGATRON, {}, (2, 4, 4, 4, 4), [("bf16", "fp32"), ("fp32", "bf16")]),
    ],
)  # fmt: skip
def test_copies_and_casts(show, base: dict, changes: dict, copies: tuple, casts: list) -> None:
    shown = show("mixed-precision", base, **changes)
    assert shown.part("Copies of a parameter that stay").column("bytes_per_parameter") == copies
    part = shown.part("Where types change")
    assert list(zip(part.column("source"), part.column("target"), strict=True)) == casts


def test_fp16_scales_its_loss(show) -> None:
    engine = {"name": "deepspeed"}
    assert "multiplied" in show("mixed-precision", engine=engine, precision="fp16-mixed").part("Loss scaling").about
    assert "not scaled" in show("mixed-precision", engine=engine).part("Loss scaling").about


def test_fp8_is_a_cast_of_its_own(show) -> None:
    part = show("mixed-precision", stack="torchtitan", engine={"name": "fsdp2"}, precision="fp8-mixed").part(
        "Where types change"
    )
    assert ("bf16", "fp8") in zip(part.column("source"), part.column("target"), strict=True)


def test_an_optimizer_with_states_of_its_own_shape_is_left_to_the_account(show) -> None:
    shown = show("mixed-precision", engine={"name": "fsdp2"}, optimizer="adafactor")
    assert not shown.part("Copies of a parameter that stay").rows
    assert shown.part("In the account").total("bytes") > 0


def test_a_job_without_it(show) -> None:
    with pytest.raises(ullage.InvalidInput, match="precision = fp32"):
        show("mixed-precision", precision="fp32")
