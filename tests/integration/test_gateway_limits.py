"""
The charge for a request, with every outcome, through the whole gateway on real sockets.

The limits of several gateways, and of gateways that die, are in tests/contract.
"""

import asyncio
import time
from dataclasses import replace
from zoneinfo import ZoneInfo

import pytest
from prometheus_client import CollectorRegistry

from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LogSettings
from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.ledger import LeaseTerms
from appliance.tenancy.limits.limiter import Limiter
from tests.fakes import USAGE, FakeWorker, chat, until
from tests.memory_ledgers import MemoryLedgerStore

TERMS = LeaseTerms(lease_seconds=10.0, renew_seconds=0.1, zone=ZoneInfo("UTC"))
BUDGET = 100_000
USED = USAGE["total_tokens"]


class LimitedTenants(Limiter):
    """Gives every tenant the same limits."""

    limits = Limits(tokens_per_day=BUDGET, concurrent_requests=2, requests_per_minute=1000)

    async def enter(self, tenant, keys=()):
        return await super().enter(replace(tenant, limits=self.limits), keys)

    def take(self, tenant, *request):
        return super().take(replace(tenant, limits=self.limits), *request)

    async def wait(self, tenant, *request):
        return await super().wait(replace(tenant, limits=self.limits), *request)

    def headers(self, tenant, model=None, keys=()):
        return super().headers(replace(tenant, limits=self.limits), model, keys)

    def holding(self, key):
        return self._tenants["acme"].share.holdings[key]

    @property
    def charged(self):
        """Tokens of the day that are charged, with no request in flight."""
        return BUDGET - self.holding("tokens_per_day").remaining(self._clock())

    @property
    def under_way(self):
        return self.holding("concurrent_requests").in_use if self._tenants else 0


@pytest.fixture
async def limited(serve):
    """A gateway in front of one worker, with limits, and those."""
    running = await serve(FakeWorker())
    gateway = running.server.config.app.state.services.gateway
    limiter = gateway.limits = LimitedTenants(
        store=MemoryLedgerStore(gateway="one", terms=TERMS, clock=time.time),  # noqa: TID251 - a root
        terms=TERMS,
        guess_tokens=512,
        clock=time.monotonic,
        wall_clock=time.time,  # noqa: TID251 - as above
        metrics=Metrics(CollectorRegistry()),
        logger=configure_logs(LogSettings(level="error"), terminal=False),
    )
    task = asyncio.create_task(limiter.run())
    yield running, limiter
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_charged_what_the_worker_counted(limited, stream):
    """Not its reservation."""
    running, limiter = limited
    for number in range(1, 4):
        assert (await running.post(chat(stream=stream))).status == 200
        await until(lambda expected=number * USED: limiter.charged == expected)
    assert limiter.under_way == 0


async def test_an_answer_without_token_counts_is_charged_by_its_prompt_and_frames(limited):
    """A client that disconnected in the middle is charged too."""
    running, limiter = limited
    running.worker.pieces = ["x "] * 200
    running.worker.pause_seconds = 0.02
    async with running.asking(chat(stream=True)) as response:
        for _ in range(5):
            await response.content.readuntil(b"\n\n")
        assert limiter.under_way == 1
    await until(lambda: limiter.under_way == 0)
    await until(lambda: 10 < limiter.charged < 300)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_is_charged_all_that_the_worker_generated_for_it(limited, stream):
    """Prompt and answer, not the frames it was sent; the log has the same numbers, and calls them exact."""
    running, limiter = limited
    worker = running.worker
    worker.counts, worker.piece_tokens, worker.pieces, worker.pause_seconds = True, 5, ["x "] * 1000, 0.01
    asking = asyncio.create_task(running.post(chat(stream=stream)))
    await until(lambda: any(tokens > 50 for tokens in worker.generated.values()))
    assert limiter.under_way == 1
    asking.cancel()
    outcome = await running.outcome()
    await until(lambda: limiter.under_way == 0)
    (generated,) = worker.generated.values()
    assert (outcome["outcome"], outcome["tokens_estimated"]) == ("client_gone", False)
    assert (outcome["prompt_tokens"], outcome["completion_tokens"]) == (USAGE["prompt_tokens"], generated)
    await until(lambda: limiter.charged == USAGE["prompt_tokens"] + generated)
    (line,) = await running.events("request_finished")
    assert line["completion_tokens"] == generated


async def test_answer_that_takes_too_long_is_recorded_with_what_the_worker_generated(serve):
    """Nothing of it reached the client, but the worker was busy with it."""
    worker = FakeWorker(counts=True, pieces=["x "] * 1000, pause_seconds=0.01)
    running = await serve(worker, silence_seconds=1)
    assert (await running.post(chat())).error["code"] == "worker_timeout"
    outcome = await running.outcome()
    (generated,) = worker.generated.values()
    assert (outcome["outcome"], outcome["tokens_estimated"]) == ("timed_out", False)
    assert outcome["completion_tokens"] == generated > 0


async def test_client_that_leaves_is_charged_an_estimate_if_its_worker_cannot_tell(limited):
    """Its prompt included; the reservation is released."""
    running, limiter = limited
    running.worker.plugin_token = "another"
    running.worker.counts = True
    running.worker.head_seconds = 30
    asking = asyncio.create_task(running.post(chat()))
    await until(lambda: running.worker.bodies)
    asking.cancel()
    outcome = await running.outcome()
    await until(lambda: limiter.under_way == 0)
    assert outcome["tokens_estimated"]
    await until(lambda: limiter.charged == outcome["prompt_tokens"] > 0)


async def test_queued_client_that_leaves_releases_its_slot(limited):
    """In every queue."""
    running, limiter = limited
    running.worker.head_seconds = 30
    for _ in range(3):
        waiting = [asyncio.create_task(running.post(chat())) for _ in range(2)]
        await until(lambda: limiter.under_way == 2)
        assert (await running.post(chat())).status == 429
        for task in waiting:
            task.cancel()
        await until(lambda: limiter.under_way == 0)


@pytest.mark.parametrize("worker", [{"status": 400}, {"status": 500}, {"breaks_before_answer": True}])
async def test_a_request_that_no_worker_answered_costs_no_tokens(limited, worker):
    """It releases its slot as well."""
    running, limiter = limited
    for name, value in worker.items():
        setattr(running.worker, name, value)
    assert (await running.post(chat())).status >= 400
    await until(lambda: limiter.charged == 0)
    assert limiter.under_way == 0


async def test_a_request_that_the_audit_log_refuses_costs_no_tokens(limited):
    """The reservation came before the audit log."""
    running, limiter = limited
    running.store.refused = {"request.intent"}
    assert (await running.post(chat())).status == 503
    running.store.release()
    await until(lambda: limiter.under_way == 0)
    assert (await running.post(chat())).status == 200


async def test_a_refused_request_reaches_no_worker_and_is_in_the_log(limited):
    """With the code that its client was given."""
    running, limiter = limited
    limiter.limits = Limits(requests_per_minute=1)
    first, second = await running.post(chat()), await running.post(chat())
    assert (first.status, second.status) == (200, 429)
    assert second.error["code"] == "rate_limit_exceeded"
    assert len(running.worker.bodies) == 1
    await until(lambda: running.entries("request.denied"))
    (denied,) = running.entries("request.denied")
    assert (denied["reason"], denied["status"], denied["tenant"]) == ("rate_limit_exceeded", 429, "acme")


@pytest.mark.parametrize(
    "body", [b"no JSON", b'{"model":"demo","messages":' + b"[]" * 100_000], ids=["small", "large"]
)
async def test_a_tenant_over_its_request_limit_is_refused_before_its_body_is_read(limited, body):
    """The body would be a 400; the refusal is in the log although the model is not known."""
    running, limiter = limited
    limiter.limits = Limits(requests_per_minute=1)
    assert (await running.post(chat())).status == 200
    refused = await running.post(body)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    await until(lambda: running.entries("request.denied"))
    (denied,) = running.entries("request.denied")
    assert (denied["reason"], denied["tenant"]) == ("rate_limit_exceeded", "acme")
    assert denied["route"] == "/v1/chat/completions"


@pytest.mark.parametrize("size", [1, 100_000], ids=["small", "large"])
async def test_a_request_counts_once_and_one_that_does_not_begin_not_at_all(limited, size):
    """Although its limits are checked before and after its body is read."""
    running, limiter = limited
    limiter.limits = Limits(requests_per_minute=3, concurrent_requests=1)
    padding = {"metadata": "x" * size}
    for _ in range(4):
        assert (await running.post({**chat(), **padding, "stream": "yes"})).status == 400
        assert (await running.post({**chat(), **padding, "model": "unknown"})).status == 404
    for left in (2, 1, 0):
        answer = await running.post({**chat(), **padding})
        assert answer.status == 200
        assert limiter.under_way == 0
        await until(
            lambda expected=left: (
                limiter.holding("requests_per_minute").remaining(time.monotonic()) == expected
            )
        )
    assert (await running.post({**chat(), **padding})).status == 429
