"""The gateway's side: who is let in at once, who waits, who is refused, and what a lost database does."""

import asyncio
import time
from contextlib import asynccontextmanager
from zoneinfo import ZoneInfo

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from appliance.errors import LimitReachedError, LimitsUnavailableError, RequestOverLimitError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LogSettings
from appliance.tenancy.allowances import KeyLimits, Limits
from appliance.tenancy.limits.estimate import RequestSize
from appliance.tenancy.limits.limiter import Limiter
from appliance.tenancy.limits.limiting import UNLIMITED
from appliance.tenancy.limits.store import LeaseTerms
from appliance.tenancy.tenant import Tenant
from tests.fakes import until
from tests.memory_ledgers import MemoryLedgerStore

TERMS = LeaseTerms(lease_seconds=2.0, renew_seconds=0.05, zone=ZoneInfo("UTC"))
SIZE = RequestSize(prompt=6, answer=10)


class FailingStore(MemoryLedgerStore):
    """Fails when it is told to, before or after it has entered a report."""

    def __init__(self, **options):
        super().__init__(**options)
        self.is_away = self.loses_answers = False
        self.exchanges = 0

    def exchange(self, requests):
        self.exchanges += 1
        if self.is_away:
            raise LimitsUnavailableError("away")
        replies = super().exchange(requests)
        if self.loses_answers:
            raise LimitsUnavailableError("cut off")
        return replies


class Gateway:
    """A limiter, and one tenant's requests to it, with a key of these limits."""

    def __init__(self, store, limits):
        self.store, self.metrics = store, Metrics(CollectorRegistry())
        self.limiter = Limiter(
            store=store,
            terms=TERMS,
            guess_tokens=20,
            clock=time.monotonic,
            wall_clock=time.time,  # noqa: TID251 - a test is a composition root
            metrics=self.metrics,
            logger=configure_logs(LogSettings(level="error"), terminal=False),
        )
        self.tenant = Tenant(name="acme", limits=limits)
        self.keys = ()

    def take(self):
        return self.limiter.take(self.tenant, "demo", SIZE, self.keys)

    async def let_in(self):
        return self.take() or await self.limiter.wait(self.tenant, "demo", SIZE, self.keys)

    async def enter(self):
        return await self.limiter.enter(self.tenant, self.keys)

    def headers(self):
        return self.limiter.headers(self.tenant, "demo", self.keys)

    @property
    def share(self):
        return self.share_of("acme")

    def share_of(self, ledger):
        return self.limiter._tenants[ledger].share

    @property
    def page(self):
        return generate_latest(self.metrics.registry).decode()


@pytest.fixture
async def gateway():
    """Start a gateway whose tenant has these limits, on a store of its own or another's."""
    running = []

    @asynccontextmanager
    async def open_(store=None, **limits):
        made = Gateway(
            store or FailingStore(gateway="g", terms=TERMS, clock=time.time),  # noqa: TID251 - as above
            Limits(**limits),
        )
        task = asyncio.create_task(made.limiter.run())
        running.append(task)
        try:
            yield made
        finally:
            task.cancel()

    yield open_
    for task in running:
        task.cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended


async def test_a_tenant_without_limits_costs_nothing(gateway):
    """No reservation is made, no header told, no ledger opened."""
    async with gateway() as one:
        assert one.take() is UNLIMITED
        assert one.limiter.headers(one.tenant, "demo") == {}
        await asyncio.sleep(3 * TERMS.renew_seconds)
        assert one.store.exchanges == 0


async def test_exactly_the_limit_is_admitted(gateway):
    async with gateway(requests_per_minute=20) as one:
        ended = await asyncio.gather(*(one.let_in() for _ in range(50)), return_exceptions=True)
        refused = [each for each in ended if isinstance(each, LimitReachedError)]
        assert len(refused) == 30
        assert all(1 <= error.retry_seconds <= 61 for error in refused)
        assert 'appliance_limit_refusals_total{limit="requests_per_minute",tenant="acme"} 30.0' in one.page
        assert 'appliance_limit_used_ratio{limit="requests_per_minute",tenant="acme"} 1.0' in one.page


async def test_repeated_refusals_cause_no_exchange(gateway):
    async with gateway(requests_per_minute=1) as one:
        await one.let_in()
        for _ in range(200):
            with pytest.raises(LimitReachedError):
                await one.let_in()
        assert one.store.exchanges < 50


async def test_released_concurrency_is_taken_at_once(gateway):
    async with gateway(concurrent_requests=1) as one:
        for _ in range(20):
            reservation = await one.let_in()
            with pytest.raises(LimitReachedError):
                await one.let_in()
            reservation.settle(0)
        assert one.share.holdings["concurrent_requests"].in_use == 0


async def test_request_larger_than_the_limit_is_refused(gateway):
    async with gateway(tokens_per_minute=5) as one:
        with pytest.raises(RequestOverLimitError):
            await one.let_in()


async def test_request_cancelled_while_waiting_releases_everything(gateway):
    """At whatever moment it happens: before, while and after the ledger was requests."""
    async with gateway(concurrent_requests=50, tokens_per_minute=100_000) as one:
        for number in range(150):
            waiting = [asyncio.create_task(one.let_in()) for _ in range(3)]
            for _ in range(number % 12):
                await asyncio.sleep(0)
            if number % 4 == 0:
                await asyncio.sleep(0.001)
            for task in waiting:
                task.cancel()
            for ended in await asyncio.gather(*waiting, return_exceptions=True):
                if not isinstance(ended, BaseException):
                    ended.settle(0)
        assert one.share.holdings["concurrent_requests"].in_use == 0
        await until(lambda: one.limiter.headers(one.tenant)["x-ratelimit-remaining-tokens"] == "100000")


async def test_without_database_held_units_are_used_then_requests_refused(gateway):
    async with gateway(requests_per_minute=1000) as one:
        for _ in range(10):
            await one.let_in()
        holding = one.share.holdings["requests_per_minute"]
        await until(lambda: holding.free > 0)
        one.store.is_away = True
        held = holding.free
        assert [one.take() is not None for _ in range(held)] == [True] * held
        with pytest.raises(LimitsUnavailableError):
            await one.let_in()
        assert "appliance_limits_failing 1.0" in one.page
        one.store.is_away = False
        await until(lambda: "appliance_limits_failing 0.0" in one.page)
        assert await one.let_in()


async def test_held_units_are_unusable_after_the_lease(gateway):
    async with gateway(requests_per_minute=1000) as one:
        await one.let_in()
        await until(lambda: one.share.holdings["requests_per_minute"].free > 0)
        one.store.is_away = True
        await until(lambda: time.monotonic() >= one.share.valid_until)
        assert one.share.holdings["requests_per_minute"].free > 0
        assert one.take() is None


async def test_lost_answer_loses_no_units(gateway):
    """Every request is counted once, whether or not the gateway heard that it was."""
    async with gateway(requests_per_minute=1000) as one:
        let_in = 0
        for number in range(60):
            one.store.loses_answers = number % 3 == 0
            try:
                await one.let_in()
                let_in += 1
            except LimitsUnavailableError:
                pass
            await asyncio.sleep(0.01)
        one.store.loses_answers = False
        await one.limiter.close()
        ledger = one.store.ledgers["acme"]
        assert sum(ledger.spent["requests_per_minute"].values()) == let_in


async def test_two_gateways_share_a_limit_exactly(gateway):
    """Neither refuses while the other holds something it does not need."""
    books = {}

    def store(name):
        made = MemoryLedgerStore(gateway=name, terms=TERMS, clock=time.time)  # noqa: TID251 - as above
        made.ledgers = books
        return made

    async with (
        gateway(store("a"), requests_per_minute=100) as one,
        gateway(store("b"), requests_per_minute=100) as other,
    ):
        for _ in range(10):
            await one.let_in()
        await until(lambda: one.share.holdings["requests_per_minute"].free > 10)
        ended = await asyncio.gather(*(other.let_in() for _ in range(150)), return_exceptions=True)
        assert sum(isinstance(each, LimitReachedError) for each in ended) == 60


async def test_close_returns_held_units(gateway):
    async with gateway(requests_per_minute=1000, concurrent_requests=10) as one:
        for _ in range(10):
            (await one.let_in()).settle(5)
        await one.limiter.close()
        held = one.store.ledgers["acme"].leases["g"].held
        assert set(held.values()) == {0}


async def test_headers_count_admitted_requests(gateway):
    async with gateway(requests_per_minute=50, tokens_per_day=1000) as one:
        before = one.limiter.headers(one.tenant, "demo")
        (await one.let_in()).settle(7)
        after = one.limiter.headers(one.tenant, "demo")
        assert before["x-ratelimit-remaining-requests"] == "50"
        assert after["x-ratelimit-remaining-requests"] == "49"
        assert after["x-ratelimit-remaining-tokens"] == "993"
        assert after["x-ratelimit-limit-tokens"] == "1000"


async def test_waiting_requests_are_decided_by_changed_limits(gateway):
    async with gateway(requests_per_minute=1, concurrent_requests=1) as one:
        for number in range(30):
            limits = [Limits(concurrent_requests=1), Limits(requests_per_minute=100_000)][number % 2]
            waiting = [asyncio.create_task(one.let_in()) for _ in range(3)]
            for _ in range(number % 5):
                await asyncio.sleep(0)
            one.tenant = Tenant(name="acme", limits=limits)
            waiting += [asyncio.create_task(one.let_in()) for _ in range(3)]
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            for each in ended:
                if isinstance(each, LimitReachedError):
                    assert each.limit in {"concurrent_requests", "requests_per_minute"}
                else:
                    each.settle(0)
        one.tenant = Tenant(name="acme", limits=Limits(concurrent_requests=1))
        (await one.let_in()).settle(0)
        assert one.share.holdings["concurrent_requests"].in_use == 0
        assert list(one.share.holdings) == ["concurrent_requests"]


async def test_removed_limit_leaves_the_metrics(gateway):
    async with gateway(requests_per_minute=10, tokens_per_day=1000) as one:
        await one.let_in()
        assert 'limit="tokens_per_day"' in one.page
        one.tenant = Tenant(name="acme", limits=Limits(requests_per_minute=10))
        await one.let_in()
        assert 'limit="tokens_per_day"' not in one.page
        assert 'appliance_limit_used_ratio{limit="requests_per_minute",tenant="acme"} 0.2' in one.page


def key(ledger="key:k", *, holder="this key", **limits):
    return KeyLimits(ledger=ledger, limits=Limits(**limits), holder=holder)


def in_use(gateway, *ledgers):
    return [gateway.share_of(each).holdings["concurrent_requests"].in_use for each in ledgers]


@pytest.mark.parametrize("begin", [Gateway.let_in, Gateway.enter])
@pytest.mark.parametrize(
    ("of_key", "of_maker", "of_tenant", "holder"),
    [
        (3, 50, 50, "this key"),
        (50, 3, 50, "the key that made this one"),
        (50, 50, 3, "your tenant"),
        (3, 50, 3, "this key"),
    ],
)
async def test_the_first_of_several_limits_that_is_used_up_refuses(
    gateway, begin, of_key, of_maker, of_tenant, holder
):
    """Exactly so many are admitted, and the refusal names whose limit it is."""
    async with gateway(requests_per_minute=of_tenant) as one:
        one.keys = (
            key(requests_per_minute=of_key),
            key("key:m", holder="the key that made this one", requests_per_minute=of_maker),
        )
        ended = await asyncio.gather(*(begin(one) for _ in range(10)), return_exceptions=True)
        refused = [each for each in ended if isinstance(each, LimitReachedError)]
        assert len(refused) == 7
        assert {f"The limit of {holder}, 3 requests per minute, is" in str(each) for each in refused} == {
            True
        }
        with pytest.raises(LimitReachedError, match=f"The limit of {holder}, 3"):
            await begin(one)
        assert 'appliance_limit_refusals_total{limit="requests_per_minute",tenant="acme"} 8.0' in one.page
        assert "key:" not in one.page


@pytest.mark.parametrize("begin", [Gateway.let_in, Gateway.enter])
async def test_units_of_a_key_are_given_back_if_the_tenant_has_none(gateway, begin):
    """Refused requests of the tenant use up nothing of the key."""
    async with gateway(concurrent_requests=1) as one:
        one.keys = (key(requests_per_minute=4, concurrent_requests=20),)
        for _ in range(3):
            first = await begin(one)
            for _ in range(5):
                with pytest.raises(LimitReachedError, match="your tenant, 1 concurrent"):
                    await begin(one)
            assert in_use(one, "key:k", "acme") == [1, 1]
            first.settle(0)
        (await begin(one)).settle(0)
        with pytest.raises(LimitReachedError, match="this key, 4 requests"):
            await begin(one)
        assert in_use(one, "key:k", "acme") == [0, 0]


async def test_take_gives_back_what_it_took_of_a_key_and_its_maker(gateway):
    async with gateway(concurrent_requests=1) as one:
        one.keys = (key(concurrent_requests=20), key("key:m", concurrent_requests=20))
        first = await one.let_in()
        held = [one.share_of(each).holdings["concurrent_requests"] for each in ("key:k", "key:m")]
        await until(lambda: all(each.free for each in held))
        before = [each.free for each in held]
        assert one.take() is None
        assert [each.free for each in held] == before
        assert in_use(one, "key:k", "key:m", "acme") == [1, 1, 1]
        first.release()
        assert in_use(one, "key:k", "key:m", "acme") == [0, 0, 0]


@pytest.mark.parametrize("begin", [Gateway.let_in, Gateway.enter])
async def test_request_cancelled_while_its_tenant_waits_releases_the_keys_units(gateway, begin):
    """At whatever moment it happens, of whatever was taken by then."""
    async with gateway(concurrent_requests=50, tokens_per_minute=100_000) as one:
        one.keys = (
            key(concurrent_requests=50, tokens_per_minute=99_000),
            key("key:m", concurrent_requests=9),
        )
        for number in range(150):
            waiting = [asyncio.create_task(begin(one)) for _ in range(3)]
            for _ in range(number % 20):
                await asyncio.sleep(0)
            if number % 4 == 0:
                await asyncio.sleep(0.001 * (number % 3))
            for task in waiting:
                task.cancel()
            for ended in await asyncio.gather(*waiting, return_exceptions=True):
                if not isinstance(ended, BaseException):
                    ended.settle(0)
        assert in_use(one, "key:k", "key:m", "acme") == [0, 0, 0]
        await until(lambda: one.headers()["x-ratelimit-remaining-tokens"] == "99000")


async def test_units_of_a_key_are_given_back_if_the_tenants_cannot_be_checked(gateway):
    """The key's units suffice; those of the tenant are asked for, and the database is away."""
    async with gateway(concurrent_requests=2) as one:
        one.keys = (key(concurrent_requests=20),)
        running = [await one.let_in() for _ in range(2)]
        holding = one.share_of("key:k").holdings["concurrent_requests"]
        await until(lambda: holding.free)
        one.store.is_away = True
        with pytest.raises(LimitsUnavailableError):
            await one.let_in()
        assert in_use(one, "key:k", "acme") == [2, 2]
        for each in running:
            each.settle(0)
        assert in_use(one, "key:k", "acme") == [0, 0]


async def test_keys_that_replace_one_another_share_what_is_used(gateway):
    """A rotation gives no new budget; another key has its own."""
    async with gateway(requests_per_minute=50) as one:
        one.keys = (key(requests_per_minute=2),)
        await one.let_in()
        one.keys = (key(requests_per_minute=2, holder="the key that made this one"),)
        await one.let_in()
        with pytest.raises(LimitReachedError, match="the key that made this one, 2"):
            await one.let_in()
        one.keys = (key("key:other", requests_per_minute=2),)
        await one.let_in()


async def test_headers_show_the_tighter_of_key_and_tenant(gateway):
    """By what is left, of requests and of tokens each."""
    async with gateway(requests_per_minute=50, tokens_per_day=100) as one:
        one.keys = (key(requests_per_minute=10, tokens_per_day=1000),)
        (await one.let_in()).settle(7)
        assert {name: value for name, value in one.headers().items() if "reset" not in name} == {
            "x-ratelimit-limit-requests": "10",
            "x-ratelimit-remaining-requests": "9",
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-tokens": "93",
        }
        assert one.limiter.headers(one.tenant, "demo")["x-ratelimit-limit-requests"] == "50"


async def test_a_key_of_a_tenant_without_limits_has_its_own(gateway):
    async with gateway() as one:
        one.keys = (key(tokens_per_day=1000),)
        (await one.let_in()).settle(7)
        assert one.headers()["x-ratelimit-remaining-tokens"] == "993"
        await one.limiter.close()
        assert set(one.store.ledgers) == {"key:k"}
