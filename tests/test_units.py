import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.errors import InvalidInput
from ullage.units import (
    GIB,
    GIGA,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_count,
    format_seconds,
    gb,
    gib,
    parse_bytes,
    parse_count,
)

sizes = st.integers(min_value=0, max_value=2**60)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("74.5GiB", 149 * 2**29),
        (" 1 tb ", 10**12),
        ("2TiB", 2**41),
        ("512 KiB", 2**19),
        ("1kb", 1000),
        ("2MB", 2 * 10**6),
        ("2mib", 2**21),
        ("5e8", 5 * 10**8),
        (".5KiB", 512),
        ("7b", 7),
    ],
)
def test_a_size_has_a_unit(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("7B", 7 * 10**9), ("5e8", 5 * 10**8), ("1.5K", 1500), ("8.03B", 8_030_000_000), ("1T", 10**12), (3.0, 3), (3, 3)],
)
def test_a_count_has_powers_of_ten(text: object, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "value",
    [
        -1,
        -0.5,
        "-1GB",
        True,
        None,
        [1],
        {},
        b"1",
        "",
        " ",
        "80 gigs",
        "GB",
        "1 2",
        "1,000",
        "0x10",
        "nan",
        "inf",
        math.nan,
        math.inf,
        "1e400",
        "1e-99999999999999999999",
        10**400,
        pytest.param(16**5000, id="too long to be written"),
        "9" * 65,
    ],
)
@pytest.mark.parametrize("parse", [parse_bytes, parse_count])
def test_what_is_no_size_is_the_users_mistake(parse, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(value, "data.key")
    assert str(caught.value).startswith("data.key")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [0.5, "1.5", "0.0001K"])
def test_a_count_is_whole(value: object) -> None:
    with pytest.raises(InvalidInput, match="must be whole"):
        parse_count(value)


@given(sizes)
def test_bytes_are_bytes(n_bytes: int) -> None:
    assert parse_bytes(n_bytes) == parse_bytes(str(n_bytes)) == parse_count(str(n_bytes)) == n_bytes


@given(st.integers(0, 10**6), st.sampled_from([("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", TIB), ("GB", GIGA)]))
def test_a_unit_multiplies_exactly(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{number} {unit[0]}") == number * unit[1]


@given(sizes)
def test_what_is_written_can_be_read(n_bytes: int) -> None:
    assert (
        abs(parse_bytes(format_bytes(n_bytes)) - n_bytes) <= 0.005 * n_bytes + 1
    )  # two decimals, and a part of a byte cut off
    assert parse_count(format_count(n_bytes)) == pytest.approx(n_bytes, rel=0.005)


@given(st.text(max_size=80))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(InvalidInput):
        assert parse_bytes(text) >= 0


def test_sizes_and_counts_as_text() -> None:
    assert format_bytes(6 * 10**9 * 4) == "22.35 GiB"
    assert format_bytes(511) == "511 B"
    assert format_bytes(-GIB) == "-1.00 GiB"
    assert format_bytes(3 * TIB) == "3.00 TiB"
    assert format_count(8_030_261_248) == "8.03B"
    assert format_count(999) == "999"


def test_seconds_in_the_unit_that_fits() -> None:
    assert [format_seconds(value) for value in (17.4716, 0.09147, 389.4397e-6, 2e-9, 0.0, -1.5)] == [
        "17.47 s", "91.47 ms", "389.44 µs", "0.00 µs", "0 s", "-1.50 s",
    ]  # fmt: skip


def test_gb_is_not_gib() -> None:
    assert gib(2**30) == 1
    assert gb(10**9) == 1
    assert gib(80 * GIGA) == pytest.approx(74.5, abs=0.01)
