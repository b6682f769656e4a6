import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.frozen import FrozenMap

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
