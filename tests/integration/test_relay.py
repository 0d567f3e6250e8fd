"""
Promises of the relay, on real sockets from the client to the worker and back.

Every test ends with the auditor's verifier finding the whole log valid and complete.
"""

import asyncio
import itertools
import json
import logging

import openai
import pytest
import yarl
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from appliance.serving.dialects.policy import salt_of
from tests.fakes import CONTROL_TOKEN, MODEL, SPECULATION, USAGE, FakeWorker, chat, frame_of, text, until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
DONE = b"data: [DONE]\n\n"
USAGE_FRAME = frame_of({"id": "c", "choices": [], "usage": USAGE})
BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())], ids=["chat", "text"])


def salted(body: bytes) -> bytes:
    """A body of the first tenant as a worker receives it."""
    opening = body.index(b"{") + 1
    return body[:opening] + f'"cache_salt":"{salt_of("acme", None)}",'.encode() + body[opening:]


def frames(stream: bytes) -> list[bytes]:
    assert stream.endswith(b"\n\n")
    return [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-1]]


def last_error(stream: bytes) -> dict:
    """The error that a stream ends with, after its shape is checked."""
    *before, last = frames(stream)
    assert DONE not in before
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


# Bytes pass through.


@BOTH
async def test_a_stream_reaches_the_client_byte_for_byte(running, path, body):
    """Every frame is relayed as the worker sent it."""
    reply = await running.post({**body, "stream": True}, path=path)
    assert reply.status == 200
    assert reply.body == b"".join(running.worker.frames(path, {}))
    assert running.worker.paths == [path]


@BOTH
async def test_a_plain_answer_reaches_the_client_byte_for_byte(running, path, body):
    """Only `metrics`, which the gateway requests for itself, is removed."""
    reply = await running.post(body, path=path)
    whole = {name: value for name, value in running.worker.whole(path).items() if name != "metrics"}
    assert reply.status == 200
    assert reply.body == json.dumps(whole, separators=(",", ":")).encode()


async def test_spelling_and_order_of_a_plain_answer_are_kept(running):
    """Numbers, escapes, spaces and unknown members stay as the worker wrote them."""
    answer = (
        rb'{ "n" : 1.00e0,%s"x":"\u00e9\/","choices":[ {"index":0,"logprobs":[-0.10]} ],'
        rb'"usage":{"prompt_tokens":1} }'
    )
    for metrics in (b"", b'"metrics" : {"a": [1.0]} , '):
        running.worker.answer = answer % metrics
        assert (await running.post(chat())).body == answer % b""


async def test_the_body_reaches_the_worker_byte_for_byte(running):
    """The worker validates unknown members, number spellings, escapes and spaces."""
    body = (
        rb' {"temperature":1.00, "messages":[{"role":"user","content":"caf\u00e9 \/ %s"}] , "model": "demo",'
        rb' "seed":1e2,"unknown_to_us": {"a":[null,-0.0]}}'
    ) % "é😀".encode()
    await running.post(body)
    assert running.worker.bodies == [salted(body)]


async def test_only_stream_options_are_added_to_a_stream_request(running):
    """In front; the rest is byte-identical."""
    body = rb'{ "model":"demo","messages":[] , "stream": true, "temperature" : 1.00}'
    await running.post(body)
    assert running.worker.bodies == [salted(rb'{"stream_options":{"include_usage": true},' + body[1:])]


async def test_empty_stream_options_are_replaced_in_place(running):
    """Only the value of `stream_options` changes."""
    body = b'{"model":"demo","messages":[],"stream_options" :  %s ,"stream":true}'
    for given in (b"null", b"{}", b'{"include_usage":false}'):
        reply = await running.post(body % given)
        assert running.worker.bodies.pop() == salted(body % b'{"include_usage": true}')
        assert USAGE_FRAME not in reply.body


async def test_stream_options_of_the_client_are_kept(running):
    """Its other options are still there."""
    await running.post(chat(stream=True, stream_options={"include_obfuscation": False}))
    assert json.loads(running.worker.bodies[0])["stream_options"] == {
        "include_obfuscation": False,
        "include_usage": True,
    }


async def test_the_usage_frame_is_sent_to_a_client_that_requested_it(running):
    """As the worker sent it, without `metrics`, before the end; the body was not changed."""
    body = json.dumps(chat(stream=True, stream_options={"include_usage": True})).encode()
    reply = await running.post(body)
    assert running.worker.bodies == [salted(body)]
    assert frames(reply.body)[-2:] == [USAGE_FRAME, DONE]
    assert b"metrics" not in reply.body


async def test_the_usage_frame_is_not_sent_to_other_clients(running):
    """A frame without choices breaks clients that index `choices[0]`."""
    reply = await running.post(chat(stream=True))
    assert b'"usage"' not in reply.body
    assert all(json.loads(frame[6:])["choices"] for frame in frames(reply.body)[:-1])


async def test_content_that_carries_usage_is_not_held_back(running):
    """A client may request usage in every frame; its stream must still flow."""
    worker = running.worker
    contents = [
        {**worker.choice(CHAT, f"t{number}", None), "usage": {**USAGE, "completion_tokens": number}}
        for number in range(1, 4)
    ]
    worker.script = [
        *map(frame_of, contents),
        frame_of({"choices": [], "usage": USAGE, "metrics": SPECULATION}),
        DONE,
    ]
    worker.pause_seconds = 0.1
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running.asking(chat(stream=True, stream_options=options)) as response:
        first = await response.content.readuntil(b"\n\n")
        assert first == worker.script[0]
        assert not worker.completed
        rest = await response.read()
    assert frames(first + rest) == [*worker.script[:3], frame_of({"choices": [], "usage": USAGE}), DONE]
    outcome = await running.outcome()
    assert (outcome["completion_tokens"], outcome["drafts"]) == (10, 4)
    assert "ttft_ms" in outcome


async def test_characters_and_frames_may_be_split_by_the_network(running):
    """The client receives the worker's bytes and complete characters."""
    running.worker.pieces = ["naïve ", "模型", "😀👩‍👧", "\u2028"]
    for running.worker.write_bytes in (3, 7, 64):
        reply = await running.post(chat(stream=True))
        assert reply.body == b"".join(running.worker.frames(CHAT, {}))
        said = [json.loads(frame[6:])["choices"][0]["delta"]["content"] for frame in frames(reply.body)[:-1]]
        assert "".join(said) == "".join(running.worker.pieces)


async def test_many_frames_in_one_read_are_all_relayed(running):
    """A worker may send the whole stream in one write."""
    running.worker.script = [
        b"".join(running.worker.frames(CHAT, {"stream_options": {"include_usage": True}}))
    ]
    reply = await running.post(chat(stream=True))
    assert reply.body == b"".join(running.worker.frames(CHAT, {}))


async def test_a_long_stream_is_relayed_unchanged(running):
    """Thousands of frames, none lost, none out of order."""
    running.worker.pieces = [f"token {number} " for number in range(3000)]
    running.worker.write_bytes = 50_000
    running.worker.script = [b"".join(running.worker.frames(CHAT, {}))]
    assert (await running.post(chat(stream=True))).body == running.worker.script[0]


async def test_concurrent_streams_do_not_mix(running):
    replies = await asyncio.gather(*(running.post(chat(stream=True, n=number)) for number in range(20)))
    # A slow machine may have some of them filled with comments.
    bodies = {reply.body.replace(b": keep-alive\n\n", b"") for reply in replies}
    assert bodies == {b"".join(running.worker.frames(CHAT, {}))}
    assert len({reply.headers["x-appliance-audit"] for reply in replies}) == 20


async def test_headers_of_a_stream_disable_buffering_and_caching(running):
    reply = await running.post(chat(stream=True))
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["x-accel-buffering"], reply.headers["cache-control"]) == ("no", "no-cache")


async def test_a_silent_stream_gets_keep_alive_comments(serve):
    """Proxies receive bytes while the worker computes; without the comments the stream is unchanged."""
    running = await serve(FakeWorker(pause_seconds=0.07), keep_alive_seconds=0.03)
    reply = await running.post(chat(stream=True))
    assert reply.body.startswith(b": keep-alive\n\n")
    kept = [frame for frame in frames(reply.body) if frame != b": keep-alive\n\n"]
    assert b"".join(kept) == b"".join(running.worker.frames(CHAT, {}))


async def test_the_openai_client_ignores_keep_alive_comments(serve):
    running = await serve(FakeWorker(pause_seconds=0.03), keep_alive_seconds=0.01)
    stream = await running.client.chat.completions.create(**chat(), stream=True)
    said = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(said) == "".join(running.worker.pieces)


async def test_the_openai_client_reads_a_plain_answer_and_the_models(running):
    """The three calls that every client makes."""
    answer = await running.client.chat.completions.create(**chat())
    assert answer.choices[0].message.content == "".join(running.worker.pieces)
    assert answer.usage.total_tokens == 17
    completion = await running.client.completions.create(**text())
    assert completion.choices[0].text == "".join(running.worker.pieces)
    assert [model.id async for model in running.client.models.list()] == [MODEL]
    assert (await running.client.models.retrieve(MODEL)).id == MODEL


# Workers fail.


async def test_a_worker_that_fails_in_a_stream_ends_it_with_an_error(running):
    """The frames so far are relayed, then an error; never a finish reason that the worker did not send."""
    running.worker.breaks_after = 2
    reply = await running.post(chat(stream=True))
    assert frames(reply.body)[:-1] == running.worker.frames(CHAT, {})[:2]
    assert last_error(reply.body)["code"] == "worker_failed"
    assert b"[DONE]" not in reply.body
    assert b'finish_reason":"' not in reply.body


async def test_a_stream_that_broke_is_recorded_as_failed_with_an_estimate(running):
    """Delivered tokens are estimated by frames, and marked as such."""
    running.worker.breaks_after = 2
    await running.post(chat(stream=True))
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"], outcome["worker"]) == ("worker_failed", 502, "w1")
    assert (outcome["tokens_estimated"], outcome["completion_tokens"]) == (True, 2)
    assert "finish_reason" not in outcome


async def test_dead_worker_is_excluded_until_a_poll_succeeds(running):
    """The pool reports it, readiness shows it, the next poll admits it again."""
    running.worker.breaks_after = 2
    await running.post(chat(stream=True))
    assert not running.pool.any_healthy()
    assert (await running.get("/readyz")).status == 503
    # Kubernetes asks so: a gateway out of its Service would refuse connections.
    excluding = await running.get("/readyz?exclude=workers")
    assert (excluding.status, json.loads(excluding.body)["checks"]["workers"]) == (
        200,
        "no worker is healthy",
    )
    await running.control.tick()
    running.worker.breaks_after = None
    assert (await running.post(chat())).status == 200


async def test_openai_client_raises_for_a_broken_stream(running):
    """A client must not take half an answer for a complete one."""
    running.worker.breaks_after = 2
    stream = await running.client.chat.completions.create(**chat(), stream=True)
    with pytest.raises(openai.APIError, match="worker"):
        [chunk async for chunk in stream]


async def test_half_a_frame_is_never_sent(running):
    """An incomplete frame is dropped, so that the error after it can be parsed."""
    whole = running.worker.frames(CHAT, {})
    running.worker.script, running.worker.breaks_after = [whole[0], whole[1][:20]], 2
    reply = await running.post(chat(stream=True))
    assert frames(reply.body)[0] == whole[0]
    assert len(frames(reply.body)) == 2
    assert last_error(reply.body)["code"] == "worker_failed"


async def test_a_stream_without_its_last_frame_is_a_failure(running):
    """Also if the worker closes the connection in order."""
    running.worker.script = running.worker.frames(CHAT, {})[:-1]
    reply = await running.post(chat(stream=True))
    assert last_error(reply.body)["code"] == "worker_failed"
    assert (await running.outcome())["outcome"] == "worker_failed"


async def test_an_error_of_the_worker_in_a_stream_keeps_its_message(running):
    """In the shape that the client parses."""
    running.worker.error_frame = True
    reply = await running.post(chat(stream=True))
    errors = [json.loads(frame[6:])["error"] for frame in frames(reply.body) if b'"error"' in frame]
    assert [(error["message"], error["code"]) for error in errors] == [("engine died", None)]
    assert b'"finish_reason":"stop"' not in reply.body
    assert (await running.outcome())["outcome"] == "worker_failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_retried_if_its_worker_fails_before_the_answer(serve, stream):
    """Nothing was sent yet, so the client does not notice."""
    running = await serve(FakeWorker(breaks_before_answer=True), FakeWorker())
    reply = await running.post(chat(stream=stream))
    assert reply.status == 200
    assert [len(worker.bodies) for worker in running.workers] == [1, 1]
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["retries"], outcome["worker"]) == ("completed", 1, "w2")
    assert [seen.healthy for seen in running.pool.snapshots] == [False, True]


async def test_a_plain_answer_that_breaks_off_is_retried_on_another_worker(serve):
    """None of it was sent."""
    running = await serve(FakeWorker(breaks_after=0), FakeWorker())
    reply = await running.post(chat())
    assert (reply.status, (await running.outcome())["retries"]) == (200, 1)


async def test_after_the_first_byte_a_request_is_not_retried(serve):
    """Another worker would generate another text."""
    running = await serve(FakeWorker(breaks_after=1), FakeWorker())
    await running.post(chat(stream=True))
    assert [len(worker.bodies) for worker in running.workers] == [1, 0]


@pytest.mark.parametrize("stream", [True, False])
async def test_without_another_worker_the_error_is_retryable(running, stream):
    """502 with `Retry-After`, in the client's shape."""
    running.worker.breaks_before_answer = True
    reply = await running.post(chat(stream=stream))
    assert (reply.status, reply.error["code"]) == (502, "worker_failed")
    assert 0 < int(reply.headers["Retry-After"]) <= 120
    assert reply.headers["x-should-retry"] == "true"
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("worker_failed", 502)


async def test_unreachable_worker_is_a_failed_worker(running):
    """A refused connection has the same error as any other failure."""
    running.move("w1", "http://127.0.0.1:9")
    reply = await running.post(chat())
    assert (reply.status, reply.error["code"]) == (502, "worker_failed")
    assert "127.0.0.1" not in reply.error["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_gets_503_when_every_worker_is_down(running, stream):
    """With `Retry-After`; the log has the same status."""
    running.pool.report_unreachable(running.pool.snapshots[0].worker.worker_id)
    reply = await running.post(chat(stream=stream))
    assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
    assert "Retry-After" in reply.headers
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("worker_failed", 503)


async def test_failed_poll_does_not_readmit_a_reported_worker(running):
    """The gateway met a failed worker while the control loop was still waiting for it."""
    running.worker.metrics_seconds, running.worker.metrics = 0.2, "nothing of vLLM's"
    looking = asyncio.create_task(running.control.tick())
    await asyncio.sleep(0.05)
    running.worker.breaks_before_answer = True
    assert (await running.post(chat())).status == 502
    await looking
    assert not running.pool.any_healthy()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_error_of_the_worker_reaches_the_client(running, stream):
    """400 stays 400, with the worker's message and a code that is a string or null."""
    running.worker.status = 400
    reply = await running.post(chat(stream=stream))
    assert (reply.status, reply.headers["Content-Type"]) == (400, "application/json")
    assert reply.error == {"message": "bad", "type": "invalid_request_error", "param": None, "code": None}
    assert (await running.outcome())["outcome"] == "worker_refused"
    assert running.pool.any_healthy()


async def test_a_prompt_that_is_too_long_has_openais_code(running):
    """The openai client raises with `context_length_exceeded`."""
    message = "This model's maximum context length is 2048 tokens."
    running.worker.status = 400
    running.worker.error_body = json.dumps({"error": {"message": message, "code": 400}}).encode()
    with pytest.raises(openai.BadRequestError, match="maximum context") as caught:
        await running.client.chat.completions.create(**chat())
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("status", [500, 503])
async def test_an_internal_error_of_a_worker_is_retried_on_another(serve, status):
    """The first answer is dropped."""
    running = await serve(FakeWorker(status=status), FakeWorker())
    assert (await running.post(chat(stream=True))).status == 200
    assert (await running.outcome())["retries"] == 1


async def test_the_error_of_the_last_worker_reaches_the_client(serve):
    """If all fail, the client gets the last error."""
    running = await serve(FakeWorker(status=500), FakeWorker(status=500))
    reply = await running.post(chat())
    assert (reply.status, reply.error["message"], reply.error["type"]) == (500, "bad", "server_error")
    assert (await running.outcome())["outcome"] == "worker_failed"


@pytest.mark.parametrize("answer", [b"<html>", b'{"a":1'])
async def test_a_malformed_answer_is_a_failed_worker(running, answer):
    """The page of a proxy in between does not reach the client as a completion."""
    running.worker.answer = answer
    reply = await running.post(chat())
    assert (reply.status, reply.error["code"]) == (502, "worker_failed")
    assert (await running.outcome())["outcome"] == "worker_failed"


@pytest.mark.parametrize("frame", [b'data: {"usage":{}}\n\n', b'data: {"usage":{"prompt_tokens":1}}\n\n'])
async def test_a_usage_frame_of_another_shape_does_not_crash_the_relay(running, frame):
    """A frame without `choices` has no content: it is read, or ignored."""
    content = running.worker.frames(CHAT, {})[:-1]
    running.worker.script = [*content, frame, DONE]
    reply = await running.post(chat(stream=True))
    assert reply.body == b"".join([*content, DONE])
    assert (await running.outcome())["outcome"] == "completed"


@pytest.mark.parametrize("stream", [True, False])
async def test_worker_without_a_response_head_times_out(serve, stream):
    """504 after the limit; the worker is stopped."""
    running = await serve(FakeWorker(head_seconds=30), silence_seconds=0.3, keep_alive_seconds=0.1)
    reply = await running.post(chat(stream=stream))
    assert (reply.status, reply.error["code"]) == (504, "worker_timeout")
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("timed_out", 504)
    await until(lambda: running.worker.aborted, 1)


async def test_a_request_is_not_retried_if_its_worker_is_silent(serve):
    """It may still be computing."""
    running = await serve(FakeWorker(head_seconds=30), FakeWorker(), silence_seconds=0.3)
    assert (await running.post(chat())).status == 504
    assert [len(worker.bodies) for worker in running.workers] == [1, 0]


async def test_a_stream_that_falls_silent_ends_with_a_timeout(serve):
    """The head was sent, so the last frame has the error; the worker is stopped."""
    running = await serve(FakeWorker(pause_seconds=30), silence_seconds=0.3, keep_alive_seconds=0.1)
    reply = await running.post(chat(stream=True))
    assert reply.status == 200
    assert last_error(reply.body)["code"] == "worker_timeout"
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("timed_out", 504)
    await until(lambda: running.worker.aborted, 1)


async def test_a_slow_stream_never_times_out(serve):
    """The limit is on silence, not on the total time."""
    running = await serve(FakeWorker(pause_seconds=0.1), silence_seconds=0.4, keep_alive_seconds=0.05)
    reply = await running.post(chat(stream=True))
    assert reply.body.endswith(DONE)


# Clients leave.


async def test_a_disconnect_during_a_stream_stops_the_worker(running):
    """Within a second the worker observes the abort, and the log has the outcome and its tokens."""
    running.worker.pieces, running.worker.pause_seconds = ["x"] * 1000, 0.02
    async with running.asking(chat(stream=True)) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await until(lambda: running.worker.aborted, 1)
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("client_gone", 499)
    assert (outcome["tokens_estimated"], outcome["completion_tokens"] >= 1) == (True, True)
    assert running.pool.in_flight == {"w1": 0}
    assert running.pool.any_healthy()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_before_the_first_byte_stops_the_worker(running, stream):
    """Also for plain answers."""
    running.worker.head_seconds = 30
    waiting = asyncio.create_task(running.post(chat(stream=stream)))
    await until(lambda: running.worker.bodies)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: running.worker.aborted, 1)
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["tokens_estimated"]) == ("client_gone", True)


async def test_inter_token_time_of_a_stream_is_measured(running):
    """By model, every gap once the stream has ended; an answer in one piece has none."""
    running.worker.pieces, running.worker.pause_seconds = ["x"] * 5, 0.03
    for stream in (True, False):
        await running.post(chat(stream=stream))
    await running.events("request_finished", 2)
    value = running.metrics.registry.get_sample_value
    labels = {"model": MODEL}
    # Five pieces and the one that says why it ended.
    assert value("appliance_inter_token_seconds_count", labels) == 5
    assert value("appliance_inter_token_seconds_sum", labels) >= 4 * 0.03
    assert value("appliance_inter_token_seconds_bucket", {**labels, "le": "0.01"}) < 5


async def test_drafts_are_counted_by_context_and_template(running):
    """The worker's counts, once by context length and once by template."""
    await running.post(chat(stream=True))
    await running.events("request_finished")
    value = running.metrics.registry.get_sample_value
    labels = {"model": MODEL, "context": "0-1k"}
    drafts = value("appliance_context_drafts_total", labels)
    assert drafts == value("appliance_drafts_total", {"tenant": "acme", "model": MODEL}) > 0
    assert value("appliance_context_accepted_tokens_total", labels) == value(
        "appliance_accepted_tokens_total", {"tenant": "acme", "model": MODEL}
    )
    assert value("appliance_template_drafts_total", {"model": MODEL, "template": "(other)"}) == drafts


async def test_client_that_leaves_is_recorded_in_log_and_metrics(running):
    """One line, one count, nothing left in flight."""
    running.worker.head_seconds = 30
    waiting = asyncio.create_task(running.post(chat()))
    await until(lambda: running.worker.bodies)
    waiting.cancel()
    (line,) = await running.events("request_finished")
    assert (line["outcome"], line["status"]) == ("client_gone", 499)
    page = (await running.get("/metrics")).body.decode()
    assert 'outcome="client_gone",tenant="acme"} 1.0' in page
    assert 'appliance_requests_in_flight{model="demo"} 0.0' in page


async def test_stopping_gateway_writes_an_audit_entry(running):
    """A request that was cut off is recorded as aborted, not as the client's disconnect."""
    running.worker.pieces, running.worker.pause_seconds = ["x"] * 1000, 0.02
    async with running.asking(chat(stream=True)) as response:
        await response.content.readuntil(b"\n\n")
        running.server.should_exit = True
        outcome = await running.outcome()
        assert (outcome["type"], outcome["reason"]) == ("request.aborted", "gateway_stopped")
    await until(lambda: running.worker.aborted, 1)


# Who may ask, and what.


async def test_all_wrong_keys_get_the_same_answer(running):
    """No header, another scheme, an unknown id and a wrong secret."""
    wrong = "A" * 43
    headers = [
        {},
        {"Authorization": "Basic abc"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer sk-aaaaaaaa-{wrong}"},
        {"Authorization": f"Bearer {running.key[:12]}{wrong}"},
        {"Authorization": f"Bearer {running.key}x"},
        {"Authorization": f"Bearer {running.key.removeprefix('sk-')}"},
        {"X-Api-Key": running.key[:-1] + "!"},
        {"Authorization": "Bearer eyJhbGciOiJub25lIn0.e30."},
        {"Authorization": f"Bearer {running.key}", "X-Api-Key": running.scoped_key},
    ]
    routes = [("POST", CHAT), ("POST", TEXT), ("GET", "/v1/models"), ("GET", "/v1/models/demo")]
    bodies = set()
    for (method, path), header in itertools.product(routes, headers):
        async with running.session.request(
            method, running.url + path, json=chat(), headers=header
        ) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            bodies.add(await response.read())
    assert len(bodies) == 1
    assert json.loads(bodies.pop())["error"]["code"] == "invalid_api_key"
    assert running.worker.bodies == []


async def test_refused_callers_are_in_the_audit_log(running):
    """Of the API and of the admin API, counted; the verifier accepts the entries."""
    for _ in range(10):
        assert (await running.post(chat(), key=running.key + "x")).status == 401
        assert (await running.get("/admin/v1/status", key=running.key)).status == 401
    running.server.config.app.state.services.refused.report()
    await until(lambda: len(running.entries("callers.refused")) == 2)
    api, admin = running.entries("callers.refused")
    assert (api["surface"], api["count"], list(api["reasons"])) == ("api", 10, ["api_key: 10"])
    assert (admin["surface"], admin["count"], list(admin["reasons"])) == ("admin", 10, ["role: 10"])
    assert list(api["clients"]) == ["loopback: 10"]
    assert len(running.logged("caller_refused")) == 2


async def test_admin_keys_cannot_call_models_nor_tenant_keys_administer(running):
    assert (await running.post(chat(), key=running.admin_key)).status == 401
    assert (await running.get("/admin/v1/status", key=running.key)).status == 401
    status = await running.get("/admin/v1/status", key=running.admin_key)
    assert status.status == 200
    assert json.loads(status.body)["workers"][0]["healthy"] is True
    assert json.loads(status.body)["audit"]["failure"] is None


async def test_a_forbidden_model_reads_like_one_that_does_not_exist(running):
    """A key reveals nothing about models it or its tenant may not use; both refusals are in the log."""
    replies = [
        await running.post({**chat(), "model": name}, key=running.scoped_key) for name in (MODEL, "none")
    ]
    assert [reply.status for reply in replies] == [404, 404]
    assert replies[0].body.replace(b"`demo`", b"`none`") == replies[1].body
    assert replies[0].error["code"] == "model_not_found"
    pages = [await running.get(f"/v1/models/{name}", key=running.scoped_key) for name in (MODEL, "none")]
    assert pages[0].body.replace(b"`demo`", b"`none`") == pages[1].body == replies[1].body
    # The gateway answers a refusal before it is durable, so the entries may follow the answers.
    await until(lambda: len(running.entries("request.denied")) >= 2)
    denied = running.entries("request.denied")
    assert [(entry["tenant"], entry["status"]) for entry in denied] == [("scoped", 404), ("scoped", 404)]
    assert running.worker.bodies == []


async def test_the_list_of_models_has_only_those_a_key_may_use(running):
    """It is the tenant's and the key's, not the pool's."""
    mine, others, narrow = [
        json.loads((await running.get("/v1/models", key=key)).body)
        for key in (running.key, running.scoped_key, running.narrow_key)
    ]
    assert [model["id"] for model in mine["data"]] == [MODEL]
    assert others == narrow == {"object": "list", "data": []}


async def test_a_key_with_fewer_models_cannot_use_its_tenants_others(running):
    """Another key of the tenant still can."""
    refused = await running.post(chat(), key=running.narrow_key)
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert (await running.get(f"/v1/models/{MODEL}", key=running.narrow_key)).status == 404
    assert (await running.post(chat())).status == 200


MALFORMED = [
    (b"", None, "invalid_json"),
    (b"{", None, "invalid_json"),
    (b"[]", None, "invalid_json"),
    (b'"x"', None, "invalid_json"),
    (b"\xff\xfe{}", None, "invalid_json"),
    (b'{"model":"demo","model":"demo","messages":[]}', None, "invalid_json"),
    (b'{"model":"demo","messages":' + b"[" * 300 + b"]" * 300 + b"}", None, "invalid_json"),
    (b'{"messages":[]}', "model", "missing_model"),
    (b'{"model":null,"messages":[]}', "model", "missing_model"),
    (b'{"model":"","messages":[]}', "model", "missing_model"),
    (b'{"model":["demo"],"messages":[]}', "model", "missing_model"),
    (b'{"model":"demo"}', "messages", "missing_required_parameter"),
    (b'{"model":"demo","messages":[],"stream":"yes"}', "stream", "invalid_request"),
    (b'{"model":"demo","messages":[],"stream":1}', "stream", "invalid_request"),
    (b'{"model":"demo","messages":[],"stream_options":[]}', "stream_options", "invalid_request"),
]


async def test_invalid_request_is_refused_before_a_worker_receives_it(running):
    """400 with the invalid parameter; the log has no entry."""
    for body, param, code in MALFORMED:
        reply = await running.post(body)
        assert reply.status == 400
        error = (reply.error["type"], reply.error["param"], reply.error["code"])
        assert error == ("invalid_request_error", param, code)
        assert reply.headers["x-should-retry"] == "false"
    assert running.worker.bodies == []
    assert running.entries("request.intent") == []


async def test_a_model_name_that_cannot_be_encoded_is_unknown(running):
    """Half a surrogate pair is the client's error, not a crash."""
    reply = await running.post(rb'{"model":"\ud800","messages":[]}')
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_each_route_needs_its_own_member(running):
    """A completion needs `prompt`."""
    reply = await running.post({"model": MODEL, "messages": []}, path=TEXT)
    assert (reply.status, reply.error["param"]) == (400, "prompt")


async def test_a_body_over_the_limit_is_refused_with_413(running):
    """100 MB, declared: the openai client receives the error and not a broken connection."""
    messages = [{"role": "user", "content": "x" * 100_000_000}]
    with pytest.raises(openai.APIStatusError) as caught:
        await running.client.chat.completions.create(model=MODEL, messages=messages)
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    assert running.worker.bodies == []


async def test_a_chunked_body_over_the_limit_is_refused_with_413(running):
    """100 MB, chunked: the same answer."""

    async def endless():
        for _ in range(100):
            yield b" " * 1_000_000

    with pytest.raises(openai.APIStatusError) as caught:
        await running.client.post("/chat/completions", cast_to=object, content=endless())
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    assert running.worker.bodies == []


async def test_a_body_of_the_maximum_size_is_accepted(serve):
    """One byte more is not."""
    running = await serve(FakeWorker(), max_body_bytes=2048)
    body = json.dumps(chat()).encode().ljust(2048)
    assert (await running.post(body)).status == 200
    assert (await running.post(body + b" ")).status == 413


UNLISTED = (
    "/", "/v1", "/v1/embeddings/", "/v1/chat/completions/", "/v1/completions/", "/metrics/", "/healthz/",
    "/docs",
    "/redoc", "/tokenizer_info", "/v1/load_lora_adapter", "/health", "/version", "/metrics", "/console",
    "/admin/v1/status",
)  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_route_that_is_not_listed_does_not_exist(running, method):
    """No path of the worker is reachable, and nothing is redirected: 404 in OpenAI's shape."""
    headers = {"Authorization": f"Bearer {running.key}"}
    for path in UNLISTED:
        url = yarl.URL(running.url + path, encoded=True)
        async with running.session.request(method, url, headers=headers, allow_redirects=False) as response:
            body = json.loads(await response.read())
        assert (path, response.status, body["error"]["code"]) == (path, 404, "route_not_found")
        assert list(body["error"]) == ["message", "type", "param", "code"]
    assert running.worker.bodies == []


async def test_a_wrong_method_is_answered_with_405(running):
    """In OpenAI's shape."""
    for method, path in (("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/metrics"), ("PUT", TEXT)):
        async with running.session.request(method, running.at(path)) as response:
            body = json.loads(await response.read())
        assert (response.status, body["error"]["code"]) == (405, "method_not_allowed")
        assert list(body["error"]) == ["message", "type", "param", "code"]


# Ids, receipts, readiness.


async def test_the_clients_request_id_is_echoed(running):
    """On answers and on errors; the log has it next to ours."""
    for given in ("abc-123", "A.b_c:9", "x" * 128):
        reply = await running.post(chat(), x_request_id=given)
        refused = await running.post(b"{", x_request_id=given)
        assert (reply.status, refused.status) == (200, 400)
        assert {reply.headers["X-Request-Id"], refused.headers["X-Request-Id"]} == {given}
        intent = running.entries("request.intent")[-1]
        assert intent["client_request_id"] == given
        assert intent["request_id"] != given


async def test_a_malformed_request_id_is_replaced_by_ours(running):
    """Text that could forge a log line or a header is not echoed."""
    for given in ("", " ", "a b", "a,b", "x" * 129, "a/b", "<script>", "é"):
        reply = await running.post(chat(), x_request_id=given)
        intent = running.entries("request.intent")[-1]
        assert reply.headers["X-Request-Id"] == intent["request_id"]
        assert "client_request_id" not in intent


async def test_every_request_has_its_own_id(running):
    """Also if the client sends the same one twice."""
    for _ in range(2):
        await running.post(chat(), x_request_id="again")
    ids = [intent["request_id"] for intent in running.entries("request.intent")]
    assert len(set(ids)) == 2
    assert [headers["X-Request-Id"] for headers in running.worker.headers] == ids


async def test_the_clients_key_and_headers_never_reach_the_worker(running):
    """The gateway sends only its own headers."""
    await running.post(chat(), X_Forwarded_For="10.1.2.3", Cookie="a=b")
    (headers,) = running.worker.headers
    assert running.key not in str(headers)
    assert headers.getall("Authorization") == [f"Bearer {CONTROL_TOKEN}"]
    assert not {"Cookie", "X-Forwarded-For"} & set(headers)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_that_refuses_the_gateway_s_token_is_a_failed_worker(running, stream):
    """The client's own key is right, so it is not told 401."""
    running.worker.token = "another"
    reply = await running.post(chat(stream=stream))
    assert reply.status == 502
    assert reply.error["message"] == "The worker does not accept the token of this gateway."
    assert CHAT in running.worker.refused
    assert (await running.outcome())["outcome"] == "worker_failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_names_the_index_of_its_intent(running, stream):
    """In `x-appliance-audit`."""
    await running.post(chat())
    reply = await running.post(chat(stream=stream))
    intent = running.entries("request.intent")[1]
    assert reply.headers["x-appliance-audit"] == f"appliance.local/audit/{intent['index']}"


async def test_an_answer_has_the_gateways_overhead(running):
    """In milliseconds, without the worker's time."""
    running.worker.head_seconds = 0.3
    reply = await running.post(chat())
    assert 0 <= float(reply.headers["x-appliance-overhead-ms"]) < 250


async def test_an_outcome_has_counts_times_and_worker(running):
    await running.post(chat(stream=True))
    outcome = await running.outcome()
    expected = {
        "outcome": "completed", "status": 200, "tenant": "acme", "model": MODEL, "route": CHAT,
        "worker": "w1",
        "engine": "vllm 0.32.0", "prompt_tokens": 7, "completion_tokens": 10, "tokens_estimated": False,
        "drafts": 4,
        "draft_tokens": 12, "accepted_tokens": 6, "acceptance_length": "2.500", "finish_reason": "stop",
        "retries": 0,
    }  # fmt: skip
    assert {name: outcome[name] for name in expected} == expected
    assert 0 <= outcome["ttft_ms"] <= outcome["duration_ms"]


async def test_an_answer_without_usage_is_recorded_as_an_estimate(running):
    """Tokens without a count are estimated by frames."""
    running.worker.says_usage = False
    await running.post(chat(stream=True))
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["tokens_estimated"], outcome["completion_tokens"]) == (
        "completed",
        True,
        5,
    )


async def test_readiness_needs_a_worker(serve):
    """Without one the gateway is alive but not ready."""
    running = await serve()
    assert (await running.get("/healthz")).status == 200
    ready = await running.get("/readyz")
    assert (ready.status, json.loads(ready.body)["checks"]["audit"]) == (503, "ok")
    assert (await running.get("/readyz?exclude=workers")).status == 503, "it knows no models yet"
    reply = await running.post(chat())
    assert (reply.status, reply.error["code"]) == (503, "no_worker_available")


async def test_readiness_names_every_check(running):
    ready = await running.get("/readyz")
    assert (ready.status, json.loads(ready.body)) == (
        200,
        {"status": "ready", "checks": {"audit": "ok", "workers": "ok"}, "warnings": []},
    )


async def test_readiness_needs_the_audit_log(running):
    """A gateway that could only refuse leaves the rotation, and comes back."""
    running.store.refused = {"request.intent"}
    assert (await running.post(chat())).status == 503
    assert (await running.get("/readyz")).status == 503
    running.store.release()
    assert (await running.post(chat())).status == 200
    assert (await running.get("/readyz")).status == 200


# The audit log comes first.


@pytest.mark.parametrize("stream", [True, False])
async def test_no_byte_is_sent_before_the_intent_is_durable(running, stream):
    """The worker receives the request at once, but its answer waits for the disk."""
    running.store.held = {"request.intent"}
    asking = asyncio.create_task(running.post(chat(stream=stream)))
    await until(lambda: running.store.waiting.is_set() and running.worker.completed)
    await asyncio.sleep(0.2)
    assert not asking.done()
    running.store.release()
    assert (await asking).status == 200


async def test_no_byte_of_a_stream_is_sent_before_the_intent_is_durable(running):
    """Not even the head."""
    running.store.held = {"request.intent"}
    opening = asyncio.create_task(running.session.post(
        running.url + CHAT, json=chat(stream=True), headers={"Authorization": f"Bearer {running.key}"}
    ).__aenter__())  # fmt: skip
    await until(running.store.waiting.is_set)
    await asyncio.sleep(0.2)
    assert not opening.done()
    running.store.release()
    async with await opening as response:
        assert (await response.read()).endswith(DONE)


async def test_the_last_frame_waits_for_the_outcome(running):
    """Content flows; the end of the stream is sent once the outcome is durable."""
    running.store.held = {"request.outcome"}
    async with running.asking(chat(stream=True, stream_options={"include_usage": True})) as response:
        content = running.worker.frames(CHAT, {})[:-1]
        got = b"".join([await response.content.readuntil(b"\n\n") for _ in content])
        assert got == b"".join(content)
        await until(running.store.waiting.is_set)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await response.content.readany()
        running.store.release()
        assert await response.read() == USAGE_FRAME + DONE


async def test_a_plain_answer_waits_for_the_outcome(running):
    running.store.held = {"request.outcome"}
    asking = asyncio.create_task(running.post(chat()))
    await until(running.store.waiting.is_set)
    await asyncio.sleep(0.2)
    assert not asking.done()
    running.store.release()
    assert (await asking).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_durable_intent_there_is_no_answer(running, stream):
    """503, nothing of the worker's, and a log that is still complete."""
    running.store.refused = {"request.intent"}
    running.worker.pieces = ["COMPLETION"]
    reply = await running.post(chat(stream=stream))
    assert (reply.status, reply.error["code"]) == (503, "audit_unavailable")
    assert "Retry-After" in reply.headers
    assert b"COMPLETION" not in reply.body
    assert running.entries("request.intent") == []


async def test_a_disk_that_hangs_is_treated_as_a_failed_disk(serve):
    """An entry that takes too long is refused; the client does not wait for ever."""
    running = await serve(FakeWorker(), audit={"append_timeout_seconds": 0.3})
    running.store.held = {"request.intent"}
    async with asyncio.timeout(3):
        reply = await running.post(chat())
    assert (reply.status, reply.error["code"]) == (503, "audit_unavailable")
    running.store.release()
    end = await running.outcome()
    assert (end["type"], end.get("outcome")) != ("request.outcome", "completed")


async def test_a_plain_answer_without_a_durable_outcome_is_refused(serve):
    """Nothing was sent yet; the request is closed as soon as the disk works again."""
    running = await serve(FakeWorker(pieces=["COMPLETION"]), audit={"checkpoint_seconds": 0.2})
    running.store.refused = {"request.outcome"}
    reply = await running.post(chat())
    assert (reply.status, reply.error["code"]) == (503, "audit_unavailable")
    assert b"COMPLETION" not in reply.body
    running.store.release()
    assert (await running.outcome())["type"] == "request.aborted"


async def test_a_refused_answer_is_not_counted_as_completed(running):
    """Log line and metrics have the status that the client received."""
    running.store.refused = {"request.outcome"}
    await running.post(chat())
    (line,) = await running.events("request_finished")
    assert line["outcome"] != "completed"
    assert line["status"] != 200
    page = (await running.get("/metrics")).body.decode()
    assert 'outcome="completed"' not in page


async def test_a_stream_without_a_durable_outcome_has_no_end(serve):
    """Sent frames cannot be recalled; the end of the stream is withheld."""
    running = await serve(FakeWorker(), audit={"checkpoint_seconds": 0.2})
    running.store.refused = {"request.outcome"}
    reply = await running.post(chat(stream=True, stream_options={"include_usage": True}))
    assert last_error(reply.body)["code"] == "audit_unavailable"
    assert DONE not in reply.body
    assert b'"usage"' not in reply.body
    running.store.release()
    assert (await running.outcome())["type"] == "request.aborted"


async def test_full_queue_refuses_before_a_worker_is_called(serve):
    """A request that cannot be recorded is not forwarded."""
    running = await serve(FakeWorker(), audit={"queue_entries": 1})
    running.store.held = {"request.intent"}
    first = asyncio.create_task(running.post(chat()))
    await until(running.store.waiting.is_set)
    replies = await asyncio.gather(*(running.post(chat()) for _ in range(3)))
    assert [reply.error["code"] for reply in replies] == ["audit_unavailable"] * 3
    assert len(running.worker.bodies) == 1
    running.store.release()
    assert (await first).status == 200


async def test_every_intent_has_one_outcome(serve):
    """However the requests ended."""
    running = await serve(FakeWorker(), FakeWorker(breaks_before_answer=True), FakeWorker(status=400))
    bodies = [chat(stream=number % 2 == 0) for number in range(12)]
    await asyncio.gather(*(running.post(body) for body in bodies))
    await running.outcome(len(bodies))
    intents = [entry["request_id"] for entry in running.entries("request.intent")]
    outcomes = [entry["request_id"] for entry in running.entries("request.outcome")]
    assert sorted(intents) == sorted(outcomes)
    assert len(set(intents)) == len(bodies)


# Nothing leaks.


async def test_every_metric_has_our_prefix_and_requests_are_counted(running):
    await running.post(chat(stream=True))
    await running.outcome()
    families = list(text_string_to_metric_families((await running.get("/metrics")).body.decode()))
    assert {family.name.split("_")[0] for family in families} == {"appliance"}
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    labels = [("model", MODEL), ("tenant", "acme")]
    assert samples[("appliance_tokens_total", ("kind", "completion"), *labels)] == 10
    assert samples[("appliance_drafts_total", *labels)] == 4
    assert samples[("appliance_audit_open_requests",)] == 0


SECRET, ANSWER = "the patient is called Mallory", "and her diagnosis is gout"


CHAT_OF_SECRETS = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "user": SECRET}
REFUSED = json.dumps({"error": {"message": f"bad: {SECRET}"}}).encode()


def assert_nothing_was_kept(running, caplog):
    """Search for prompt, completion and key in all logs, metrics, entries and files."""
    files = [path.read_bytes().decode("latin-1") for path in running.directory.rglob("*") if path.is_file()]
    ours = [
        record for record in caplog.records if not record.name.startswith(("httpx", "httpcore", "openai"))
    ]
    logged = [logging.Formatter().format(record) for record in ours]
    page = generate_latest(running.metrics.registry).decode()
    assert len(files) >= 3
    for kept in (running.log.getvalue(), page, *logged, *files):
        assert SECRET not in kept
        assert ANSWER not in kept
        assert running.key not in kept


@pytest.mark.parametrize(
    ("body", "path", "worker"),
    [
        (CHAT_OF_SECRETS, CHAT, {}),
        ({**CHAT_OF_SECRETS, "stream": True}, CHAT, {}),
        ({"model": MODEL, "prompt": SECRET}, TEXT, {}),
        (CHAT_OF_SECRETS, CHAT, {"status": 400, "error_body": REFUSED}),
        ({**CHAT_OF_SECRETS, "stream": True}, CHAT, {"breaks_after": 1}),
        (CHAT_OF_SECRETS, CHAT, {"answer": ANSWER.encode()}),
    ],
    ids=["chat", "stream", "text", "refused", "broken", "nonsense"],
)
async def test_content_is_in_no_log_metric_or_entry(serve, caplog, body, path, worker):
    """Neither prompt nor completion is in a log, a metric, the audit database or any other file."""
    running = await serve(FakeWorker(pieces=[ANSWER, ANSWER], **worker))
    await running.post(body, path=path)
    await running.outcome()
    assert_nothing_was_kept(running, caplog)


async def test_a_refused_request_leaves_no_content(running, caplog):
    """A prompt that was malformed, named no model, or was refused by the audit log."""
    await running.post(json.dumps(CHAT_OF_SECRETS).encode() + b"}")
    await running.post({**CHAT_OF_SECRETS, "model": SECRET})
    running.store.refused = {"request.intent"}
    await running.post(CHAT_OF_SECRETS)
    assert_nothing_was_kept(running, caplog)


async def test_a_cancelled_request_leaves_no_content(running, caplog):
    """It leaves only counts."""
    running.worker.head_seconds = 30
    waiting = asyncio.create_task(running.post(CHAT_OF_SECRETS))
    await until(lambda: running.worker.bodies)
    waiting.cancel()
    await running.outcome()
    assert_nothing_was_kept(running, caplog)


async def test_the_operator_log_has_one_line_for_each_request(running):
    """Machine-readable, with counts and no content."""
    await running.post(chat(stream=True))
    (line,) = await running.events("request_finished")
    expected = {
        "outcome": "completed",
        "status": 200,
        "tenant": "acme",
        "worker": "w1",
        "completion_tokens": 10,
    }
    assert {name: line[name] for name in expected} == expected
    assert "dropped_fields" not in line
