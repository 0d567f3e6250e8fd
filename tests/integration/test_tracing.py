"""
Traces of a whole appliance, as a collector gets them: OTLP over HTTP, on loopback.

Each byte that reaches the collector is searched for prompt and completion.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from demo.process import ApplianceProcess
from tests.certificates import LOOPBACK, Authority
from tests.fakes import MODEL, FakeWorker
from tests.integration.caller import MODEL as DEMO_MODEL
from tests.integration.collector import PATIENCE_SECONDS, Collector, traced

CHAT = "/v1/chat/completions"
ASKED = "zanzibar-ledger-7731"
ANSWERED = "quinine-orchard-4402"
REQUEST_ID = "appliance.request_id"
THEIRS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().listening() as collector:
        yield collector


@contextmanager
def gateway(directory, environment: dict[str, str], *workers: str) -> Iterator[ApplianceProcess]:
    urls = {"APPLIANCE_POOL__URLS": json.dumps(workers)}
    with ApplianceProcess("gateway", data=directory / "data", environment=environment | urls) as process:
        yield process


def ask(process: ApplianceProcess, *, model: str = MODEL, **headers: str) -> httpx.Response:
    """One chat, streamed; it has to work."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": ASKED}], "max_tokens": 8}
    headers = {"x-api-key": process.key, **headers}
    answer = httpx.post(process.url + CHAT, json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


def page(process: ApplianceProcess, accept: str = "*/*") -> httpx.Response:
    return httpx.get(process.admin_url + "/metrics", headers={"Accept": accept}, timeout=60, trust_env=False)


def spans_counted(process: ApplianceProcess) -> dict[str, float]:
    families = {family.name: family for family in read_text(page(process).text)}
    return {sample.labels["result"]: sample.value for sample in families["appliance_trace_spans"].samples}


async def test_a_chat_through_a_gateway(tmp_path, collector):
    """A trace without content; the worker gets its id, the log and the histograms name it."""
    worker = FakeWorker(pieces=[ANSWERED, " and so on"])
    async with worker.serving():
        await asyncio.to_thread(_chat_through_a_gateway, tmp_path, collector, worker)


def _chat_through_a_gateway(directory, collector: Collector, worker: FakeWorker) -> None:
    with gateway(directory, traced(collector), worker.url) as process:
        answer = ask(process, traceparent=THEIRS, tracestate="said=" + ASKED, baggage="said=" + ASKED)
        assert ANSWERED in answer.text
        found = collector.wait_for(f"POST {CHAT}", f"chat {MODEL}")
        root, asked = found[f"POST {CHAT}"], found[f"chat {MODEL}"]
        assert (root["parent"], root["links"]) == ("", [tuple(THEIRS.split("-")[1:3])])
        assert root["trace"] not in THEIRS
        assert (asked["trace"], asked["parent"]) == (root["trace"], root["id"])
        assert worker.headers[-1]["traceparent"] == f"00-{asked['trace']}-{asked['id']}-01"
        assert not {"tracestate", "baggage"} & {name.lower() for name in worker.headers[-1]}

        told = asked["attributes"]
        assert f"http://{told['server.address']}:{told['server.port']}" == worker.url
        assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", MODEL)
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (7, 10)
        assert told["appliance.speculation.acceptance_length"] == 2.5
        assert root["attributes"]["appliance.tenant"] == "demo"

        text, with_exemplars = page(process), page(process, OPENMETRICS)
        assert text.headers["content-type"].startswith("text/plain")
        assert with_exemplars.headers["content-type"].startswith("application/openmetrics-text")
        assert {sample.exemplar.labels["trace_id"] for sample in exemplars(with_exemplars.text)} == {
            root["trace"]
        }
        assert {family.name for family in read_text(text.text)} >= {"appliance_request_seconds"}
        assert spans_counted(process) == {"sent": 2, "dropped": 0}
    _no_content_was_sent(collector)
    (line,) = [json.loads(line) for line in process.output if '"request_finished"' in line]
    assert line["trace_id"] == root["trace"]
    assert line["request_id"] == root["attributes"][REQUEST_ID]


def exemplars(text: str) -> list[Any]:
    """The samples with an exemplar, read by a strict parser of the format."""
    return [sample for family in read_openmetrics(text) for sample in family.samples if sample.exemplar]


def _no_content_was_sent(collector: Collector) -> None:
    assert collector.bodies
    for body in collector.bodies:
        for text in (ASKED, ANSWERED):
            assert text.encode() not in body
    assert not [span for span in collector.spans if span["events"]]


async def test_a_request_that_waits(tmp_path, collector):
    """The wait has its own span, between those of the request and the worker."""
    worker = FakeWorker(pause_seconds=0.2)
    async with worker.serving():
        await asyncio.to_thread(_request_that_waits, tmp_path, collector, worker)


def _request_that_waits(directory, collector: Collector, worker: FakeWorker) -> None:
    environment = traced(collector, APPLIANCE_ADMISSION__WORKER_REQUESTS="1")
    with gateway(directory, environment, worker.url) as process, ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: ask(process), range(2)))
        queue = collector.wait_for("queue")["queue"]
    root, asked = (
        next(span for span in collector.spans if span["name"] == name and span["trace"] == queue["trace"])
        for name in (f"POST {CHAT}", f"chat {MODEL}")
    )
    assert queue["parent"] == asked["parent"] == root["id"]
    assert root["attributes"]["appliance.queued_ms"] > 0
    assert len(collector.spans) == 5


async def test_a_request_that_is_tried_again(tmp_path, collector):
    """Both workers have a span, in one trace; each worker gets its own parent."""
    workers = [FakeWorker(), FakeWorker()]
    async with workers[0].serving(), workers[1].serving():
        workers.sort(key=lambda worker: worker.url)
        workers[0].breaks_before_answer = True  # of two equal workers the first by name is asked first
        await asyncio.to_thread(_request_that_is_tried_again, tmp_path, collector, workers)


def _request_that_is_tried_again(directory, collector: Collector, workers: list[FakeWorker]) -> None:
    with gateway(directory, traced(collector), *(worker.url for worker in workers)) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not workers[0].bodies:
            assert time.monotonic() < deadline
            ask(process)
    trace = workers[0].headers[-1]["traceparent"].split("-")[1]
    failed, worked = [
        span for span in collector.spans if span["trace"] == trace and span["name"] == f"chat {MODEL}"
    ]
    assert failed["attributes"]["error.type"] == "worker_failed"
    assert "error.type" not in worked["attributes"]
    told = [worker.headers[-1]["traceparent"].split("-")[2] for worker in workers]
    assert told == [failed["id"], worked["id"]]


@pytest.mark.parametrize("believed", [True, False])
async def test_a_collector_with_a_certificate(tmp_path, believed):
    """It is checked with the authorities of the settings; one they do not know gets nothing."""
    authorities = Authority("ours"), Authority("theirs")
    certificate = authorities[0].issue(tmp_path, "collector", *LOOPBACK)
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text(authorities[not believed].pem)
    worker = FakeWorker()
    with Collector(certificate).listening() as collector:
        async with worker.serving():
            await asyncio.to_thread(
                _collector_with_a_certificate, tmp_path, collector, worker, str(ca_file), believed
            )


def _collector_with_a_certificate(
    directory, collector: Collector, worker: FakeWorker, ca_file: str, believed: bool
) -> None:
    environment = traced(
        collector, APPLIANCE_TRACING__CA_FILE=ca_file, APPLIANCE_TRACING__TIMEOUT_SECONDS="1"
    )
    with gateway(directory, environment, worker.url) as process:
        ask(process)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(spans_counted(process).values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert spans_counted(process) == (
            {"sent": 2, "dropped": 0} if believed else {"sent": 0, "dropped": 2}
        )
    assert bool(collector.bodies) is believed


async def test_an_unreachable_collector_does_not_affect_requests(tmp_path, collector):
    """Requests are answered, spans are counted, and the log says it once."""
    collector.status = 400
    worker = FakeWorker()
    async with worker.serving():
        await asyncio.to_thread(_without_a_collector, tmp_path, collector, worker)


def _without_a_collector(directory, collector: Collector, worker: FakeWorker) -> None:
    with gateway(directory, traced(collector), worker.url) as process:
        for count in (2, 4, 6):
            ask(process)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while spans_counted(process).get("dropped") != count:
                assert time.monotonic() < deadline, spans_counted(process)
                time.sleep(0.05)
        assert spans_counted(process) == {"sent": 0, "dropped": 6}
    lines = [json.loads(line) for line in process.output if line.startswith("{")]
    assert [line["event"] for line in lines].count("trace_collector_failing") == 1
    assert not [line for line in lines if line["event"] == "library_logged"]


@pytest.mark.worker
@pytest.mark.xdist_group("appliance")
def test_a_chat_on_a_real_worker(appliance, traces):
    """vLLM's span is a child of the gateway's span of the call."""
    answer = ask(appliance, model=DEMO_MODEL)
    words = "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
        for line in answer.text.splitlines()
        if line.startswith('data: {"id') and '"delta"' in line
    )
    assert words

    request_id = answer.headers["x-request-id"]

    def of_this_chat() -> list[dict[str, Any]]:
        told = [span["trace"] for span in traces.spans if span["attributes"].get(REQUEST_ID) == request_id]
        return [span for span in traces.spans if span["trace"] in told]

    traces.wait_until(lambda: len(of_this_chat()) == 3)
    found = {span["name"]: span for span in of_this_chat()}
    root, asked, engine = (found[name] for name in (f"POST {CHAT}", f"chat {DEMO_MODEL}", "llm_request"))
    assert engine["service"] == "sovereign-appliance-worker"
    assert (asked["parent"], engine["parent"]) == (root["id"], asked["id"])
    assert engine["attributes"]["gen_ai.usage.completion_tokens"] == 8
    assert asked["attributes"]["gen_ai.usage.output_tokens"] == 8
    assert request_id in engine["attributes"]["gen_ai.request.id"]
    # Of every request, and of nothing else: not of what the appliance itself asks of the worker.
    traces.wait_until(
        lambda: (
            {span["trace"] for span in traces.spans}
            == {span["trace"] for span in traces.spans if span["name"].startswith("POST /")}
        )
    )
    for body in traces.bodies:
        assert ASKED.encode() not in body
        assert words.encode() not in body
