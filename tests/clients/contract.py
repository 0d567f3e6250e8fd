"""
Checks of every answer to a client: OpenAI's own schemas, and the headers and frames of the contract.

The schemas are read more loosely than they are written, in three ways, each of which the typed clients
share: a member that may be absent may be null; members of a `oneOf` may overlap, as they are open; and
`DEVIATIONS`.
"""

import copy
import json
import re
from array import array
from base64 import b64decode
from collections.abc import Iterable, Iterator
from functools import cache
from http import HTTPStatus
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from tests.clients.cut import SCHEMAS_AT
from tests.clients.tap import Exchange

ANSWERS: tuple[tuple[str, str, str], ...] = (
    ("POST", r"/v1/chat/completions", "CreateChatCompletionResponse"),
    ("POST", r"/v1/completions", "CreateCompletionResponse"),
    ("POST", r"/v1/responses", "Response"),
    ("POST", r"/v1/embeddings", "CreateEmbeddingResponse"),
    ("GET", r"/v1/models", "ListModelsResponse"),
    ("GET", r"/v1/models/.+", "Model"),
    ("GET", r"/v1/files", "ListFilesResponse"),
    ("POST", r"/v1/files", "OpenAIFile"),
    ("GET", r"/v1/files/[^/]+", "OpenAIFile"),
    ("DELETE", r"/v1/files/[^/]+", "DeleteFileResponse"),
    ("GET", r"/v1/batches", "ListBatchesResponse"),
    ("POST", r"/v1/batches", "Batch"),
    ("GET", r"/v1/batches/[^/]+", "Batch"),
    ("POST", r"/v1/batches/[^/]+/cancel", "Batch"),
)
"""Schema of an answer, by method and path."""
FRAMES = {
    "/v1/chat/completions": "CreateChatCompletionStreamResponse",
    "/v1/completions": "CreateCompletionResponse",
    "/v1/responses": "ResponseStreamEvent",
}
"""Schema of each frame of a stream, by path."""
CONTENT = re.compile(r"/v1/files/[^/]+/content")
"""A file as it is, which no schema describes."""
OWN = "/v1/messages"
"""Not OpenAI's: the Anthropic client itself is strict here, and errors are of another shape."""
DEVIATIONS: dict[tuple[str, str], str] = {
    ("CreateCompletionResponse", "finish_reason"): "null until the last frame; the description has no frames",
    ("CreateChatCompletionResponse", "refusal"): "not in `logprobs`, since the worker does not mark refusals",
    (
        "CreateChatCompletionStreamResponse",
        "refusal",
    ): "not in `logprobs`, since the worker does not mark refusals",
    ("Response", "error"): "omitted, as there is none",
    ("OutputTextContent", "logprobs"): "null where they were not asked for",
}
"""Required members that may be missing or null all the same, by schema and name, and what vLLM does."""
ENDS = {"response.completed", "response.failed", "response.incomplete", "error"}
DONE = "[DONE]"


def problems(exchanges: Iterable[Exchange]) -> list[str]:
    """Everything wrong with these answers, each in one line with its route."""
    return [
        f"{exchange.method} {exchange.path} {exchange.status}: {problem}"
        for exchange in exchanges
        if exchange.status
        for problem in _problems(exchange)
    ]


def mismatch(schema: str, value: Any) -> str | None:
    """How a value breaks a schema of the document; None if it does not."""
    error = best_match(_validator(schema).iter_errors(value))
    return error and f"not {schema}: {error.json_path}: {error.message[:300]}"


def _problems(exchange: Exchange) -> Iterator[str]:
    if not exchange.headers.get("x-request-id"):
        yield "no x-request-id"
    if exchange.is_stream:
        yield from _stream_problems(exchange)
        return
    if CONTENT.fullmatch(exchange.path) and exchange.status == HTTPStatus.OK:
        return
    if exchange.headers.get("content-type") != "application/json":
        yield f"content type {exchange.headers.get('content-type')}"
        return
    if not exchange.complete:
        return
    answer = json.loads(exchange.body)
    if exchange.status >= HTTPStatus.BAD_REQUEST:
        yield from _refusal_problems(exchange, answer)
    elif not exchange.path.startswith(OWN):
        yield from _given(mismatch(_answer_schema(exchange), _unpacked(exchange, answer)))


def _refusal_problems(exchange: Exchange, answer: Any) -> Iterator[str]:
    if exchange.path.startswith(OWN):
        if answer.get("type") != "error" or set(answer.get("error", {})) != {"type", "message"}:
            yield f"no error as Anthropic's clients parse it: {answer}"
    else:
        yield from _given(mismatch("ErrorResponse", answer))
    if "x-should-retry" not in exchange.headers:
        yield "no x-should-retry"


def _stream_problems(exchange: Exchange) -> Iterator[str]:
    if (
        exchange.headers.get("cache-control") != "no-cache"
        or exchange.headers.get("x-accel-buffering") != "no"
    ):
        yield "a stream that proxies may keep back"
    events = list(exchange.events())
    if not events:
        if exchange.complete:
            yield "a stream without a frame"
        return
    if exchange.path.startswith(OWN):
        yield from (f"event {name} is {data.get('type')}" for name, data in events if name != data["type"])
        return
    schema = FRAMES[exchange.path]
    for name, data in events:
        if data != DONE:
            yield from _given(_frame_mismatch(schema, name, data))
    if exchange.complete:
        last_name, last = events[-1]
        if last != DONE and last_name not in ENDS:
            yield "a stream that ended without its last frame"
    if len({data["id"] for _, data in events if data != DONE and "id" in data}) > 1:
        yield "frames of one stream with different ids"


def _frame_mismatch(schema: str, name: str, data: Any) -> str | None:
    if "error" in data and schema != "ResponseStreamEvent":
        return mismatch("ErrorResponse", data)
    if schema != "ResponseStreamEvent":
        return mismatch(schema, data)
    if name != data.get("type"):
        return f"event {name} is {data.get('type')}"
    kind = _event_schemas().get(name)
    return mismatch(kind, data) if kind else f"event {name} is not in the document"


def _unpacked(exchange: Exchange, answer: Any) -> Any:
    """Base64 embeddings as numbers; the description does not cover base64."""
    if exchange.path == "/v1/embeddings" and json.loads(exchange.request).get("encoding_format") == "base64":
        for entry in answer["data"]:
            entry["embedding"] = array("f", b64decode(entry["embedding"], validate=True)).tolist()
    return answer


def _answer_schema(exchange: Exchange) -> str:
    return next(
        schema
        for method, path, schema in ANSWERS
        if method == exchange.method and re.fullmatch(path, exchange.path)
    )


def _given(problem: str | None) -> Iterator[str]:
    if problem:
        yield problem


@cache
def _schemas() -> dict[str, Any]:
    document = json.loads(SCHEMAS_AT.read_text(encoding="utf-8"))
    return {name: _loosened(schema, name) for name, schema in document["components"]["schemas"].items()}


@cache
def _event_schemas() -> dict[str, str]:
    """Schema of each event of a response's stream, by its type."""
    schemas = _schemas()
    names = [branch["$ref"].rpartition("/")[2] for branch in schemas["ResponseStreamEvent"]["anyOf"]]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


@cache
def _validator(schema: str) -> Draft202012Validator:
    document = DRAFT202012.create_resource({"components": {"schemas": _schemas()}})
    registry = Registry().with_resource("document", document)
    return Draft202012Validator({"$ref": f"document#/components/schemas/{schema}"}, registry=registry)


def _loosened(schema: Any, name: str) -> Any:
    if isinstance(schema, list):
        return [_loosened(value, name) for value in schema]
    if not isinstance(schema, dict):
        return schema
    made = {("anyOf" if part == "oneOf" else part): _loosened(value, name) for part, value in schema.items()}
    properties = made.get("properties")
    if isinstance(properties, dict):
        made["required"] = [member for member in made.get("required", ()) if (name, member) not in DEVIATIONS]
        required = set(made["required"])
        for member, value in properties.items():
            if member not in required or value.get("nullable"):
                properties[member] = {"anyOf": [copy.copy(value), {"type": "null"}]}
    return made
