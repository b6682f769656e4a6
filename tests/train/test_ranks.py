"""How a rank that fails is told by the process that started it."""

from __future__ import annotations

import pytest

from ullage.errors import InvalidInput, UllageError
from ullage.train.ranks import on_ranks


def _of_a_person() -> None:
    raise InvalidInput("is empty", key="--data", value="a.txt")


def _of_ours() -> None:
    raise IndexError("index out of range in self")


def test_what_a_person_can_mend_comes_as_it_is() -> None:
    with pytest.raises(InvalidInput, match=r"^--data = a.txt: is empty$"):
        on_ranks(_of_a_person, (), 2)


def test_an_exception_is_told_with_its_place() -> None:
    said = r"rank \d of 2 ended with status 1: IndexError: index out of range in self \(File .*test_ranks.py\", line \d+, in _of_ours\)"
    with pytest.raises(UllageError, match=said):
        on_ranks(_of_ours, (), 2)
