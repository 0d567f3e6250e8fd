"""
The wall clock is wrong, jumps and goes back: the order is the index, and the log stays valid.
"""

import itertools
import json
import os
from contextlib import closing

import pytest

from appliance.audit import verify
from appliance.audit.content.payloads import SqlPayloadStore, export_payloads
from appliance.audit.content.retention import Erasure
from appliance.audit.entry import new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.store import SqlAuditStore
from appliance.gateway.capture import open_content
from appliance.infra.data_directory import locate
from appliance.tenancy import ContentPolicy, Tenant
from tests.audit_log import intent, open_log, outcome, prepare, settings_for, signer_in

START = 1_800_000_000.0
DAY = 86_400.0
JUMPS = {
    "back by a day": (0.0, -DAY),
    "forward by ten years": (0.0, 3650 * DAY),
    "there and back": (0.0, 30 * DAY, -30 * DAY),
    "standing still": (0.0,),
    "to the epoch": (0.0, -START),
}


@pytest.mark.parametrize("jump", JUMPS)
async def test_a_clock_that_jumps_between_entries_breaks_nothing(jump, tmp_path):
    """Entries keep their order and ids stay unique; times say what the clock said."""
    prepare(tmp_path)
    settings = settings_for(tmp_path, checkpoint_entries=2)
    shifts = itertools.cycle(JUMPS[jump])
    store = SqlAuditStore(locate(settings).database_url)
    indices = []
    async with open_log(settings, store, clock=lambda: START + next(shifts)) as log:
        for number in range(10):
            begun = await log.sink.append(EntryType.REQUEST_INTENT, **intent(f"r{number}"))
            ended = await log.sink.append(EntryType.REQUEST_OUTCOME, **outcome(f"r{number}"))
            indices += [begun.index, ended.index]
    assert indices == list(range(1, 21))

    # The next start has a clock that is behind all earlier entries.
    async with open_log(settings, store, clock=lambda: START - 2 * DAY) as log:
        assert log.log.size == 22

    export = tmp_path / "export"
    assert export_log(store, export, vkey=signer_in(tmp_path).vkey) == 22
    store.close()
    report = verify.verify_export(export, verify.parse_key(signer_in(tmp_path).vkey), None)
    assert (report.problems, report.exit_code) == ([], verify.ExitCode.VALID)
    entries = [json.loads(leaf) for leaf in verify.read_leaves(export, 22)]
    assert len({entry["id"] for entry in entries}) == 22
    assert report.first_time == min(entry["time"] for entry in entries)


async def _keep(log, content, now):
    """Store a request and its answer, and record both."""
    request_id = new_entry_id(int(now * 1000), os.urandom(10))
    capture = content.captures.begin(Tenant(name="acme", content=ContentPolicy.ENCRYPTED), request_id)
    kept = await capture.keep_request(b"asked")
    await log.append(EntryType.REQUEST_INTENT, **{**intent(request_id), "content_mode": "encrypted", **kept})
    capture.observe(b"said")
    await log.append(EntryType.REQUEST_OUTCOME, **outcome(request_id), **await capture.keep_answer())


async def test_erasing_everything_leaves_nothing_after_a_clock_was_ahead(tmp_path):
    """Neither rows nor keys; the verifier finds nothing missing, and content of after stays."""
    prepare(tmp_path)
    settings = settings_for(tmp_path, checkpoint_entries=1)
    installation, now = locate(settings), [START]
    store = SqlAuditStore(installation.database_url)

    def clock():
        return now[0]

    async with (
        open_log(settings, store, clock=clock) as log,
        open_content(
            database=installation.database_url,
            keys_directory=installation.payload_keys,
            settings=settings.audit,
            log=log.log,
            clock=clock,
            random_bytes=os.urandom,
        ) as content,
    ):
        for now[0] in (START, START + 3600.0):
            await _keep(log.sink, content, now[0])
        now[0] = START
        everything = Erasure(tenant="acme", requests=(), before_ms=None, basis="the contract ended")
        erased = await content.retention.erase(everything, actor="admin")
        assert erased.payloads == 4
        assert list(installation.payload_keys.iterdir()) == []
        await _keep(log.sink, content, now[0])
    export = tmp_path / "export"
    with closing(SqlPayloadStore(installation.database_url)) as payloads:
        export_log(store, export, vkey=signer_in(tmp_path).vkey)
        assert export_payloads(payloads, export) == 2
    store.close()
    report = verify.verify_export(export, verify.parse_key(signer_in(tmp_path).vkey), None)
    verify.check_payloads(report, export, {})
    assert (report.problems, report.exit_code) == ([], verify.ExitCode.ERASED)
    assert (report.payloads.erased, report.payloads.checked, report.erased_payloads) == (4, 2, 4)
