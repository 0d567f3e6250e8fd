"""Several members are edited at once, and no other byte changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.infra.json_members import parse_members
from tests.edits import edit_members

KEYS = st.sampled_from(["model", "a", "b", "priority", "cache_salt", "stream_options"])
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4)
OBJECTS = st.dictionaries(KEYS, VALUES).map(lambda made: {"model": "demo", **made})
EDITS = st.dictionaries(KEYS.filter(lambda key: key != "model"), st.none() | VALUES.map(json.dumps))


@given(OBJECTS, EDITS, st.sampled_from([(",", ":"), (" , ", " :  ")]))
def test_only_edited_members_change(made: dict, edits: dict, separators):
    """For members that are replaced, removed or added, in any order."""
    text = json.dumps(made, separators=separators)
    before = parse_members(text)
    changed = edit_members(text, before, edits)
    after = parse_members(changed)
    expected = {key: value for key, value in made.items() if edits.get(key, "") is not None}
    expected |= {key: json.loads(value) for key, value in edits.items() if value is not None}
    assert {key: member.value for key, member in after.items()} == expected
    for key in made.keys() - edits.keys():
        old, new = before[key], after[key]
        assert changed[new.start : new.end] == text[old.start : old.end]


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ({}, ' {"a" : 1.00, "b":2 }'),
        ({"c": "3"}, ' {"c":3,"a" : 1.00, "b":2 }'),
        ({"a": "4"}, ' {"a" : 4, "b":2 }'),
        ({"b": None}, ' {"a" : 1.00}'),
        ({"a": None, "b": "5", "c": "6", "d": None}, ' {"c":6,"b":5 }'),
    ],
)
def test_edits_keep_all_other_bytes(edits: dict, expected: str):
    """Spaces and number spellings of the client stay."""
    text = ' {"a" : 1.00, "b":2 }'
    assert edit_members(text, parse_members(text), edits) == expected
