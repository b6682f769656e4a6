import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.frozen import FrozenMap, frozen, replace

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(max_size=8), json_values, max_size=6)


@given(json_objects)
def test_what_goes_in_comes_out(keys: dict[str, object]) -> None:
    assert FrozenMap(keys).as_dict() == keys


@given(json_objects)
def test_equal_maps_are_one_cache_key(keys: dict[str, object]) -> None:
    one, other = FrozenMap(keys), FrozenMap(dict(reversed(keys.items())))
    assert one == other
    assert hash(one) == hash(other)
    assert {one: "cached"}[other] == "cached"


@given(json_objects)
def test_it_is_a_mapping(keys: dict[str, object]) -> None:
    frozen = FrozenMap(keys)
    assert list(frozen) == list(keys)
    assert len(frozen) == len(keys)
    assert FrozenMap(frozen) == frozen


def test_it_is_frozen_all_the_way_down() -> None:
    source = {"rope_scaling": {"factors": [1, 2]}}
    frozen = FrozenMap(source)
    source["rope_scaling"]["factors"].append(3)
    inner = frozen["rope_scaling"]
    assert isinstance(inner, FrozenMap)
    assert inner["factors"] == (1, 2)
    with pytest.raises(TypeError):
        frozen["new"] = 1


def test_a_change_of_the_copy_leaves_the_original() -> None:
    frozen = FrozenMap({"targets": ["q_proj"]})
    copy = frozen.as_dict()
    copy["targets"].append("v_proj")
    assert frozen["targets"] == ("q_proj",)


def test_other_mappings_are_not_equal() -> None:
    assert FrozenMap({"a": 1}) != {"a": 1}
    assert FrozenMap({"a": 1}) != FrozenMap({"a": 2})


def test_empty() -> None:
    assert FrozenMap() == FrozenMap({})
    assert json.dumps(FrozenMap().as_dict()) == "{}"


def test_it_is_a_cache_key_in_another_process_too() -> None:
    """Texts hash differently in each process: the hash must be computed where the map arrives."""
    code = (
        "import pickle, sys; from ullage.frozen import FrozenMap; "
        "arrived = pickle.loads(sys.stdin.buffer.read()); print(hash(arrived) == hash(FrozenMap({'name': 'llama'})))"
    )
    sent = pickle.dumps(FrozenMap({"name": "llama"}))
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.strip() == b"True"


@frozen
class _Base:
    """A record with each kind of field."""

    size: int
    name: str = "x"
    parts: tuple[int, ...] = field(default_factory=tuple)
    kept: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def twice(self) -> int:
        return 2 * self.size


@frozen
class _Derived(_Base):
    more: int = 3

    def __post_init__(self) -> None:
        assert self.size >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standard:
    size: int
    name: str = "x"
    parts: tuple[int, ...] = field(default_factory=tuple)
    kept: int | None = field(default=None, init=False, repr=False, compare=False)


def test_a_frozen_class_is_what_the_standard_decorator_makes() -> None:
    one, standard = _Base(size=1, parts=(2,)), _Standard(size=1, parts=(2,))
    assert repr(one) == repr(standard).replace("_Standard", "_Base")
    assert dataclasses.asdict(one) == dataclasses.asdict(standard)
    for ours, theirs in zip(dataclasses.fields(one), dataclasses.fields(standard), strict=True):
        for attribute in ("name", "type", "default", "default_factory", "init", "repr", "compare", "kw_only"):
            assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert dataclasses.is_dataclass(_Base)
    assert hash(one) == hash(standard)
    assert one.twice == 2


def test_equal_records_are_one_cache_key_and_kinds_differ() -> None:
    assert _Base(size=1) == _Base(size=1)
    assert _Base(size=1) != _Base(size=2)
    assert {_Base(size=1): "cached"}[_Base(size=1)] == "cached"
    assert _Base(size=1) != _Derived(size=1)
    hash_once_kept = _Base(size=1)
    object.__setattr__(hash_once_kept, "kept", 5)
    assert hash_once_kept == _Base(size=1)


def test_nothing_of_a_record_can_be_set() -> None:
    one = _Derived(size=1)
    for name in ("size", "more", "unheard_of"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, name, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.size
    assert not hasattr(one, "__dict__")


def test_a_kept_hash_stays_in_its_process() -> None:
    from ullage.hardware.catalogue import cluster

    one = cluster("4xdgx-h100")
    assert hash(one) == one._hash
    arrived = pickle.loads(pickle.dumps(one))
    assert arrived == one
    assert arrived._hash is None
    assert arrived.device._hash is None
    assert hash(arrived) == hash(one)


def test_a_record_is_replaced_copied_and_pickled() -> None:
    one = _Derived(size=1, more=4)
    assert dataclasses.replace(one, size=7) == _Derived(size=7, more=4)
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AssertionError):
        dataclasses.replace(one, size=-1)


def test_a_record_refuses_what_is_missing_unknown_or_without_a_name() -> None:
    for wrong in (lambda: _Base(), lambda: _Base(size=1, other=2), lambda: _Base(1), lambda: _Base(size=1, kept=2)):
        with pytest.raises(TypeError):
            wrong()


@frozen
class Kept:
    one: int
    two: str = "two"
    hashed: int | None = field(default=None, init=False, compare=False)


def test_replace_is_that_of_dataclasses() -> None:
    kept = Kept(one=1, two="other")
    object.__setattr__(kept, "hashed", 5)
    for changes in ({}, {"one": 2}, {"two": "x"}, {"one": 3, "two": "y"}):
        assert replace(kept, **changes) == dataclasses.replace(kept, **changes)
    assert replace(kept, one=2).hashed is None
    with pytest.raises(TypeError):
        replace(kept, three=3)
