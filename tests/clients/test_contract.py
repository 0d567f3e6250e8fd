"""
The contract checks find errors in answers, and accept correct answers.
"""

import json

import pytest

from tests.clients.contract import DEVIATIONS, mismatch, problems
from tests.clients.cut import ANSWERS, SCHEMAS_AT
from tests.clients.tap import Exchange

HEADERS = {"content-type": "application/json", "x-request-id": "1"}
STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-request-id": "1",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
CHUNK = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "demo",
    "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None, "logprobs": None}],
}
ERROR = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}


def chat(content: dict, **more) -> Exchange:
    return Exchange(
        method="POST",
        **{
            "path": "/v1/chat/completions",
            "status": 200,
            "headers": HEADERS,
            "body": json.dumps(content).encode(),
            "complete": True,
            **more,
        },
    )


def stream(*frames: str, **more) -> Exchange:
    body = "".join(f"data: {frame}\n\n" for frame in frames).encode()
    return chat({}, **{"headers": STREAM, "body": body, **more})


def whole(**more) -> dict:
    message = {"role": "assistant", "content": "x", "refusal": None, "audio": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "demo",
        "choices": [choice],
        "usage": usage,
        **more,
    }


def test_answers_that_keep_to_the_document_pass():
    """Members the document does not know, and null for what may be absent, are fine."""
    assert problems([chat(whole(metrics={}, service_tier=None))]) == []
    assert problems([stream(json.dumps(CHUNK), "[DONE]")]) == []
    assert problems([stream(json.dumps(CHUNK), complete=False)]) == []
    assert problems([stream(json.dumps(CHUNK), json.dumps(ERROR), "[DONE]")]) == []


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (chat(whole(object="text_completion")), "object"),
        (chat(whole(created="now")), "created"),
        (chat(whole(choices=[{"index": 0}])), "choices"),
        (chat(ERROR), "CreateChatCompletionResponse"),
        (chat({"detail": "no"}, status=404, headers={**HEADERS, "x-should-retry": "false"}), "error"),
        (chat({"error": {**ERROR["error"], "code": 400}}, status=400), "code"),
        (chat(ERROR, status=400), "x-should-retry"),
        (chat(ERROR, status=404), "x-should-retry"),
        (chat(whole(), headers={"content-type": "application/json"}), "x-request-id"),
        (chat(whole(), headers={**HEADERS, "content-type": "text/html"}), "content type"),
        (stream(json.dumps({**CHUNK, "object": "chat"}), "[DONE]"), "object"),
        (stream(json.dumps(CHUNK)), "last frame"),
        (stream(json.dumps(CHUNK), json.dumps({**CHUNK, "id": "d"}), "[DONE]"), "different ids"),
        (stream(json.dumps({"error": {"message": "no"}}), "[DONE]"), "ErrorResponse"),
        (stream(headers=STREAM), "without a frame"),
        (stream("[DONE]", headers={**STREAM, "cache-control": "public"}), "keep back"),
    ],
)
def test_answers_that_do_not_are_named(exchange, words):
    """Each error is one line with the route."""
    found = problems([exchange])
    assert found
    assert all(line.startswith("POST /v1/chat/completions") for line in found)
    assert any(words in line for line in found), found


def test_events_of_a_response_are_checked_by_their_type():
    """The name of an event is its type, and its type is one the document knows."""
    event = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0}
    event |= {"content_index": 0, "delta": "x", "sequence_number": 1, "logprobs": []}

    def sent(name: str, data: dict) -> list[str]:
        body = f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
        exchange = stream(body=body, complete=False)
        exchange.path = "/v1/responses"
        return problems([exchange])

    assert sent(event["type"], event) == []
    assert "sequence_number" in sent(event["type"], {**event, "sequence_number": "1"})[0]
    assert "is response.output_text.delta" in sent("response.created", event)[0]
    assert "not in the document" in sent("response.new", {**event, "type": "response.new"})[0]


def test_the_schemas_are_those_of_the_document():
    """The cut kept every answer, and every deviation names a member that is required there."""
    schemas = json.loads(SCHEMAS_AT.read_text())["components"]["schemas"]
    assert set(ANSWERS) <= set(schemas)
    for schema, member in DEVIATIONS:
        assert f'"{member}"' in json.dumps(schemas[schema])
        assert mismatch(schema, {}) is not None


def test_errors_for_anthropics_clients_have_their_own_shape():
    """And OpenAI's is wrong there."""
    headers = {**HEADERS, "x-should-retry": "false"}

    def sent(content: dict) -> list[str]:
        return problems([chat(content, path="/v1/messages", status=400, headers=headers)])

    assert sent({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}) == []
    assert "Anthropic" in sent(ERROR)[0]


def test_packed_embeddings_are_unpacked_where_they_were_asked_for():
    """Text in place of requested numbers is an error."""
    packed = {"object": "embedding", "index": 0, "embedding": "AACAPwAAAEA="}
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    answer = {"object": "list", "model": "demo", "data": [packed], "usage": usage}

    def sent(**asked: str) -> list[str]:
        request = json.dumps({"model": "demo", "input": "x", **asked}).encode()
        return problems([chat(answer, path="/v1/embeddings", request=request)])

    assert sent(encoding_format="base64") == []
    assert "embedding" in sent()[0]
