"""
Promises of `appliance.serving.dialects` about whole answers and errors, on what a real worker sent.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import InvalidRequestError, WorkerFailedError
from appliance.infra.json_members import parse_members
from appliance.serving.dialects.routes import CHAT, MESSAGES, POOLING, RESPONSES, ROUTES, dialect_at
from appliance.serving.error_text import ErrorText, anthropic_type, worker_error
from appliance.serving.usage import Usage
from tests.edits import edit_members
from tests.recorder import RECORDED_AT, REQUESTS

PATHS = {name: path for requests in REQUESTS.values() for name, (path, _) in requests.items()}
SCORES = ("rerank.json", "score.json", "rerank_by_likeness.json", "score_by_likeness.json")


def recorded(name: str) -> tuple[int, str]:
    """Return status and body of a recorded answer."""
    content = json.loads((RECORDED_AT / name).read_text(encoding="utf-8"))
    return content["status"], content["body"]


@pytest.mark.parametrize("name", ["chat.json", "text.json", "responses.json", "messages.json"])
def test_answer_reports_usage_and_loses_only_metrics(name: str):
    """Six tokens were asked for; every byte but those of `metrics` is the worker's."""
    status, text = recorded(name)
    dialect = ROUTES[PATHS[name]].dialect
    whole, cut = (dialect.read_answer(text, wants_metrics=wanted) for wanted in (True, False))
    assert (status, whole.text) == (200, text)
    assert (whole.usage.completion_tokens, whole.usage.estimated) == (6, False)
    assert whole.usage.prompt_tokens > 0
    assert whole.finish_reason in {"length", "max_output_tokens", "max_tokens"}
    before, after = parse_members(text), parse_members(cut.text)
    assert before.keys() - after.keys() <= {"metrics"}
    assert "metrics" not in after
    assert all(
        text[before[key].start : before[key].end] == cut.text[after[key].start : after[key].end]
        for key in after
    )


@pytest.mark.parametrize("name", ["embeddings.json", *SCORES])
def test_routes_without_completion_count_prompt_tokens(name: str):
    """The answer passes unchanged."""
    status, text = recorded(name)
    answer = ROUTES[f"/v1{PATHS[name].removeprefix('/v1')}"].dialect.read_answer(text, wants_metrics=False)
    assert (status, answer.text, answer.finish_reason) == (200, text, None)
    assert answer.usage == Usage(prompt_tokens=json.loads(text)["usage"]["prompt_tokens"])
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize("name", ["tokenize.json", "detokenize.json", "count_tokens.json"])
def test_tokenize_counts_no_tokens(name: str):
    """An exact 0, not an estimate."""
    status, text = recorded(name)
    answer = ROUTES[PATHS[name]].dialect.read_answer(text, wants_metrics=False)
    assert (status, answer.text, answer.usage) == (200, text, Usage())


@pytest.mark.parametrize(
    "text", ["", "{}", '{"usage":', '{"usage":null}', '{"usage":{"prompt_tokens":-1}}', "[1]"]
)
def test_usage_that_is_not_reported_is_an_estimate(text: str):
    assert POOLING.read_answer(text, wants_metrics=False).usage == Usage(estimated=True)


def test_usage_inside_a_document_is_not_counted():
    """Quotes inside a text are escaped; the answer's own usage comes first."""
    document = {"text": '"usage": {"prompt_tokens": 99}', "multi_modal": [{"usage": {"prompt_tokens": 98}}]}
    answer = {"id": '"usage":1', "usage": {"prompt_tokens": 3}, "results": [{"document": document}]}
    for spelt in (
        json.dumps(answer),
        json.dumps(answer, indent=1),
        json.dumps(answer, separators=(",", " : ")),
    ):
        usage = POOLING.read_answer(spelt, wants_metrics=False).usage
        assert usage in (Usage(prompt_tokens=3), Usage(estimated=True))


@given(
    st.text()
    | st.recursive(st.none() | st.integers(), st.lists).map(lambda value: json.dumps({"usage": value}))
)
def test_any_answer_of_a_worker_is_parsed_or_refused(text: str):
    """It is parsed, or counts as a failure of the worker."""
    for route in ROUTES.values():
        try:
            assert route.dialect.read_answer(text, wants_metrics=True).text == text
        except WorkerFailedError:
            assert route.dialect.generates


# Errors.


@pytest.mark.parametrize("name", [name for name in PATHS if name.startswith("too_long")])
def test_too_long_prompt_has_the_code_context_length_exceeded(name: str):
    """Editors shorten their context on this code; the worker's message is kept."""
    status, text = recorded(name)
    error = worker_error(text, status)
    assert (status, error.code, error.kind) == (400, "context_length_exceeded", "invalid_request_error")
    assert error.message in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("name", ["no_route.json", "no_chat.json"])
def test_route_that_the_worker_lacks_has_its_own_code(name: str):
    """`Not Found` would not explain it."""
    status, text = recorded(name)
    error = worker_error(text, status)
    assert (status, error.code) == (404, "route_not_served")
    assert "another task" in error.message


@pytest.mark.parametrize("name", [name for name in PATHS if name.startswith("invalid")])
def test_worker_refusal_reaches_the_client_in_its_dialect(name: str):
    """With the worker's message, and never wrapped twice."""
    status, text = recorded(name)
    dialect = ROUTES[PATHS[name]].dialect
    body = dialect.error_body(worker_error(text, status))
    assert status == 400
    content = json.loads(body)
    assert content["error"]["message"] == json.loads(text)["error"]["message"]
    assert content["error"]["type"] == "invalid_request_error"
    if dialect is MESSAGES:
        assert (list(content), list(content["error"])) == (["type", "error"], ["type", "message"])
    else:
        assert (list(content), list(content["error"])) == (["error"], ["message", "type", "param", "code"])
    again = worker_error(body, status)
    assert again.message == content["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (599, "api_error"),
    ],
)
def test_anthropic_error_type_follows_the_status(status: int, kind: str):
    """As its own API pairs them."""
    assert anthropic_type(status) == kind


@pytest.mark.parametrize(
    ("path", "is_anthropic"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messages/batches", True),
        ("/v1/messages2", False),
        ("/v1/chat/completions", False),
        ("/nowhere", False),
    ],
)
def test_error_has_the_shape_of_its_path(path: str, is_anthropic: bool):
    """Also for a path without a route."""
    body = json.loads(dialect_at(path).error_body(ErrorText(status=404, kind="x", message="m")))
    assert ("type" in body) is is_anthropic


# Requests.


def edited(dialect, body: dict, *, is_stream: bool) -> dict:
    text = json.dumps(body)
    members = parse_members(text)
    return json.loads(edit_members(text, members, dialect.edits(members, is_stream=is_stream)))


def test_usage_is_requested_where_it_is_optional():
    """Only on streams of chat and completions; other stream options are kept."""
    assert edited(CHAT, {"stream": True}, is_stream=True)["stream_options"] == {"include_usage": True}
    asked = {"stream_options": {"include_obfuscation": False}}
    assert edited(CHAT, asked, is_stream=True)["stream_options"] == {
        "include_obfuscation": False,
        "include_usage": True,
    }
    assert edited(CHAT, {"seed": 1}, is_stream=False) == {"seed": 1}
    for dialect in (MESSAGES, POOLING):
        assert edited(dialect, {"stream": True}, is_stream=True) == {"stream": True}
    assert "stream_options" not in edited(RESPONSES, {"stream": True}, is_stream=True)


@pytest.mark.parametrize("given_store", [{}, {"store": None}, {"store": False}])
def test_responses_are_sent_with_store_false(given_store: dict):
    """The default of `store` is true."""
    members = parse_members(json.dumps({"input": "x", **given_store}))
    RESPONSES.check(members)
    assert edited(RESPONSES, {"input": "x", **given_store}, is_stream=False)["store"] is False


@pytest.mark.parametrize(
    ("member", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://10.0.0.1/"}]}, "tools"),
        ({"tools": [{"type": "file_search"}]}, "tools"),
    ],
)
def test_stateful_response_members_are_refused_with_advice(member: dict, param: str):
    """A clear 400, instead of an answer without the earlier conversation."""
    with pytest.raises(InvalidRequestError) as refusal:
        RESPONSES.check(parse_members(json.dumps({"input": "x", **member})))
    assert (refusal.value.param, refusal.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "member",
    [
        {"background": False},
        {"previous_response_id": None},
        {"tools": []},
        {"tools": None},
        {
            "tools": [
                {"type": "function", "name": "f"},
                {"type": "custom", "name": "g"},
                "x",
                {"type": ["mcp"]},
            ]
        },
    ],
)
def test_null_and_false_members_are_accepted(member: dict):
    """Clients send their defaults."""
    RESPONSES.check(parse_members(json.dumps({"input": "x", **member})))


def test_mcp_servers_are_refused():
    MESSAGES.check(parse_members('{"messages":[],"mcp_servers":[]}'))
    with pytest.raises(InvalidRequestError, match="mcp_servers"):
        MESSAGES.check(parse_members('{"messages":[],"mcp_servers":[{"url":"https://example.org"}]}'))


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_embedding_encoding_must_be_float_or_base64(form: str | None):
    """OpenAI's two; vLLM's other encodings are not JSON."""
    POOLING.check(parse_members(json.dumps({"input": "x", "encoding_format": form})))
    with pytest.raises(InvalidRequestError, match="base64"):
        POOLING.check(parse_members('{"input":"x","encoding_format":"bytes"}'))


@pytest.mark.parametrize("options", [[], "x", 1, True])
def test_stream_options_must_be_an_object(options: object):
    """The gateway has to add to it."""
    with pytest.raises(InvalidRequestError, match="stream_options"):
        CHAT.check(parse_members(json.dumps({"stream_options": options})))
