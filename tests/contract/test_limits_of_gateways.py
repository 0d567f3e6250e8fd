"""Two real gateways on one PostgreSQL: their tenants' limits hold for both together, to the last request."""

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import pytest

from appliance.audit.entry import decode
from appliance.audit.schema import grants, upgrade_database
from appliance.audit.store import SqlAuditStore
from tests.contract.test_gateways_on_postgresql import SHARED, Gateway
from tests.contract.test_limits import read_book
from tests.contract.test_revocation import command
from tests.fakes import FakeWorker, until

LEASE_SECONDS = 6.0
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
POLL_SECONDS = 2.5
"""Within which gateways have heard of other limits."""
USED_TOKENS = 17
"""What the scripted worker says each request came to."""
OK, REFUSED = 200, 429


@dataclass
class Pair:
    """Two gateways in front of one worker, and clients of both."""

    gateways: list[Gateway]
    worker: FakeWorker
    url: str
    owner_url: str
    session: aiohttp.ClientSession
    refusals: list[tuple[dict, dict]] = field(default_factory=list)
    failures: list[tuple[str, int, bytes]] = field(default_factory=list)
    """Answers of other kinds, which no test expects."""

    async def limit(self, **limits):
        """Set the demo tenant's limits, and wait until both gateways know."""
        words = [f"--limit={name}={value}" for name, value in limits.items()]
        await command(self.gateways[0], self.url, "tenant", "set", "demo", *words)
        await asyncio.sleep(POLL_SECONDS)

    async def headers(self, gateway):
        async with self.session.get(f"{gateway.url}/v1/models", headers=self.authorization) as answer:
            return answer.headers

    @property
    def authorization(self):
        return {"Authorization": f"Bearer {self.gateways[0].key}"}

    async def ask(self, number, *, seconds=None, stream=False):
        """Ask one of the gateways; its status, or None for a client that left after so many seconds."""
        gateway = self.gateways[number % len(self.gateways)]
        try:
            async with (
                asyncio.timeout(seconds),
                self.session.post(
                    f"{gateway.url}/v1/chat/completions",
                    json={**CHAT, "stream": stream},
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

    def denied(self):
        """Fields of every entry about a request that was refused."""
        store = SqlAuditStore(self.owner_url)
        fields = [
            decode(leaf.leaf).fields for leaf in store.leaves(0, 100_000) if leaf.type == "request.denied"
        ]
        store.close()
        return fields


@pytest.fixture
async def pair(postgres, tmp_path):
    owner = postgres.new_database()
    upgrade_database(owner)
    name = owner.rpartition("/")[2]
    postgres.execute(f"CREATE ROLE {name}_serving LOGIN; {grants(f'{name}_serving')}", database=name)
    url = postgres.url_of(name, role=f"{name}_serving")
    worker = FakeWorker()
    connector = aiohttp.TCPConnector(limit=0)
    async with worker.serving(), aiohttp.ClientSession(connector=connector) as session:
        gateways = [Gateway(tmp_path / name, url, worker.url) for name in ("first", "second")]
        for gateway in gateways:
            gateway._environment["APPLIANCE_LIMITS__LEASE_SECONDS"] = str(LEASE_SECONDS)
        await gateways[0].start()
        gateways[1].directory.mkdir(mode=0o700)
        for name in SHARED:
            shutil.copy2(gateways[0].directory / name, gateways[1].directory / name)
        await gateways[1].start()
        yield Pair(gateways, worker, url, owner, session)
        for gateway in gateways:
            if gateway.process.returncode is None:
                assert await gateway.end(15) == 0


async def test_of_two_hundred_requests_at_once_exactly_as_many_pass_as_the_limit_says(pair):
    """By the minute; each of the others hears which limit it was and when to come back."""
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
        ("rate_limit_exceeded", REFUSED, "demo")
    }


async def test_as_many_are_under_way_as_may_and_all_places_come_back(pair):
    """Of clients that left as of those that stayed, at whatever moment they did."""
    await pair.limit(requests_per_minute=100_000, concurrent_requests=20)
    pair.worker.head_seconds = 2.0
    ended = await pair.storm(200)
    assert Counter(ended) == {OK: 20, REFUSED: 180}, pair.failures
    for seconds in (0.02, 0.1, 0.5):
        await pair.storm(60, seconds=seconds)
    await asyncio.sleep(3)
    assert (await pair.storm(60)).count(OK) == 20
    pair.worker.head_seconds = 0.0
    await until(lambda: all(not lease.busy for lease in read_book(pair.owner_url, "demo").leases.values()))


async def test_a_killed_gateways_places_come_back_when_its_lease_runs_out(pair):
    """All of them, and no more."""
    await pair.limit(requests_per_minute=100_000, concurrent_requests=20)
    pair.worker.head_seconds = 2.0
    asking = [asyncio.create_task(pair.ask(number)) for number in range(40)]
    await until(lambda: len(pair.worker.bodies) == 20)
    await pair.gateways[1].end(9)
    await asyncio.gather(*asking, return_exceptions=True)
    del pair.gateways[1]
    await asyncio.sleep(LEASE_SECONDS)
    assert Counter(await pair.storm(40)) == {OK: 20, REFUSED: 20}, pair.failures


async def test_every_answer_to_a_tenant_says_what_is_left(pair):
    """Also errors, streams and lists; nobody learns anything without a key."""
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


@pytest.mark.chance
async def test_a_budget_is_charged_what_was_used_and_outlives_a_kill(pair):
    """The estimate is reserved, the true count is kept, and a restart gives nobody a fresh day."""
    await pair.limit(tokens_per_day=10_000)
    assert set(await pair.storm(40)) == {OK}
    await asyncio.sleep(2)
    remaining = [int((await pair.headers(each))["x-ratelimit-remaining-tokens"]) for each in pair.gateways]
    assert max(remaining) <= 10_000 - 40 * USED_TOKENS
    await pair.gateways[1].end(9)
    await pair.gateways[1].start()
    assert await pair.ask(1) == OK
    book = read_book(pair.owner_url, "demo")
    spent = sum(book.spent["tokens_per_day"].values())
    held = sum(lease.held["tokens_per_day"] for lease in book.leases.values())
    assert spent + held >= 40 * USED_TOKENS
    await pair.limit(tokens_per_day=600)
    assert await pair.ask(0) == REFUSED
    headers, error = pair.refusals[-1]
    assert (error["code"], headers["x-should-retry"]) == ("insufficient_quota", "false")
    assert int(headers["Retry-After"]) <= 120
