"""Whatever the file: an answer, or one clear message. Mutated files of every format, read, converted and checked."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.formats.test_megatron import SCRIPT
from tests.formats.test_recipes import COMMAND
from tests.formats.test_torchtitan import OF_2024, TODAY

from ullage.errors import UllageError
from ullage.formats.convert import convert, read_file
from ullage.formats.registry import LAUNCHERS, WRITTEN

DATA = Path(__file__).parent / "data"
SEEDS = [
    *(path.read_text() for path in sorted(DATA.glob("*.json")) if path.name != "megatron_jobs.json"),
    *(path.read_text() for path in sorted(DATA.glob("*.yaml"))),
    SCRIPT,
    TODAY,
    OF_2024,
    COMMAND,
]
ON = ("model=llama-2-7b", "cluster=8xA100-SXM-80GB")
NOISE = [
    "",
    "\t",
    "\n",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "'",
    "auto",
    "null",
    "-1",
    "1e400",
    "9" * 400,
    "é",
    "\0",
    "$X",
    "#",
    "--",
    "=",
]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(seed=st.sampled_from(SEEDS), cut=st.tuples(st.floats(0, 1), st.floats(0, 0.1)), noise=st.sampled_from(NOISE))
def test_a_mutated_file(tmp_path: Path, seed: str, cut: tuple[float, float], noise: str) -> None:
    start = int(cut[0] * len(seed))
    path = tmp_path / "config"
    path.write_text(seed[:start] + noise + seed[start + int(cut[1] * len(seed)) :])
    for to in ("job", "torchrun"):
        with suppress(UllageError):
            convert(path, to, ON)


@pytest.mark.parametrize("to", [*WRITTEN, *LAUNCHERS])
@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_every_file_in_every_format(tmp_path: Path, seed: int, to: str) -> None:
    """Written, and read again as what it was written as."""
    path = tmp_path / "config"
    path.write_text(SEEDS[seed])
    try:
        found = convert(path, to, ON)
    except UllageError:
        return
    if to in LAUNCHERS:
        return
    again = tmp_path / "again"
    again.write_text(found.text)
    assert read_file(again).format == found.format
