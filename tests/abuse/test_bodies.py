"""
The gateway answers or refuses a request with any body; errors have one shape, and never status 500.

Thousands of bodies go straight into the application, hundreds over a real socket.  What is not refused
reaches a scripted worker, so the whole way there and back is under test.
"""

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from tests.abuse.gateway_under_test import MIB
from tests.fakes import MODEL, FakeWorker
from tests.leaks import PROMPT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]
GOOD: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "prompt": PROMPT, "input": PROMPT}
MEMBERS = (
    "model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "n", "min_p", "logit_bias", "temperature", "chat_template",
    "chat_template_kwargs", "tools", "tool_choice", "response_format", "user", "priority", "metadata",
    "store", "previous_response_id", "system", "query", "documents", "encoding_format", "dimensions",
    "logprobs", "input_file_id", "endpoint", "completion_window", "instructions", "max_output_tokens",
    "thinking", "best_of", "echo", "stop", "service_tier", "cache_salt",
)  # fmt: skip
HEADERS = (
    "authorization", "content-type", "content-length", "x-request-id", "x-appliance-speculation",
    "x-appliance-metrics", "x-api-key", "anthropic-version", "accept-encoding", "expect", "idempotency-key",
    "openai-organization", "traceparent", "content-encoding", "transfer-encoding",
)  # fmt: skip
ANY_TEXT = st.text(st.characters(), max_size=12)
"""Lone surrogates included, as `\\ud800` spells them."""
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | ANY_TEXT
    | st.sampled_from(
        ["", MODEL, "user", "system", "auto", "true", "1e999", "\x00", "\u2028", "data: [DONE]"]
    )
)
ROLES = st.sampled_from(["user", "system", "developer", "assistant", "tool", "", None, 3, ["user"]])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(ANY_TEXT | st.sampled_from(["role", "content", "type", "text"]), inner, max_size=4)
        | st.lists(st.fixed_dictionaries({"role": ROLES, "content": inner}), max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A request with some members of the wrong type, perhaps damaged on the way."""
    wrong = draw(st.dictionaries(st.sampled_from(MEMBERS) | ANY_TEXT, VALUES, max_size=4))
    members = {**GOOD, **wrong}
    for name in draw(st.lists(st.sampled_from(sorted(members)), max_size=2)):
        members.pop(name, None)
    body = json.dumps(members, ensure_ascii=True).encode()
    if draw(st.booleans()):
        return body
    at = draw(st.integers(0, len(body)))
    damage = draw(
        st.binary(max_size=3) | st.sampled_from([b"", b'"', b"{", b"]", b"\\", b"\xff", b",", b"\x00"])
    )
    return draw(
        st.sampled_from([body[:at], body[:at] + damage + body[at:], body[:at] + damage + body[at + 1 :]])
    )


LARGE = 2**20
"""Types that the client library of these tests takes for files."""


def in_place_of_messages(value: bytes) -> bytes:
    """A chat whose messages are this text of JSON, or what should be."""
    return b'{"model":"%s","messages":%s}' % (MODEL.encode(), value)


SPECIAL = [
    b"",
    b"null",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00}\x00",
    in_place_of_messages(b"NaN"),
    in_place_of_messages(b"[-Infinity]"),
    in_place_of_messages(b"9" * 5000),
    in_place_of_messages(b"1e999999"),
    in_place_of_messages(b"-" + b"0" * 10_000),
    in_place_of_messages(b'["\\ud800"]'),
    in_place_of_messages(b'["\\udfff\\ud800"]'),
    in_place_of_messages(b'["\xed\xa0\x80"]'),
    in_place_of_messages(b'["\x00"]'),
    in_place_of_messages(b"[" * 1000 + b"]" * 1000),
    in_place_of_messages(b'{"a":' * 1000 + b"0" + b"}" * 1000),
    in_place_of_messages(b"[" * 100_000),
    in_place_of_messages(b"[]],[[" * 100_000),
    in_place_of_messages(b"[" + b"[]," * 1_100_000 + b"0]"),
    in_place_of_messages(b'"' + b'[\\"' * 100_000 + b'"'),
    in_place_of_messages(b"[]") * 2,
    in_place_of_messages(b'[],"model":"other"'),
    in_place_of_messages(b'[],"mod\\u0065l":"other"'),
    in_place_of_messages(b'[],"stream":true,"stream_options":{"include_usage":NaN}'),
    in_place_of_messages(b'[],"stream":true,"stream_options":{"\\ud800":1}'),
    in_place_of_messages(b'[],"logit_bias":{"1":1e400},"min_p":"Infinity","temperature":"nan"'),
    in_place_of_messages(b'[],"chat_template_kwargs":' + b"[" * 150 + b"]" * 150),
    in_place_of_messages(b"[]," + b",".join(b'"m%d":0' % number for number in range(2000))),
    b'{"model":"\\ud800","messages":[]}',
    b'{"model":"' + b"x" * 100_000 + b'","messages":[]}',
]


def posts(app: Any) -> list[str]:
    """Every path of the API that takes a body from a tenant."""
    found = [
        route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())
    ]
    return [path for path in found if path.startswith("/v1/")]


async def ask(
    app: Any, path: str, body: bytes, headers: list[tuple[bytes, bytes]], method: str = "POST"
) -> tuple[int, bytes]:
    """Call the application itself, as the server would."""
    sent: list[dict[str, Any]] = []
    read, answered = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode("utf-8", "replace"), "query_string": b"", "root_path": "", "scheme": "http",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080), "headers": headers, "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    answered.set()
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def assert_answered_or_refused(status: int, body: bytes, *secrets: str) -> None:
    """No 500; an error has the four keys and no content of the request."""
    assert status != 500, body
    assert 200 <= status < 600
    if status < 400:
        return
    content = json.loads(body)
    error = content["error"]
    if content.get("type") == "error":  # Anthropic's shape, which its clients parse
        assert {"type", "message"} <= set(error)
    else:
        assert list(content) == ["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert isinstance(error["code"], str | None)
        assert isinstance(error["param"], str | None)
    assert isinstance(error["message"], str)
    assert error["message"]
    for secret in secrets:
        assert secret not in error["message"]


def headers_for(key: str, body: bytes) -> list[tuple[bytes, bytes]]:
    """Headers of a client."""
    return [
        (b"authorization", b"Bearer " + key.encode()),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]


async def has_worker(running) -> None:
    """Poll the worker again if it was excluded: it does not implement every dialect."""
    if not running.pool.any_healthy():
        await running.control.tick()


@pytest.fixture
def app(running) -> Any:
    """The application of a running gateway."""
    return running.server.config.app


IN_PROCESS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(IN_PROCESS, max_examples=1500)
@given(body=bodies() | st.binary(max_size=80), choice=st.integers(0, 10**6))
async def test_no_body_is_a_500_on_any_route(running, app, body: bytes, choice: int):
    """Wrong types in every member the gateway knows, and damage in the middle of them."""
    paths = posts(app)
    assert {CHAT, TEXT} <= set(paths)
    await has_worker(running)
    status, answer = await ask(app, paths[choice % len(paths)], body, headers_for(running.key, body))
    assert_answered_or_refused(status, answer, PROMPT, running.key)


async def test_no_bomb_or_oddity_is_a_500_on_any_route(running, app):
    """Depth, size, spelling: each of them on each route."""
    for path in posts(app):
        for body in SPECIAL:
            await has_worker(running)
            status, answer = await ask(app, path, body, headers_for(running.key, body))
            assert_answered_or_refused(status, answer, running.key)
    assert (await running.post(GOOD)).status == 200


@settings(IN_PROCESS, max_examples=400)
@example(headers=[("authorization", b"Bearer \xff\xfe")], path="/v1/models/\ud800")
@example(headers=[("content-length", b"\xb2")], path=CHAT)
@example(headers=[("content-length", b"9" * 5000)], path=CHAT)
@given(
    headers=st.lists(st.tuples(st.sampled_from(HEADERS), st.binary(max_size=40)), max_size=4),
    path=st.sampled_from([CHAT, TEXT, "/v1/models", "/v1/models/x", "/admin/v1/status"])
    | st.text(max_size=12).map("/v1/{}".format),
)
async def test_no_header_and_no_path_is_a_500(running, app, headers: list[tuple[str, bytes]], path: str):
    """Also twice, and not in ASCII."""
    body = json.dumps(GOOD).encode()
    given_ = {name for name, _ in headers}
    usual = [(name, value) for name, value in headers_for(running.key, body) if name.decode() not in given_]
    sent = usual + [(name.encode(), value) for name, value in headers]
    for method in ("POST", "GET"):
        status, answer = await ask(app, path, body, sent, method)
        assert_answered_or_refused(status, answer, PROMPT, running.key)


async def test_hundreds_of_broken_bodies_over_a_socket_and_then_a_good_one(running):
    """The same through the server's own parser; the connections that were used still work."""
    chance = random.Random(8)
    good = json.dumps(GOOD).encode()
    for number in range(400):
        start, end = sorted(chance.randrange(len(good) + 1) for _ in range(2))
        body = good[:start] + chance.randbytes(number % 4) + good[end:]
        reply = await running.post(body, path=(CHAT, TEXT)[number % 2])
        assert_answered_or_refused(reply.status, reply.body, running.key)
    for body in SPECIAL:
        if len(body) < LARGE:
            reply = await running.post(body)
            assert_answered_or_refused(reply.status, reply.body, running.key)
    assert (await running.post(good)).status == 200
    assert running.logged("request_crashed") == []


async def test_no_large_value_of_a_member_is_kept(start):
    """Each is new, and takes four bytes a character; the gateway forgets it with the request."""
    gateway = await start(FakeWorker())
    headers = {"Authorization": f"Bearer {gateway.process.key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def send(name: str, number: int) -> None:
            value = "\U0001f4a3" + str(number).rjust(MIB // 2, "x")
            body = json.dumps({**GOOD, name: value}, ensure_ascii=False).encode()
            async with session.post(gateway.process.url + CHAT, data=body) as answer:
                await answer.read()

        for name in MEMBERS:
            await send(name, 0)
        before = gateway.resident_bytes
        for name in MEMBERS:
            for number in range(1, 17):
                await send(name, number)
    assert gateway.resident_bytes < before + 16 * MIB
    await gateway.serves_others()


@pytest.mark.parametrize(
    ("path", "more", "param"), [(CHAT, {"n": 129}, "n"), (TEXT, {"prompt": ["x"] * 65, "n": 2}, "prompt")]
)
async def test_a_request_of_too_many_sequences_is_refused(running, path, more, param):
    """The worker would start all of them at once."""
    reply = await running.post({**GOOD, **more}, path=path)
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "too_many_sequences", param)
    assert (await running.post({**GOOD, **more, "n": 1}, path=path)).status == 200
