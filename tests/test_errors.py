import pickle

import pytest

from ullage import errors
from ullage.errors import InvalidInput, UllageError, UnknownName, nearest

# Scripts match on these: a code changes only with a new major version.
CODES = {
    "UllageError": "ullage",
    "InvalidInput": "invalid-input",
    "UnknownKey": "unknown-key",
    "Contradiction": "contradiction",
    "UnknownName": "unknown-name",
    "Unsupported": "unsupported",
    "Infeasible": "infeasible",
    "OutOfMemory": "out-of-memory",
}


def tree(root: type[UllageError]) -> list[type[UllageError]]:
    return [root, *(node for child in root.__subclasses__() for node in tree(child))]


def test_codes_are_stable() -> None:
    own = [error for error in tree(UllageError) if error.__module__ == errors.__name__]
    assert {error.__name__: error.code for error in own} == CODES


def test_the_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    for name in CODES:
        assert name in errors.__doc__


def test_a_message_names_value_limit_remedy_and_place() -> None:
    error = InvalidInput(
        "32 attention heads do not divide by 3",
        key="layout.tp",
        value=3,
        allowed="1, 2, 4, 8, 16 or 32",
        remedy="use 4",
        place="job.yaml, line 9",
    )
    assert str(error) == (
        "layout.tp = 3: 32 attention heads do not divide by 3; allowed: 1, 2, 4, 8, 16 or 32; use 4 (job.yaml, line 9)"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UllageError("is empty"), "is empty"),
        (UllageError("is missing", key="model"), "model: is missing"),
        (UllageError("must be positive", key="data.seq_len", value=0), "data.seq_len = 0: must be positive"),
        (UllageError("is empty").at("job.yaml"), "is empty (job.yaml)"),
    ],
)
def test_a_message_leaves_out_what_is_not_known(error: UllageError, message: str) -> None:
    assert str(error) == message


def test_the_first_place_stands() -> None:
    error = UllageError("is empty").at("job.yaml, line 3").at("the command line")
    assert error.place == "job.yaml, line 3"


def test_an_error_crosses_a_process_boundary() -> None:
    error = UnknownName("is no device", key="cluster", value="H1000", remedy="did you mean H100?")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is UnknownName
    assert str(copy) == str(error)


def test_nearest_finds_a_misspelling_and_nothing_far_away() -> None:
    assert nearest("micro_bach", ["seq_len", "micro_batch"]) == "micro_batch"
    assert nearest("zzz", ["seq_len", "micro_batch"]) is None
    assert nearest("seq_len", []) is None
