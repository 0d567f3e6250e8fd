"""The lines of a batch's input: which are requests, and which problem the others have."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import InvalidRequestError
from appliance.gateway.batch.lines import MOST_PROBLEMS, InputCheck, LineCutter, parse_line

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


def line(custom_id="a", **changes):
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": BODY, **changes}
    return json.dumps({name: value for name, value in request.items() if value is not None}).encode()


def read(number, given):
    try:
        return parse_line(number, given, CHAT)
    except InvalidRequestError as error:
        return error


def check(*lines, most=1000):
    judged = InputCheck(most)
    for number, each in enumerate(lines, start=1):
        judged.add(number, read(number, each))
    judged.end()
    return judged


def test_request_body_is_kept_byte_for_byte():
    """Numbers, escapes, spaces and unknown members reach the worker untouched."""
    body = rb'{ "model":"demo", "messages" :[], "temperature":1.00, "x":"\u00e9\/" , "y":{"z":-0.0} }'
    read = parse_line(
        3, b'{"custom_id":"a","method":"POST","url":"%s","body": %s }' % (CHAT.encode(), body), CHAT
    )
    assert read.body == body
    assert (read.number, read.custom_id, read.model) == (3, "a", "demo")


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"not json", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"\xff{}", "invalid_json_line", None),
        (line(custom_id=None), "missing_required_parameter", "custom_id"),
        (line(method=None), "missing_required_parameter", "method"),
        (line(url=None), "missing_required_parameter", "url"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(custom_id=7), "invalid_custom_id", "custom_id"),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (line(custom_id="\ud800"), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/completions"), "invalid_url", "url"),
        (line(body=[1]), "invalid_body", "body"),
        (line(body={"messages": []}), "missing_required_parameter", "body.model"),
        (line(body={"model": "demo"}), "missing_required_parameter", "body.messages"),
        (line(body={**BODY, "stream": True}), "invalid_body", "body.stream"),
        (line(body={**BODY, "stream": []}), "invalid_body", "body.stream"),
        (line(priority=1), "unknown_parameter", "priority"),
    ],
)
def test_invalid_line_is_reported_with_its_number(text, code, param):
    (problem,) = check(line("first"), text).problems
    assert (problem.line, problem.code, problem.param) == (2, code, param)


def test_custom_id_must_be_unique():
    (problem,) = check(line("a"), line("b"), line("a")).problems
    assert (problem.line, problem.code) == (3, "duplicate_custom_id")


def test_a_good_file_has_no_problems():
    """Its lines are counted, and its model is known if all lines name the same one."""
    judged = check(line("a"), line("b"))
    assert (judged.problems, judged.total, judged.model) == ([], 2, "demo")
    assert check(line("a"), line("b", body={**BODY, "model": "other"})).model is None


def test_empty_file_is_refused():
    (problem,) = check().problems
    assert (problem.code, problem.line) == ("empty_file", None)


def test_a_file_with_too_many_requests_is_not_read_further():
    """The first line beyond the maximum is reported."""
    judged = check(line("a"), line("b"), line("c"), most=2)
    assert judged.has_enough
    assert (judged.problems[0].code, judged.problems[0].line) == ("too_many_requests", 3)


def test_number_of_reported_problems_is_limited():
    judged = InputCheck(10**6)
    for number in range(MOST_PROBLEMS):
        assert not judged.has_enough
        judged.add(number, read(number, b"x"))
    assert judged.has_enough


@given(
    st.lists(st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"")), max_size=8),
    st.integers(1, 7),
    st.booleans(),
)
def test_lines_do_not_depend_on_piece_boundaries(lines, size, ends):
    text = b"\n".join(lines) + (b"\n" if ends else b"")
    cutter, found = LineCutter(1000), []
    for start in range(0, len(text), size):
        found += cutter.feed(text[start : start + size])
    found += cutter.end()
    wanted = [(number, each) for number, each in enumerate(text.split(b"\n"), start=1) if each.strip()]
    assert found == wanted


@pytest.mark.parametrize(
    "pieces", [[b"ok\n" + b"x" * 11], [b"ok\n" + b"x" * 11 + b"\n"], [b"ok\nxxxxxx", b"xxxxx"]]
)
def test_endless_line_is_refused_early(pieces):
    cutter = LineCutter(10)
    with pytest.raises(InvalidRequestError) as caught:
        [list(cutter.feed(piece)) for piece in pieces]
    assert (cutter.number, caught.value.code) == (2, "line_too_long")


def test_required_members_depend_on_the_endpoint():
    for url, enough, missing in (
        ("/v1/embeddings", {"messages": []}, "body.input"),
        ("/v1/rerank", {"query": "a", "documents": []}, "body.query"),
    ):
        good, bad = (
            json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {"model": "demo", **more}})
            for more in (enough, {})
        )
        assert parse_line(1, good.encode(), url).model == "demo"
        with pytest.raises(InvalidRequestError) as caught:
            parse_line(1, bad.encode(), url)
        assert caught.value.param == missing
