"""Members are read and edited, and no other byte changes."""

import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import (
    MAX_DEPTH,
    MAX_MEMBERS,
    MAX_NUMBERS,
    MAX_VALUES,
    cut_member,
    parse_members,
    replace_member,
)

SPACE = st.text(" \t\n\r", max_size=3)
NUMBERS = st.sampled_from(
    [
        "0",
        "-0",
        "-0.0",
        "1.0",
        "1.00",
        "1e5",
        "1E+5",
        "0.1e-7",
        "12345678901234567890",
        "3.14159265358979323846",
    ]
)
STRINGS = st.sampled_from(
    [r'"\u00e9"', '"é"', r'"\/"', '"/"', r'"\ud83d\ude00"', '"😀"', r'"\"}"', r'"{\"a\":[,"']
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
VALUES = (
    NUMBERS
    | STRINGS
    | st.builds(json.dumps, PLAIN, ensure_ascii=st.booleans(), indent=st.none() | st.integers(0, 2))
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(
    ["model", "stream", "a,b", '"']
)


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, list[str]]:
    """The text of an object with random spaces and spellings, and its keys."""
    keys = draw(st.lists(KEYS, unique=True, max_size=5))
    members = []
    for key in keys:
        spelling = json.dumps(key, ensure_ascii=draw(st.booleans()))
        parts = (draw(SPACE), spelling, draw(SPACE), ":", draw(SPACE), draw(VALUES), draw(SPACE))
        members.append("".join(parts))
    inside = ",".join(members) if members else draw(SPACE)
    return f"{draw(SPACE)}{{{inside}}}{draw(SPACE)}", keys


def spellings(text: str) -> dict[str, str]:
    """Return the exact text of every member."""
    return {key: text[member.start : member.end] for key, member in parse_members(text).items()}


@given(objects())
def test_reads_the_same_members_as_the_standard_library(case):
    """Every member has the value that `json.loads` gives it, in the same order."""
    text, _ = case
    assert [(key, member.value) for key, member in parse_members(text).items()] == list(
        json.loads(text).items()
    )


@given(objects(), KEYS, VALUES, st.randoms())
def test_replacing_a_member_changes_that_member_only(case, new_key: str, value: str, chance: random.Random):
    """After a replacement one value differs, and every other member is spelt as before."""
    text, keys = case
    key = chance.choice([*keys, new_key])
    changed = replace_member(text, parse_members(text), key, value)
    assert json.loads(changed) == {**json.loads(text), key: json.loads(value)}
    before, after = spellings(text), spellings(changed)
    assert after.pop(key).endswith(value)
    before.pop(key, None)
    assert after == before


@given(objects(), st.randoms())
def test_replacing_an_existing_member_moves_no_byte_outside_of_its_value(case, chance: random.Random):
    """The text before and after the old value is the text before and after the new one."""
    text, keys = case
    if not keys:
        return
    members, key = parse_members(text), chance.choice(keys)
    changed = replace_member(text, members, key, '"new"')
    assert changed == text[: members[key].value_start] + '"new"' + text[members[key].end :]


@given(objects(), KEYS, st.randoms())
def test_cutting_a_member_removes_that_member_only(case, new_key: str, chance: random.Random):
    """After a cut one member is gone, and every other member is spelt as before."""
    text, keys = case
    key = chance.choice([*keys, new_key])
    changed = cut_member(text, parse_members(text), key)
    expected, before = json.loads(text), spellings(text)
    expected.pop(key, None)
    before.pop(key, None)
    assert list(json.loads(changed).items()) == list(expected.items())
    assert spellings(changed) == before


def test_removing_a_missing_member_returns_the_same_text():
    """A body without the member comes back byte for byte."""
    text = ' { "a" : 1.00 } '
    assert cut_member(text, parse_members(text), "metrics") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"metrics":1}', "{}"),
        ('{"metrics":1,"a":2}', '{"a":2}'),
        ('{"a":2,"metrics":1}', '{"a":2}'),
        ('{"a":2 , "metrics":1 , "b":3}', '{"a":2 ,"b":3}'),
    ],
)
def test_cutting_leaves_no_comma_behind(text: str, expected: str):
    """For a member that is first, last, in the middle or alone."""
    assert cut_member(text, parse_members(text), "metrics") == expected


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', r'{"a":1,"\u0061":2}', '{"":0,"":0}'])
def test_a_key_given_twice_is_refused(text: str):
    """Two parsers could use different values; every spelling of the key is refused."""
    with pytest.raises(InvalidRequestError):
        parse_members(text)


def test_a_key_may_repeat_at_different_depths():
    """Only the top level is read, so `{"a": {"a": 1}}` is no duplicate."""
    assert parse_members('{"a":{"a":1}}')["a"].value == {"a": 1}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"x":', "}")])
def test_nesting_is_limited(opening: str, closing: str):
    """The deepest body allowed is read, one level more is refused with a message that says so."""
    inner = MAX_DEPTH - 1
    parse_members('{"a":' + opening * inner + "1" + closing * inner + "}")
    with pytest.raises(InvalidRequestError, match="deeper"):
        parse_members('{"a":' + opening * (inner + 1) + "1" + closing * (inner + 1) + "}")


@pytest.mark.parametrize("value", ["0", '""', "[]", "{}"])
def test_the_number_of_values_is_limited(value: str):
    """A body of a few megabytes must not become gigabytes of lists."""
    many = f'{{"a":[{",".join([value] * (MAX_VALUES + 1))}]}}'
    with pytest.raises(InvalidRequestError, match="100,000 values"):
        parse_members(many, max_numbers=0)


@pytest.mark.parametrize("separator", [",", ", ", ",\n"])
def test_a_prompt_may_be_a_long_list_of_tokens(separator: str):
    """Also beside as many other values as a body may hold, but no list of something else."""
    tokens = separator.join(["12"] * MAX_NUMBERS)
    others = ",".join(["[]"] * (MAX_VALUES // 2 - 2))
    assert len(parse_members(f'{{"a":[{tokens}],"b":[{others}]}}')["a"].value) == MAX_NUMBERS
    for more in (f'{{"a":[{tokens},1],"b":[{others},[]]}}', f'{{"a":[{tokens}],"b":[{others},[],[],[]]}}'):
        with pytest.raises(InvalidRequestError, match="100,000 values"):
            parse_members(more)


def test_a_workers_answer_may_hold_any_number_of_values():
    many = f'{{"a":[{",".join("0" * (MAX_VALUES + 1))}]}}'
    assert len(parse_members(many, bounded=False)["a"].value) == MAX_VALUES + 1


def test_commas_inside_strings_are_no_values():
    """A prompt may be a table of any length."""
    prompt = "1,2,[x],{y}\\n" * MAX_VALUES
    assert len(parse_members(f'{{"prompt":"{prompt}"}}')["prompt"].value) == 12 * MAX_VALUES


def test_the_number_of_members_is_limited():
    """As many as allowed are read, one more is refused."""
    members = [f'"m{number}":0' for number in range(MAX_MEMBERS + 1)]
    assert len(parse_members("{" + ",".join(members[:-1]) + "}")) == MAX_MEMBERS
    with pytest.raises(InvalidRequestError, match="1000 members"):
        parse_members("{" + ",".join(members) + "}")


@pytest.mark.parametrize(
    "bomb",
    [
        '"' + '\\"' * 1_000_000,
        '"' * 2_000_001,
        '"' + "\\" * 2_000_000,
        '"' + "x[" * 1_000_000,
        "[" * 900_000 + '"',
        '"a' * 1_000_000 + "\\",
    ],
    ids=["escapes", "quotes", "backslashes", "one string", "openings", "odd quotes"],
)
def test_no_text_takes_more_than_its_length_in_time_and_memory(bomb: str):
    """Each of these once took quadratic time to scan strings."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            parse_members('{"a":[' + "[]," * MAX_DEPTH + bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(bomb)


def test_brackets_inside_strings_do_not_count_as_nesting():
    """A prompt full of brackets is text, not depth."""
    prompt = '[{\\"' * 10_000
    assert len(parse_members(f'{{"prompt":"{prompt}"}}')["prompt"].value) == 30_000


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", "}", "[]", "null", "1", '"{}"', "{}{}", "{} x", '{"a"}', '{"a":}', '{"a":1,}',
        "{,}", "{'a':1}",
        '{"a":1 "b":2}', '{"a":01}', '{"a":.5}', '{"a":"\n"}', '{"a":"\\x"}', '{"a":tru}', "\ufeff{}",
        "{a:1}",
        '{"a":' + "9" * 5000 + "}", '{"a":' + "[" * 100_000, "]" * 300 + "[" * 100_000, '{"a',
    ],
)  # fmt: skip
def test_text_that_is_not_a_json_object_is_refused(text: str):
    """With an invalid request error, never an internal one."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_members(text)
    assert caught.value.code == "invalid_json"


@given(st.text() | st.text('{}[]":,\\ \n01eE.-tfn', max_size=40))
def test_garbage_raises_the_one_error(text: str):
    """Any text gives the members that `json.loads` sees, or `InvalidRequestError`."""
    try:
        members = parse_members(text)
    except InvalidRequestError:
        return
    assert {key: member.value for key, member in members.items()} == json.loads(text)


@given(objects(), st.integers(0, 200), st.text(max_size=2))
def test_a_damaged_body_raises_the_one_error(case, at: int, damage: str):
    """A body with a few characters changed is parsed or refused."""
    text, _ = case
    broken = text[:at] + damage + text[at + 1 :]
    try:
        parse_members(broken)
    except InvalidRequestError:
        return
    json.loads(broken)


def test_refusal_names_the_position_without_quoting_the_body():
    """The message gives a position, never the text around it, which may be a prompt."""
    with pytest.raises(InvalidRequestError, match=r"character 22") as caught:
        parse_members('{"prompt":"secret",   oops}')
    assert "secret" not in str(caught.value)
