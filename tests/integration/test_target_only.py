"""
Requests that must not be speculated, and requests whose drafts failed, on real sockets.

Every test ends with the auditor's verifier finding the whole log valid and complete.
"""

import json
import re

import pytest

from appliance.gateway.attribution import Aspect
from appliance.serving.worker import Admission, WorkerId
from tests.fakes import (
    MODEL,
    SPECULATION,
    SPECULATIVE_METRICS,
    USAGE,
    FakeWorker,
    chat,
    frame_of,
    text,
    until,
)

HEADER = {"X_Appliance_Speculation": "off"}
FORBIDDEN = pytest.mark.parametrize(
    ("body", "headers", "is_careful", "why", "param"),
    [
        (chat(min_p=0.1), {}, False, "parameter", "min_p"),
        (chat(logit_bias={"5": 1}, stream=True), {}, False, "parameter", "logit_bias"),
        (chat(), HEADER, False, "header", "X-Appliance-Speculation"),
        (chat(stream=True), HEADER, False, "header", "X-Appliance-Speculation"),
        (chat(), {}, True, "tenant", None),
    ],
)


def drafting(**more) -> FakeWorker:
    """Return a worker that was started with a draft."""
    return FakeWorker(metrics=SPECULATIVE_METRICS, **more)


def key_of(running, is_careful: bool) -> str:
    """Return a key of a tenant that is opted out, or of one that is not."""
    return running.careful_key if is_careful else running.key


@FORBIDDEN
async def test_opted_out_requests_go_to_target_only_workers(serve, body, headers, is_careful, why, param):
    """Even if another worker is free; the outcome names the reason."""
    running = await serve(drafting(), FakeWorker())
    for count in range(1, 4):
        reply = await running.post(body, key=key_of(running, is_careful), **headers)
        assert reply.status == 200
        outcome = await running.outcome(count)
        assert (outcome["worker"], outcome["speculation_forbidden"]) == ("w2", why)
    assert [len(worker.bodies) for worker in running.workers] == [0, 3]


async def test_other_requests_are_speculated(serve):
    """A worker with a draft comes first; parameters without effect and the word `auto` change nothing."""
    running = await serve(FakeWorker(), drafting())
    for count, body in enumerate((chat(), chat(min_p=0), chat(min_p=0.2, temperature=0), text()), start=1):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        assert (await running.post(body, path=path, X_Appliance_Speculation="auto")).status == 200
        assert "speculation_forbidden" not in await running.outcome(count)
    assert [len(worker.bodies) for worker in running.workers] == [0, 4]


@FORBIDDEN
async def test_error_names_why_no_worker_can_answer(serve, body, headers, is_careful, why, param):
    """400 with the parameter that forbids it; not retryable, and recorded as refused."""
    running = await serve(drafting(), drafting())
    reply = await running.post(body, key=key_of(running, is_careful), **headers)
    assert (reply.status, reply.headers["x-should-retry"]) == (400, "false")
    error = (reply.error["type"], reply.error["param"], reply.error["code"])
    assert error == ("invalid_request_error", param, "needs_target_only_worker")
    assert "target-only worker" in reply.error["message"]
    await until(lambda: running.entries("request.denied"))
    (denied,) = running.entries("request.denied")
    assert (denied["reason"], denied["status"]) == ("needs_target_only_worker", 400)
    assert denied["tenant"] == ("careful" if is_careful else "acme")
    assert [worker.bodies for worker in running.workers] == [[], []]
    assert running.entries("request.intent") == []


async def test_target_only_worker_of_another_model_does_not_count(serve):
    """It could not answer."""
    running = await serve(drafting(), FakeWorker(models=["other"]))
    assert (await running.post(chat(min_p=0.1))).error["code"] == "needs_target_only_worker"


async def test_a_target_only_worker_that_is_away_is_worth_waiting_for(serve):
    """503 as for any worker that is down or drained, and no worker with a draft steps in."""
    running = await serve(drafting(), FakeWorker())
    running.pool.report_unreachable(WorkerId("w2"))
    reply = await running.post(chat(min_p=0.1))
    assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
    assert reply.headers["x-should-retry"] == "true"
    await running.control.tick()
    running.pool.set_admission(WorkerId("w2"), Admission.DRAINING)
    assert (await running.post(chat(min_p=0.1))).status == 503
    running.pool.set_admission(WorkerId("w2"), Admission.ADMITTED)
    assert (await running.post(chat(min_p=0.1))).status == 200
    assert running.worker.bodies == []


async def test_a_retry_goes_to_no_worker_with_a_draft_either(serve):
    """The same rule applies to the second worker."""
    running = await serve(FakeWorker(breaks_before_answer=True), drafting(), FakeWorker())
    assert (await running.post(chat(), **HEADER)).status == 200
    outcome = await running.outcome()
    assert (outcome["worker"], outcome["retries"]) == ("w3", 1)
    running.workers[2].breaks_before_answer = True
    reply = await running.post(chat(), **HEADER)
    assert (reply.status, reply.error["code"]) == (502, "worker_failed")
    assert running.workers[1].bodies == []


async def test_unknown_header_value_is_refused(running):
    """400 that names the header; nothing was promised, so nothing is in the log."""
    for name, value in (("X-Appliance-Speculation", "no"), ("X-Appliance-Metrics", "yes")):
        reply = await running.post(chat(), **{name: value})
        assert (reply.status, reply.error["param"]) == (400, name)
        assert name in reply.error["message"]
    assert running.entries("request.intent") == []


async def test_the_workers_metrics_are_kept_for_a_client_that_asks(running):
    """In a non-streaming answer, and in the usage frame of a stream."""
    asked = {"X_Appliance_Metrics": "on"}
    plain = await running.post(chat(), **asked)
    assert json.loads(plain.body) == running.worker.whole("/v1/chat/completions")
    usage = {"include_usage": True}
    stream = await running.post(chat(stream=True, stream_options=usage), **asked)
    frame = frame_of({"id": "c", "choices": [], "usage": USAGE, "metrics": SPECULATION})
    assert stream.body.endswith(frame + b"data: [DONE]\n\n")
    unasked = await running.post(chat(stream=True, stream_options=usage), X_Appliance_Metrics="off")
    assert b"metrics" not in unasked.body
    assert "X-Appliance-Metrics" not in running.worker.headers[0]


@pytest.mark.parametrize("stream", [True, False])
async def test_drafts_are_attributed_to_the_traffic_they_were_made_for(serve, stream):
    """By tenant, model, template and context length; the outcome in the log says the same."""
    running = await serve(drafting())
    system = [{"role": "system", "content": "SECRET"}]
    await running.post(chat(stream=stream))
    await running.post(chat(stream=stream, messages=system))
    await running.post(chat(stream=stream, messages=[*system, {"role": "user", "content": "x"}]))
    await running.outcome(3)
    outcomes = running.entries("request.outcome")
    templates = [outcome["template"] for outcome in outcomes]
    assert templates[0] != templates[1] == templates[2]
    assert all(re.fullmatch("chat-[0-9a-f]{8}", template) for template in templates)
    assert {outcome["context_bucket"] for outcome in outcomes} == {"0-1k"}
    await until(lambda: running.attribution.overall().requests == 3)
    worst = running.attribution.offenders(1)[0]
    assert (worst.tenant, worst.model, worst.template, worst.context) == ("acme", MODEL, templates[1], "0-1k")
    assert (worst.requests, worst.drafts, worst.wasted_draft_tokens) == (2, 8, 12)
    assert worst.acceptance_length == pytest.approx(2.5)
    assert {share.value: share.requests for share in running.attribution.by(Aspect.TEMPLATE)} == {
        templates[0]: 1,
        templates[1]: 2,
    }


async def test_refused_or_aborted_request_is_not_attributed(serve):
    """Its drafts were not reported."""
    running = await serve(drafting(breaks_after=1))
    await running.post(chat(stream=True))
    await running.control.tick()
    running.worker.breaks_after, running.worker.status = None, 400
    await running.post(chat())
    assert (await running.outcome(2))["outcome"] == "worker_refused"
    await running.events("request_finished", 2)
    assert running.attribution.overall().requests == 0
