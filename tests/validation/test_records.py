"""Files of records: read strictly, one bad record told and the others kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ullage.errors import InvalidInput
from ullage.units import GIB
from ullage.validation.records import read_records

DATA = Path(__file__).parent / "data"

RECORD = {
    "id": "one",
    "source": "a paper",
    "grade": "A",
    "job": {"model": "llama-3.1-8b", "cluster": "8xH100-SXM-80GB"},
    "measured": {"allocated_gib": 2.0, "rank": "max", "step_s": 1.5},
    "fits": True,
    "assumed": [],
    "notes": "",
}


def write(path: Path, *records: object) -> Path:
    path.write_text(json.dumps(records))
    return path


def test_a_folder_is_all_its_files() -> None:
    found = read_records([DATA])
    assert len(found.records) == 41
    assert {record.file for record in found.records} == {f"{name}.json" for name in (
        "simumax", "megatron_golden", "torchtitan", "torchtune", "bigscience", "deepspeed"
    )}  # fmt: skip
    assert not found.rejected
    assert found.skipped == ("op_level.json: 3 single operations, no jobs",)


def test_a_record(tmp_path: Path) -> None:
    (record,) = read_records([write(tmp_path / "a.json", RECORD)]).records
    assert record.memory == {"allocated": 2 * GIB}
    assert record.time == {"step_s": 1.5}
    assert (record.rank, record.fits) == ("max", True)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"grade": "D"}, ["grade = 'D'", "A, B, C"]),
        ({"gradee": "A"}, ["gradee", "did you mean grade?"]),
        ({"fits": "yes"}, ["fits = 'yes'"]),
        ({"id": ""}, ["id"]),
        ({"job": []}, ["job"]),
        ({"measured": {"alocated_gib": 1}}, ["measured.alocated_gib", "did you mean allocated_gib?"]),
        ({"measured": {"allocated_gib": -1}}, ["measured.allocated_gib = -1", "above 0"]),
        ({"measured": {"allocated_gib": "2 GiB"}}, ["measured.allocated_gib"]),
        ({"measured": {"allocated_gib": 1, "rank": "first"}}, ["measured.rank = 'first'", "max, last"]),
    ],
)
def test_a_wrong_record_is_told_and_the_others_are_read(tmp_path: Path, change: dict, parts: list[str]) -> None:
    found = read_records(
        [write(tmp_path / "a.json", RECORD, {**RECORD, "id": "two", **change}, {**RECORD, "id": "three"})]
    )
    assert [record.id for record in found.records] == ["one", "three"]
    (rejected,) = found.rejected
    for part in parts:
        assert part in rejected.why


@pytest.mark.parametrize("rank", [0, "0", "last", "max", None])
def test_ranks(tmp_path: Path, rank: object) -> None:
    measured = {"allocated_gib": 1.0, "rank": rank}
    (record,) = read_records([write(tmp_path / "a.json", {**RECORD, "measured": measured})]).records
    assert record.rank == {"0": 0, None: "max"}.get(rank, rank)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no valid JSON"),
        ('[{"id": ', "no valid JSON"),
        ('{"model": "llama-3.1-8b"}', "ullage estimate"),
        ("[]", "no record"),
        ("[" * 100_000, "no valid JSON"),
        ("\0\xff", "no"),
    ],
)
def test_a_file_that_holds_no_records(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInput, match=part):
        read_records([path])


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"without \.json files"):
        read_records([tmp_path])
