"""
PostgreSQL goes away under two gateways that spool, and comes back.

The promise: both continue, and in the end their shared log has every entry of both, each once.
"""

import asyncio
import time
from contextlib import AsyncExitStack, closing

import pytest

from appliance.audit import verify
from appliance.audit.pending import Kept
from appliance.audit.store import SqlAuditStore
from appliance.infra.schema import upgrade_database
from tests.durable_log import Bench, begin, end, until
from tests.postgres import private_postgres

REQUESTS = 40


@pytest.fixture(scope="module")
def server():
    with private_postgres() as server:
        yield server


async def test_two_gateways_spool_through_the_loss_of_their_database(server, tmp_path):
    """Requests across the outage keep their ends; no other gateway ends them."""
    url = server.new_database()
    upgrade_database(url)
    receipts = []
    async with AsyncExitStack() as stack:
        benches, sinks = [], []
        for name in ("g1", "g2"):
            (tmp_path / name).mkdir()
            store = stack.enter_context(closing(SqlAuditStore(url)))
            clock = time.time  # noqa: TID251 - gateways look at each other's times
            benches.append(Bench(tmp_path / name, store=store, clock=clock, gateway=name))
            guarded = await stack.enter_async_context(benches[-1].open())
            sinks.append(guarded.sink)
        for number, sink in enumerate(sinks):
            await begin(sink, f"{number}-across")
        await asyncio.to_thread(server.kill)

        async def work(number, sink):
            for count in range(REQUESTS):
                receipts.append(await begin(sink, f"{number}-{count}"))
                receipts.append(await end(sink, f"{number}-{count}"))
            receipts.append(await end(sink, f"{number}-across"))

        await asyncio.gather(*(work(number, sink) for number, sink in enumerate(sinks)))
        assert {one.kept for one in receipts} == {Kept.SPOOLED}
        await asyncio.to_thread(server.start)
        await until(lambda: not any(sink.state().spooling for sink in sinks))
        for number, sink in enumerate(sinks):
            assert (await begin(sink, f"{number}-after")).kept is Kept.LOGGED
            await end(sink, f"{number}-after")
    with closing(SqlAuditStore(url)) as store:
        bench = benches[0]
        bench.store = store
        ids = bench.ids()
        report = bench.verdict()
    assert [ids.count(one.entry_id) for one in receipts] == [1] * len(receipts)
    assert report.exit_code is verify.ExitCode.VALID
    assert report.entries_by_type["request.aborted"] == 0
    assert report.entries_by_type["audit.spooled"] == 2
