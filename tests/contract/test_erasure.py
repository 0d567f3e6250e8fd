"""Everything of a tenant is erased while another gateway stores and records its content."""

import asyncio
import os
import time
from contextlib import AsyncExitStack, closing

from appliance.audit import verify
from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.audit.content.payloads import SqlPayloadStore, export_payloads
from appliance.audit.content.retention import Erasure
from appliance.audit.content.sealing import unwrap
from appliance.audit.entry import new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.store import SqlAuditStore
from appliance.gateway.capture import open_content
from appliance.infra.data_directory import locate
from appliance.tenancy import ContentPolicy, Tenant
from tests.audit_log import intent, open_log, outcome, prepare, settings_for, signer_in

CLOCK = time.time  # noqa: TID251 - a root: the clock enters here
ARCHIVE = Tenant(name="acme", content=ContentPolicy.ENCRYPTED)
EVERYTHING = Erasure(tenant="acme", requests=(), before_ms=None, basis="the contract ended")
WRITERS, ERASURES, BETWEEN = 4, 3, 5


async def test_everything_is_erased_while_other_gateways_write(url, tmp_path):
    """What was recorded before is gone; all else opens, with a key that was made after the erasure."""
    prepare(tmp_path)
    settings = settings_for(tmp_path, url, checkpoint_entries=1)
    installation, destroyed = locate(settings), set()
    ended: list[str] = []
    gone: list[str] = []
    store = SqlAuditStore(url)
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(open_log(settings, store))
        gateways = [
            await stack.enter_async_context(
                open_content(
                    database=url,
                    keys_directory=installation.payload_keys,
                    settings=settings.audit,
                    log=log.log,
                    clock=CLOCK,
                    random_bytes=os.urandom,
                )
            )
            for _ in range(2)
        ]

        async def write(gateway):
            while True:
                # Some ids of a clock that is an hour ahead.
                now_ms = int(CLOCK() * 1000) + len(ended) % 2 * 3_600_000
                request_id = new_entry_id(now_ms, os.urandom(10))
                capture = gateway.captures.begin(ARCHIVE, request_id)
                kept = await capture.keep_request(b"asked")
                begun = {**intent(request_id), "content_mode": "encrypted", **kept}
                await log.sink.append(EntryType.REQUEST_INTENT, **begun)
                capture.observe(b"said")
                said = await capture.keep_answer()
                await log.sink.append(EntryType.REQUEST_OUTCOME, **outcome(request_id), **said)
                ended.append(request_id)

        writers = [asyncio.create_task(write(gateways[number % 2])) for number in range(WRITERS)]
        for number in range(ERASURES):
            enough = len(ended) + BETWEEN
            while len(ended) < enough:
                assert not any(writer.done() for writer in writers)
                await asyncio.sleep(0.01)
            gone[:] = ended
            erased = await gateways[number % 2].retention.erase(EVERYTHING, actor="admin")
            assert erased.payloads
            destroyed |= set(erased.keys)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)

    export, vkey = tmp_path / "export", signer_in(tmp_path).vkey
    keys = PayloadKeys(
        installation.payload_keys, master_key=None, key_days=7, clock=CLOCK, random_bytes=os.urandom
    )
    with closing(store), closing(SqlPayloadStore(url)) as payloads:
        export_log(store, export, vkey=vkey)
        export_payloads(payloads, export)
        for payload in payloads.all():
            assert payload.request_id not in gone
            name = keys.find(payload.key_id, Purpose.WRAPPING)
            assert name.key_id not in destroyed
            assert unwrap(payload.sealed.wrapped_key, keys.read(name).key)
    report = verify.verify_export(export, verify.parse_key(vkey), None)
    verify.check_payloads(report, export, {})
    assert report.problems == []
    assert report.payloads.erased
    assert destroyed.isdisjoint(name.key_id for name in keys.names())
