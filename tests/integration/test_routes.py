"""
Promises about every route, on real sockets, with recorded answers of a real worker.

Every test ends with the auditor's verifier finding the whole log valid and complete.
"""

import json

import openai
import pytest

from appliance.infra.json_members import parse_members
from appliance.serving.dialects.dialect import data_of
from appliance.serving.dialects.routes import ROUTES
from tests.fakes import MODEL, SPECULATIVE_METRICS, FakeWorker, until
from tests.recorder import RECORDED_AT

PICTURE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
TURN = {"role": "user", "content": "hello"}
BODIES = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [TURN], "max_tokens": 6},
    "/v1/messages/count_tokens": {"messages": [TURN]},
    "/v1/embeddings": {"input": ["hello"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"queries": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
RECORDED = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
ENDS = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/responses": b"response.completed",
    "/v1/messages": b"message_stop",
}
EVERY = pytest.mark.parametrize("path", BODIES)
STREAMS = pytest.mark.parametrize("path", ENDS)
ANTHROPIC = pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])


def asked(path: str, **more: object) -> dict:
    """Return a body for a route."""
    return {"model": MODEL, **BODIES[path], **more}


def answer_of(path: str) -> str:
    """A recorded answer of a worker."""
    return json.loads((RECORDED_AT / f"{RECORDED[path]}.json").read_text(encoding="utf-8"))["body"]


def frames_of(path: str) -> list[bytes]:
    """Return the frames of a stream a worker was recorded to send."""
    stream = (RECORDED_AT / f"{RECORDED[path]}.sse").read_bytes()
    return [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-1]]


def error_of(path: str, body: bytes) -> dict:
    """Return the error in an answer, once it has the shape of its route."""
    content = json.loads(body)
    error = content["error"]
    if path.startswith("/v1/messages"):
        assert (list(content), list(error), content["type"]) == (
            ["type", "error"],
            ["type", "message"],
            "error",
        )
    else:
        assert (list(content), list(error)) == (["error"], ["message", "type", "param", "code"])
    return error


def test_every_route_is_tried_here():
    """A new route is added to these tests, or not at all."""
    assert set(BODIES) == set(ROUTES)


@EVERY
async def test_an_answer_reaches_the_client_as_the_worker_sent_it(running, path):
    """To the byte, but for `metrics`; intent and outcome name the route and what it cost."""
    text = answer_of(path)
    running.worker.answer = text.encode()
    reply = await running.post(asked(path), path=path)
    assert (reply.status, running.worker.paths) == (200, [ROUTES[path].worker_path])
    before, after = parse_members(text), parse_members(reply.body.decode())
    assert after.keys() == before.keys() - {"metrics"}
    assert all(after[key].value == before[key].value for key in after)
    if "metrics" not in before:
        assert reply.body == text.encode()
    outcome, (intent,) = await running.outcome(), running.entries("request.intent")
    assert (intent["route"], outcome["route"], outcome["outcome"]) == (path, path, "completed")
    assert outcome["tokens_estimated"] is False
    generates = ROUTES[path].dialect.generates
    assert outcome["completion_tokens"] == (6 if generates else 0)
    assert (outcome["prompt_tokens"] > 0) == ("usage" in before)


@STREAMS
async def test_a_stream_reaches_the_client_as_the_worker_sent_it(running, path):
    """Every frame, and the outcome is recorded before the last one goes out."""
    running.worker.script = frames_of(path)
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    headers = {"X_Appliance_Metrics": "on"}
    reply = await running.post(asked(path, stream=True, **options), path=path, **headers)
    assert (reply.status, reply.body) == (200, b"".join(running.worker.script))
    assert reply.headers["content-type"].startswith("text/event-stream")
    outcome = await running.outcome()
    assert (outcome["route"], outcome["outcome"], outcome["completion_tokens"]) == (path, "completed", 6)
    assert outcome["tokens_estimated"] is False
    assert outcome["finish_reason"] in {"length", "max_output_tokens", "max_tokens"}


@STREAMS
async def test_a_stream_that_breaks_off_ends_with_an_error_and_no_end(running, path):
    """In the shape of its route; the sent part is recorded as an estimate."""
    running.worker.script = frames_of(path)
    running.worker.breaks_after = len(running.worker.script) - 3
    reply = await running.post(asked(path, stream=True), path=path)
    *_, last = [frame for frame in reply.body.split(b"\n\n") if frame]
    assert ENDS[path] not in reply.body
    if "completions" in path:
        error = json.loads(last.removeprefix(b"data: "))["error"]
    else:
        assert last.startswith(b"event: error\n")
        content = json.loads(data_of(last))
        assert content["type"] == "error"
        error = content["error"]
    assert "broke off" in error["message"]
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"], outcome["tokens_estimated"]) == (
        "worker_failed",
        502,
        True,
    )
    assert 0 < outcome["completion_tokens"] <= 6


@STREAMS
async def test_a_client_that_leaves_a_stream_is_recorded_as_gone(running, path):
    """With status 499 in log and record, and the worker is stopped."""
    running.worker.script = frames_of(path)
    running.worker.pause_seconds = 0.1
    async with running.asking(asked(path, stream=True), path=path) as response:
        await response.content.readany()
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"], outcome["route"]) == ("client_gone", 499, path)
    (line,) = await running.events("request_finished")
    assert (line["status"], line["route"]) == (499, path)
    await until(lambda: running.worker.aborted == 1)


async def test_the_openai_client_raises_what_a_responses_stream_ends_with(running):
    """It knows an error by its `error` member."""
    running.worker.script = frames_of("/v1/responses")
    running.worker.breaks_after = 4
    stream = await running.client.responses.create(model=MODEL, input="hello", stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in stream:
            pass


@EVERY
async def test_a_workers_refusal_has_the_shape_of_its_route(running, path):
    """The worker's words, its status, and word that a retry cannot help."""
    running.worker.status = 400
    reply = await running.post(asked(path), path=path)
    error = error_of(path, reply.body)
    assert (reply.status, error["message"], error["type"]) == (400, "bad", "invalid_request_error")
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("status", "retry"),
    [(400, "false"), (404, "false"), (422, "false"), (429, "true"), (500, "true"), (501, "false")],
)
async def test_error_says_whether_to_retry(running, status, retry):
    """A retry of what the worker cannot do is useless."""
    running.worker.status = status
    reply = await running.post(asked("/v1/embeddings"), path="/v1/embeddings")
    assert (reply.status, reply.headers["x-should-retry"]) == (status, retry)


@ANTHROPIC
async def test_the_gateways_own_errors_look_like_anthropics_there(serve, path):
    """For every error, and each answer has the id where Anthropic's clients expect it."""
    running = await serve(FakeWorker(), max_body_bytes=2000)
    cases = [
        (asked(path), "wrong", 401, "authentication_error"),
        ({**asked(path), "model": "nobody"}, running.key, 404, "not_found_error"),
        (asked(path, system="x" * 3000), running.key, 413, "request_too_large"),
        (b"{", running.key, 400, "invalid_request_error"),
        ({"model": MODEL}, running.key, 400, "invalid_request_error"),
    ]
    for body, key, status, kind in cases:
        reply = await running.post(body, path=path, key=key)
        assert (reply.status, error_of(path, reply.body)["type"]) == (status, kind)
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
        assert reply.headers["x-should-retry"] == "false"
    running.worker.answer = answer_of(path).encode()
    reply = await running.post(asked(path), path=path, x_request_id="mine")
    assert (reply.headers["request-id"], reply.headers["x-request-id"]) == ("mine", "mine")


async def test_other_routes_have_no_id_of_anthropics(running):
    """It would be one header more on every answer."""
    reply = await running.post(asked("/v1/chat/completions"))
    assert "request-id" not in reply.headers


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/responses/resp_1/cancel", "/v1/messages/batches", "/v1/chat/completions/render"),
        *(
            "/inference/v1/generate",
            "/v1/systemone",
            "/generative_scoring",
            "/pooling",
            "/classify",
            "/v2/embed",
        ),
        *(
            "/invocations",
            "/ping",
            "/load",
            "/version",
            "/start_profile",
            "/reset_prefix_cache",
            "/sleep",
            "/pause",
        ),
        *("/v1/load_lora_adapter", "/scale_elastic_ep", "/collective_rpc", "/tokenizer_info", "/v1/tokenize"),
        *(
            "/v1/chat/completions/",
            "/v1//completions",
            "/V1/completions",
            "/v1/audio/transcriptions",
            "/v2/chat",
        ),
    ],
)
async def test_unlisted_routes_of_a_worker_are_not_reachable(running, path):
    """The list is all there is, with any method."""
    reply = await running.post(asked("/v1/chat/completions"), path=path)
    refused = 400 if "//" in path else 404
    assert (reply.status, reply.headers["x-should-retry"]) == (refused, "false")
    assert (await running.get(path, key=running.key)).status == refused
    assert running.worker.paths == []


@EVERY
async def test_route_that_the_worker_lacks_has_its_own_code(serve, path):
    """It was started for another task, which no retry changes."""
    running = await serve(FakeWorker(lacks=(ROUTES[path].worker_path,)))
    reply = await running.post(asked(path), path=path)
    assert (reply.status, reply.headers["x-should-retry"]) == (404, "false")
    assert "another task" in error_of(path, reply.body)["message"]
    assert (await running.outcome())["outcome"] == "worker_refused"


@EVERY
async def test_missing_member_of_a_route_is_named(running, path):
    """A clear 400, and no worker receives the request."""
    reply = await running.post({"model": MODEL}, path=path)
    assert reply.status == 400
    first = ROUTES[path].needs[0][0]
    assert f"`{first}`" in error_of(path, reply.body)["message"]
    assert running.worker.bodies == []


# Policy.


@pytest.mark.parametrize("path", [path for path in BODIES if ROUTES[path].carriers])
async def test_no_request_makes_a_worker_fetch_a_url(running, path):
    """The refusal says what to send instead, and is recorded."""
    block = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
    part = block if path.startswith("/v1/messages") else PICTURE
    carrier = ROUTES[path].carriers[0]
    body = asked(path, **{carrier: [{"role": "user", "content": [part]}]})
    reply = await running.post(body, path=path)
    assert reply.status == 400
    assert "`data:` URL" in error_of(path, reply.body)["message"]
    await until(lambda: running.entries("request.denied"))
    (denied,) = running.entries("request.denied")
    assert (denied["reason"], denied["status"], denied["route"]) == ("media_url_not_allowed", 400, path)
    assert (running.worker.bodies, running.entries("request.intent")) == ([], [])


@pytest.mark.parametrize("path", [path for path in BODIES if ROUTES[path].caches])
async def test_each_tenant_has_its_own_cache_at_a_worker(serve, path):
    """The salt is the gateway's, the same for all of a tenant's requests."""
    running = await serve(FakeWorker(answer=answer_of(path).encode()))
    for key in (running.key, running.key, running.careful_key):
        assert (await running.post(asked(path), path=path, key=key)).status == 200
    salts = [json.loads(body)["cache_salt"] for body in running.worker.bodies]
    assert salts[0] == salts[1] != salts[2]


async def test_one_cache_for_all_is_the_operators_to_choose(serve):
    """Then bodies go out without a salt, unless the client sends one."""
    running = await serve(FakeWorker(), share_prefix_cache=True)
    await running.post(asked("/v1/completions"), path="/v1/completions")
    await running.post(asked("/v1/completions", cache_salt="mine"), path="/v1/completions")
    first, second = map(json.loads, running.worker.bodies)
    assert "cache_salt" not in first
    assert second["cache_salt"] == "mine"


async def test_a_priority_is_taken_out_and_the_record_says_so(running):
    """Nothing else of the body changes."""
    running.worker.answer = answer_of("/v1/completions").encode()
    body = asked("/v1/completions", priority=-5, seed=1)
    assert (await running.post(body, path="/v1/completions")).status == 200
    sent = json.loads(running.worker.bodies[0])
    del sent["cache_salt"]
    assert sent == asked("/v1/completions", seed=1)
    assert list((await running.outcome())["verdicts"]) == ["priority_removed"]


async def test_a_worker_is_never_asked_to_keep_a_response(running):
    """With any default of the route."""
    running.worker.answer = answer_of("/v1/responses").encode()
    await running.post(asked("/v1/responses"), path="/v1/responses")
    assert json.loads(running.worker.bodies[0])["store"] is False
    for member in ({"store": True}, {"previous_response_id": "resp_1"}, {"background": True}):
        reply = await running.post(asked("/v1/responses", **member), path="/v1/responses")
        assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
        assert reply.error["param"] in member
    assert len(running.worker.bodies) == 1


@pytest.mark.parametrize("path", [path for path in BODIES if not ROUTES[path].dialect.generates])
async def test_non_generating_request_needs_no_target_only_worker(serve, path):
    """There is nothing to draft, so an opt-out has no effect."""
    running = await serve(FakeWorker(metrics=SPECULATIVE_METRICS, answer=answer_of(path).encode()))
    reply = await running.post(asked(path), path=path, key=running.careful_key)
    assert reply.status == 200
    assert "speculation_forbidden" not in await running.outcome()


async def test_an_adapter_is_a_separate_model(serve):
    """Who may use every model may not use adapters, unless by name."""
    running = await serve(FakeWorker(models=[MODEL, "tuned"], parents={"tuned": MODEL}))
    reply = await running.post({**asked("/v1/completions"), "model": "tuned"}, path="/v1/completions")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    models = json.loads((await running.get("/v1/models", key=running.key)).body)["data"]
    assert [model["id"] for model in models] == [MODEL]
    assert (await running.get("/v1/models/tuned", key=running.key)).status == 404
