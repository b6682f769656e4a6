"""JSON as people write it: what is read of it, and that an edit leaves every other character alone."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.errors import InvalidInput
from ullage.formats import jsonc
from ullage.formats.tree import flat, nested

NAMES = st.text("abc_", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
DOCUMENTS = st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=12).filter(
    lambda value: isinstance(value, dict)
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)

COMMENTED = """\
// for the big machine
{
\t"zero_optimization": {   /* shards */
\t\t"stage": 2,  # for now
\t\t"overlap_comm": true,
\t},
\t"bf16": {"enabled": true},
}
"""


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS, st.sampled_from([None, 2, 4, "\t"]))
def test_strict_json_is_read_as_json_reads_it(document, indent) -> None:
    text = json.dumps(document, indent=indent)
    tree = jsonc.parse(text, "x.json")
    assert dict(tree.leaves) == flat(document, "")
    assert not tree.complaints


def test_comments_and_trailing_commas_are_read_and_complained_of() -> None:
    tree = jsonc.parse(COMMENTED, "x.json")
    assert nested(tree.leaves) == {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}}
    assert [line for line, what in tree.complaints if what == "a comment"] == [1, 3, 4]
    assert [line for line, what in tree.complaints if what == "a trailing comma"] == [5, 7]
    assert tree.lines["zero_optimization", "stage"] == 4


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS, PATHS, VALUES, st.sampled_from([None, 2, "\t"]))
def test_put_sets_one_leaf_and_nothing_else(document, path, value, indent) -> None:
    before = flat(document, "")
    for length in range(1, len(path)):
        if path[:length] in before:
            return  # a leaf stands where a section must be
    if any(leaf[: len(path)] == path and leaf != path for leaf in before):
        return  # a section stands where the leaf must be
    text = json.dumps(document, indent=indent)
    after = jsonc.parse(jsonc.put(text, path, value), "x.json").leaves
    assert dict(after) == {**before, path: value}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS, st.data(), st.sampled_from([None, 2, "\t"]))
def test_drop_takes_one_leaf_and_nothing_else(document, data, indent) -> None:
    before = flat(document, "")
    if not before:
        return
    path = data.draw(st.sampled_from(sorted(before)))
    after = dict(jsonc.parse(jsonc.drop(json.dumps(document, indent=indent), path), "x.json").leaves)
    emptied = {leaf: value for leaf, value in after.items() if value == {} and leaf not in before}
    assert {leaf: value for leaf, value in after.items() if leaf not in emptied} == {
        leaf: value for leaf, value in before.items() if leaf != path
    }


def test_an_edit_keeps_comments_and_indentation() -> None:
    text = jsonc.put(COMMENTED, ("zero_optimization", "stage"), 3)
    assert text == COMMENTED.replace('"stage": 2', '"stage": 3')
    text = jsonc.put(COMMENTED, ("zero_optimization", "offload_optimizer", "device"), "cpu")
    added = '\t\t"overlap_comm": true,\n\t\t"offload_optimizer": {\n\t\t\t"device": "cpu"\n\t\t},'
    assert text == COMMENTED.replace('\t\t"overlap_comm": true,', added)
    assert jsonc.drop(COMMENTED, ("zero_optimization", "stage")).splitlines()[3] == '\t\t"overlap_comm": true,'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("   \n", "is empty"),
        ("[1]", "no keys at the top"),
        ('{"a": 1', "ends too early"),
        ('{"a": tru}', "tru is no value"),
        ('{"a": NaN}', "NaN is no value"),
        ('{"a" 1}', "':' is missing"),
        ('{"a": 1 "b": 2}', "',' is missing"),
        ('{"a": 1}\n{', "line 2"),
        ('{"a": 1, "a": 2}', "written twice"),
        ("{'a': 1}", "key in double quotes"),
        ('{"a": ' + "[" * 3000 + "]" * 3000 + "}", "nested deeper"),
        ('{"a": ' + "1" * 5000 + "}", "is no value"),
    ],
)
def test_what_is_no_json(text: str, part: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(part)):
        jsonc.parse(text, "x.json")
