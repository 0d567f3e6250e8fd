"""A worker's errors, in the shape that clients expect."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.error_text import encode_error, openai_error, worker_error

JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["error", "message", "detail", "param", "code", "type"]), inner)
    ),
    max_leaves=8,
)


def normalise_error(text: str, status: int) -> str:
    """Return a worker's error in the shape of OpenAI's."""
    return encode_error(openai_error(worker_error(text, status)))


def error_of(text: str, status: int = 400) -> dict:
    """Return the normalised error."""
    content = json.loads(normalise_error(text, status))
    assert list(content) == ["error"]
    return content["error"]


def test_vllm_error_keeps_its_message_and_loses_its_number():
    """vLLM sends `code` as a number; clients want a string or null."""
    error = {"message": "bad temperature", "type": "BadRequestError", "param": "temperature", "code": 400}
    assert error_of(json.dumps({"error": error})) == {
        "message": "bad temperature",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": None,
    }


def test_a_code_that_is_a_string_is_kept():
    """Clients may depend on it."""
    assert error_of('{"error": {"message": "x", "code": "rate_limited"}}')["code"] == "rate_limited"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"object": "error", "message": "no envelope", "code": 400}', "no envelope"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"error": "just text"}', "just text"),
        ("plain text\n", "plain text"),
        ("", "The worker answered 400."),
        ("{}", "The worker answered 400."),
        ("[]", "The worker answered 400."),
        ("null", "The worker answered 400."),
        ('{"error": {"message": ""}}', "The worker answered 400."),
        ('{"error": {"message": "模型 😀"}}', "模型 😀"),
    ],
)
def test_worker_message_is_found_in_any_envelope(text: str, message: str):
    """With or without envelope, as JSON or not."""
    assert error_of(text)["message"] == message


def test_an_error_is_never_wrapped_twice():
    """What is in the right shape already stays as it is."""
    once = normalise_error('{"error": {"message": "x", "param": "p", "code": "c"}}', 400)
    assert normalise_error(once, 400) == once


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 4000 tokens",
        "The decoder prompt (length 3000) is longer than the maximum model length of 2048.",
    ],
)
def test_too_long_prompt_has_the_code_context_length_exceeded(message: str):
    """`context_length_exceeded` is what makes editors shorten their context."""
    assert (
        error_of(json.dumps({"error": {"message": message, "code": 400}}))["code"]
        == "context_length_exceeded"
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (499, "invalid_request_error"), (500, "server_error")],
)
def test_the_type_follows_the_status(status: int, kind: str):
    """Below 500 it is the request, from there on the server."""
    assert error_of("{}", status)["type"] == kind


def test_html_error_is_truncated():
    """A stack trace of a megabyte is no message."""
    assert len(error_of("x" * 10**6)["message"]) <= 2000


@given(JSON_VALUE.map(json.dumps) | st.text())
def test_every_error_has_the_four_members_and_can_be_sent(text: str):
    """For any answer of a worker, the client gets an error that it can parse, in UTF-8."""
    error = error_of(text)
    normalise_error(text, 500).encode()
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)


@pytest.mark.parametrize("text", [r'{"error": {"message": "\ud800"}}', "[" * 100_000, '{"error":' * 100_000])
def test_malformed_error_can_still_be_sent(text: str):
    """Half a surrogate pair or endless nesting must not turn a 400 into a crash."""
    normalise_error(text, 400).encode()
