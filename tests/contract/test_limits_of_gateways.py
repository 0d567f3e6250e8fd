"""Two real gateways on one PostgreSQL: their tenants' limits hold for both together, to the last request."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import pytest
import pytest_asyncio

from appliance.audit.entry import decode
from appliance.audit.store import SqlAuditStore
from tests.contract.test_gateways_on_postgresql import Gateway, command, serving_role, two_gateways
from tests.contract.test_limits import read_book
from tests.fakes import FakeWorker, until

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

LEASE_SECONDS = 3.0
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
USED_TOKENS = 17
"""Token counts of the scripted worker for each request."""
OK, REFUSED = 200, 429
PATIENCE_SECONDS = 60


@dataclass
class Pair:
    """Two gateways in front of one worker, and the clients that a tenant has of both."""

    gateways: list[Gateway]
    worker: FakeWorker
    url: str
    owner_url: str
    session: aiohttp.ClientSession
    tenant: str
    key: str = ""
    refusals: list[tuple[dict, dict]] = field(default_factory=list)
    failures: list[tuple[str, int, bytes]] = field(default_factory=list)
    """Answers of other kinds, which no test expects."""

    async def limit(self, **limits):
        """Set the tenant's limits, and wait until both gateways know it with them."""
        words = [f"--limit={name}={value}" for name, value in limits.items()]
        if self.key:
            await command(self.gateways[0], self.url, "tenant", "set", self.tenant, *words)
        else:
            await command(self.gateways[0], self.url, "tenant", "create", self.tenant, *words)
            self.key = await command(self.gateways[0], self.url, "key", "create", self.tenant)
        wanted = {
            f"x-ratelimit-limit-{name.split('_')[0]}": str(value)
            for name, value in limits.items()
            if name != "concurrent_requests"
        }
        async with asyncio.timeout(PATIENCE_SECONDS):
            for gateway in self.gateways:
                while not wanted.items() <= (await self.headers(gateway)).items():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    async def headers(self, gateway):
        async with self.session.get(f"{gateway.url}/v1/models", headers=self.authorization) as answer:
            return answer.headers

    async def remaining(self, gateway):
        """Tokens that one gateway says are left."""
        return int((await self.headers(gateway))["x-ratelimit-remaining-tokens"])

    @property
    def authorization(self):
        return {"Authorization": f"Bearer {self.key}"}

    async def ask(self, number, *, seconds=None, **members):
        """Ask one of the gateways; its status, or None for a client that left after so many seconds."""
        gateway = self.gateways[number % len(self.gateways)]
        try:
            async with (
                asyncio.timeout(seconds),
                self.session.post(
                    f"{gateway.url}/v1/chat/completions",
                    json={**CHAT, **members},
                    headers=self.authorization,
                ) as answer,
            ):
                body = await answer.read()
        except TimeoutError:
            return None
        if answer.status == REFUSED:
            self.refusals.append((dict(answer.headers), json.loads(body)["error"]))
        elif answer.status != OK:
            self.failures.append((gateway.directory.name, answer.status, body))
        return answer.status

    async def storm(self, count, **options):
        """So many at once, on both gateways, every other one a stream; how they ended."""
        return await asyncio.gather(
            *(self.ask(number, stream=number % 4 > 1, **options) for number in range(count))
        )

    async def held(self, count):
        """A storm in which the first answer is sent after all refusals; returns the outcomes."""
        self.worker.freed, seed = asyncio.Event(), len(self.worker.bodies)
        asking = [
            asyncio.create_task(self.ask(number, stream=number % 4 > 1, seed=seed)) for number in range(count)
        ]
        # A request of an earlier storm, whose client has left, may still reach the worker.
        await until(
            lambda: (
                sum(each.done() for each in asking)
                + sum(json.loads(body).get("seed") == seed for body in self.worker.bodies)
                == count
            )
        )
        self.worker.freed.set()
        return Counter(await asyncio.gather(*asking))

    def denied(self):
        """Fields of every entry about a request of the tenant that was refused."""
        store = SqlAuditStore(self.owner_url)
        entries = [decode(leaf.leaf) for leaf in store.leaves(0, 100_000) if leaf.type == "request.denied"]
        store.close()
        return [entry.fields for entry in entries if entry.fields["tenant"] == self.tenant]

    def book(self):
        """What both gateways hold and have used of the tenant's limits."""
        return read_book(self.owner_url, self.tenant)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(postgres, tmp_path_factory):
    url, owner = await serving_role(postgres, "limiting")
    worker = FakeWorker()
    settings = {"APPLIANCE_LIMITS__LEASE_SECONDS": str(LEASE_SECONDS)}
    async with (
        worker.serving(),
        two_gateways(tmp_path_factory.mktemp("limiting"), url, worker.url, **settings) as gateways,
    ):
        yield gateways, worker, url, owner


@pytest_asyncio.fixture(loop_scope="module")
async def pair(gateways, request):
    """The gateways, with a tenant of the test's own."""
    both, worker, url, owner = gateways
    worker.bodies.clear()
    worker.freed = None
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Pair(list(both), worker, url, owner, session, tenant=request.node.name[-30:].strip("_"))


async def test_of_two_hundred_requests_at_once_exactly_as_many_pass_as_the_limit_says(pair):
    """By the minute; each of the others gets the name of the limit and the time to retry."""
    await pair.limit(requests_per_minute=100)
    ended = await pair.storm(200)
    assert Counter(ended) == {OK: 100, REFUSED: 100}, pair.failures
    assert len(pair.worker.bodies) == 100
    for headers, error in pair.refusals:
        assert 1 <= int(headers["Retry-After"]) <= 61
        assert headers["x-should-retry"] == "true"
        assert headers["x-ratelimit-limit-requests"] == "100"
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert error["code"] == "rate_limit_exceeded"
        assert "100 requests per minute" in error["message"]
    await until(lambda: len(pair.denied()) == 100)
    assert {(entry["reason"], entry["status"], entry["tenant"]) for entry in pair.denied()} == {
        ("rate_limit_exceeded", REFUSED, pair.tenant)
    }


async def test_all_slots_are_used_and_all_are_released(pair):
    """Of clients that disconnected at any moment, and of those that stayed."""
    await pair.limit(requests_per_minute=100_000, concurrent_requests=20)
    assert await pair.held(200) == {OK: 20, REFUSED: 180}, pair.failures
    pair.worker.freed.clear()
    for seconds in (0.02, 0.1, 0.5):
        await pair.storm(60, seconds=seconds)
    admitted = 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        # A busy gateway may still read requests whose clients have left: each takes a slot until then.
        while admitted < 20:
            admitted = (await pair.held(60))[OK]
    assert admitted == 20, pair.failures
    await until(lambda: not any(lease.busy for lease in pair.book().leases.values()))


async def test_slots_of_a_killed_gateway_are_released_when_its_lease_expires(pair):
    """All of them, and no more."""
    await pair.limit(requests_per_minute=100_000, concurrent_requests=20)
    pair.worker.freed = asyncio.Event()
    asking = [asyncio.create_task(pair.ask(number)) for number in range(40)]
    await until(lambda: len(pair.worker.bodies) == 20)
    dead = pair.gateways.pop()
    await dead.end(9)
    pair.worker.freed.set()
    await asyncio.gather(*asking, return_exceptions=True)
    await asyncio.sleep(LEASE_SECONDS)
    assert await pair.held(40) == {OK: 20, REFUSED: 20}, pair.failures
    await dead.start()


async def test_every_answer_names_the_remaining_limit(pair):
    """Also errors, streams and lists; without a key an answer has no limits."""
    await pair.limit(requests_per_minute=1000, tokens_per_day=50_000)
    gateway = pair.gateways[0]
    chats = [CHAT, {**CHAT, "stream": True}, {**CHAT, "model": "none"}, {"model": "demo"}]
    for body, status in zip(chats, (200, 200, 404, 400), strict=True):
        async with pair.session.post(
            f"{gateway.url}/v1/chat/completions", json=body, headers=pair.authorization
        ) as answer:
            await answer.read()
            assert answer.status == status
            assert answer.headers["x-ratelimit-limit-requests"] == "1000"
            assert 990 <= int(answer.headers["x-ratelimit-remaining-requests"]) <= 1000
            assert answer.headers["x-ratelimit-limit-tokens"] == "50000"
            assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 50_000
            assert answer.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert (await pair.headers(gateway))["x-ratelimit-limit-requests"] == "1000"
    async with pair.session.get(f"{gateway.url}/v1/models") as answer:
        assert answer.status == 401
        assert not [name for name in answer.headers if "ratelimit" in name.lower()]


async def test_budget_is_charged_actual_use_and_survives_a_kill(pair):
    """The estimate is reserved, the true count is kept, and a restart resets no daily budget."""
    await pair.limit(tokens_per_day=10_000)
    assert set(await pair.storm(40)) == {OK}
    async with asyncio.timeout(PATIENCE_SECONDS):
        for gateway in pair.gateways:
            while await pair.remaining(gateway) > 10_000 - 40 * USED_TOKENS:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    await pair.gateways[1].end(9)
    await pair.gateways[1].start()
    assert await pair.ask(1) == OK
    book = pair.book()
    spent = sum(book.spent["tokens_per_day"].values())
    held = sum(lease.held["tokens_per_day"] for lease in book.leases.values())
    assert spent + held >= 40 * USED_TOKENS
    await pair.limit(tokens_per_day=600)
    assert await pair.ask(0) == REFUSED
    headers, error = pair.refusals[-1]
    assert (error["code"], headers["x-should-retry"]) == ("insufficient_quota", "false")
    assert int(headers["Retry-After"]) <= 120
