import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.dtypes import BITS, bits, size_bytes
from ullage.errors import UnknownName

dtypes = st.sampled_from(sorted(BITS))
numels = st.integers(min_value=0, max_value=2**45)


@pytest.mark.parametrize(
    ("dtype", "width"), [("fp32", 32), ("bf16", 16), ("fp16", 16), ("fp8", 8), ("nf4", 4), ("int64", 64), ("bool", 8)]
)
def test_widths(dtype: str, width: int) -> None:
    assert bits(dtype) == width


def test_half_a_byte_rounds_up() -> None:
    assert size_bytes(3, "nf4") == 2
    assert size_bytes(0, "nf4") == 0


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"dtype = bf61: is no element type.*did you mean bf16\?"):
        size_bytes(1, "bf61")


@given(numels, dtypes)
def test_bytes_cover_every_bit_and_waste_less_than_one(numel: int, dtype: str) -> None:
    assert 0 <= 8 * size_bytes(numel, dtype) - numel * bits(dtype) < 8


@given(numels, numels, dtypes)
def test_two_tensors_never_need_less_than_one_of_both(one: int, other: int, dtype: str) -> None:
    assert size_bytes(one, dtype) + size_bytes(other, dtype) >= size_bytes(one + other, dtype)
