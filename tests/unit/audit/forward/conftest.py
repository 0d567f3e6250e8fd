"""A log of eleven entries and several checkpoints, and what a SIEM stored of it."""

import pytest

from appliance.audit.entry_types import EntryType
from tests.forwarding import Collected, make_forwarder


@pytest.fixture
def record(open_log, sql_store, intent, outcome):
    """Record requests in the log, with a checkpoint every few entries."""

    async def record_(*requests):
        async with open_log(sql_store, checkpoint_entries=4) as log:
            for name in requests:
                await log.append(EntryType.REQUEST_INTENT, **intent(name))
                await log.append(EntryType.REQUEST_OUTCOME, **outcome(name))

    return record_


@pytest.fixture
async def collected(record, sql_store):
    """What a collector has of the log."""
    await record("r1", "r2", "r3", "r4", "r5")
    collector = Collected()
    await make_forwarder(sql_store, collector).forward(until_sent=True)
    return collector
