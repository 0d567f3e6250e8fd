"""Gateways of one log forward it in turn, on both databases: each continues where the one before stopped."""

import time

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.forward.cursor import ForwardStore
from appliance.audit.forward.events import render_json
from appliance.audit.verify import ExitCode
from appliance.infra.lease import SqlLease
from tests.audit_log import intent, open_log, outcome, prepare, settings_for, signer_in
from tests.forwarding import DESTINATION, Collected, indices, judge_stream, make_forwarder


@pytest.fixture
def record(tmp_path, url, open_store):
    """Record requests in the log on this database."""
    prepare(tmp_path / "log")
    store = open_store(url)

    async def record_(*names):
        async with open_log(settings_for(tmp_path / "log", url, checkpoint_entries=4), store) as log:
            for name in names:
                await log.log.append(EntryType.REQUEST_INTENT, **intent(name))
                await log.log.append(EntryType.REQUEST_OUTCOME, **outcome(name))

    return record_


def lease_of(url, holder):
    return SqlLease(url, name="forward", holder=holder, seconds=60.0, clock=time.time)  # noqa: TID251 - a root


async def test_one_gateway_at_a_time_forwards_and_the_next_continues(
    record, url, open_store, tmp_path, monkeypatch
):
    """The second one gets nothing to send while the first one holds the lease."""
    monkeypatch.setattr("appliance.audit.forward.forwarder.MARK_BYTES", 1)
    monkeypatch.setattr("appliance.audit.forward.reader.BATCH_ENTRIES", 3)
    await record(*(f"a{number}" for number in range(8)))
    stored, leases = [], [lease_of(url, holder) for holder in ("one", "two")]
    collectors = [Collected() for _ in leases]
    one, two = (
        make_forwarder(open_store(url), collector, lease=lease, render=render_json, window_bytes=4000)
        for collector, lease in zip(collectors, leases, strict=True)
    )
    await one.forward(until_sent=True)
    await two.forward(until_sent=True)
    assert (len(indices(collectors[0].messages)), collectors[1].messages) == (17, [])
    await leases[0].release()
    await record(*(f"b{number}" for number in range(8)))
    await two.forward(until_sent=True)
    first = indices(collectors[1].messages)[0]
    assert 0 < first < 17, "it continues at the cursor of the first one"
    stored = tmp_path / "stored"
    stored.write_bytes(collectors[0].stream + collectors[1].stream)
    code, report = judge_stream(stored, signer_in(tmp_path / "log").vkey)
    assert (code, report["start"], report["end"]) == (ExitCode.VALID, 0, 34), report
    cursor = ForwardStore(open_store(url).database).load(DESTINATION)
    assert first <= cursor.size < cursor.sent == 34
    for lease in leases:
        lease.close()
