"""Lines of the output and the error file, and which answers are retried."""

import json

import pytest

from appliance.gateway.batch.results import MOST_TRIES, LineAnswer, answered, never_run, should_try_again


def answer(status=200, body='{"id":"c"}'):
    return LineAnswer(request_id="01ARZ", status=status, body=body)


def test_answer_is_written_byte_for_byte():
    result = answered(4, 'a "b"', answer(body='{"n" : 1.00e0,"x":"\\u00e9"}'))
    assert result.succeeded
    assert '"body": {"n" : 1.00e0,"x":"\\u00e9"}' in result.line
    assert json.loads(result.line) == {
        "id": "batch_req_01ARZ",
        "custom_id": 'a "b"',
        "response": {"status_code": 200, "request_id": "01ARZ", "body": {"n": 1.0, "x": "é"}},
        "error": None,
    }


def test_an_answer_over_several_lines_becomes_one():
    """Whatever a worker's JSON looks like, a result is one line."""
    result = answered(1, "a", answer(body='{\r\n "id":\n"c"\n}\n'))
    assert "\n" not in result.line
    assert "\r" not in result.line
    assert json.loads(result.line)["response"]["body"] == {"id": "c"}


def test_answer_that_is_not_json_is_a_failure():
    result = answered(1, "a", answer(body="<html>"))
    assert not result.succeeded
    assert json.loads(result.line)["response"]["status_code"] == 502


def test_a_refused_line_goes_to_the_error_file_with_its_answer():
    """OpenAI's form: a response with its status, and `error` null."""
    result = answered(1, "a", answer(status=400, body='{"error":{"message":"bad"}}'))
    assert not result.succeeded
    line = json.loads(result.line)
    assert (line["response"]["status_code"], line["error"]) == (400, None)


def test_unfinished_line_has_a_reason():
    result = never_run(9, "z", line_id="01B", code="batch_expired", message="Too late.")
    assert json.loads(result.line) == {
        "id": "batch_req_01B",
        "custom_id": "z",
        "response": None,
        "error": {"code": "batch_expired", "message": "Too late."},
    }
    assert (result.number, result.succeeded) == (9, False)


def test_line_over_a_limit_is_not_retried():
    """It would be refused until the window ends, and block the others."""
    too_large = LineAnswer(request_id="r", status=429, body="{}", may_pass=False)
    assert not should_try_again(too_large, 1)


@pytest.mark.parametrize(
    ("status", "tries", "again"),
    [
        (200, 1, False),
        (400, 1, False),
        (404, 1, False),
        (429, 1000, True),
        (503, 1000, True),
        (502, 1, True),
        (500, MOST_TRIES - 1, True),
        (504, MOST_TRIES, False),
    ],
)
def test_temporary_refusals_are_retried_and_failures_three_times(status, tries, again):
    """Limits and missing workers cost only time; a line that breaks workers must end."""
    assert should_try_again(answer(status=status), tries) is again
