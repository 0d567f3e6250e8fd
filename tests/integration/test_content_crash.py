"""
A real process that keeps content and erases some of it is killed in the middle, again and again.

The promise: no leaf ever names content that is missing without an erasure, and after the next start
nothing is left of what the log calls erased.  Run with `child` as first argument, this file is that
process.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing
from pathlib import Path

from appliance.audit import verify
from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.audit.content.payloads import SqlPayloadStore, export_payloads
from appliance.audit.content.retention import Erasure
from appliance.audit.content.sealing import Part, open_sealed, place, unwrap
from appliance.audit.entry import decode, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.gateway.capture import open_content
from appliance.infra.settings import AuditSettings
from appliance.tenancy import ContentPolicy, Tenant

KILLS = 5
WRITERS = 4
SETTINGS = AuditSettings(origin="appliance.test/audit", checkpoint_seconds=0.02)
TENANT = Tenant(name="archive", content=ContentPolicy.ENCRYPTED)
CLOCK = time.time  # noqa: TID251 - a root: the clock enters here


@asynccontextmanager
async def _open(directory):
    with closing(SqlAuditStore(f"sqlite:///{directory}/audit.db")) as store:
        async with (
            AuditLog.open(
                store=store,
                signer=load_signing_key(directory / "audit.key", SETTINGS.origin),
                settings=SETTINGS,
                sealed_head_path=directory / "audit.head",
                clock=CLOCK,
                version="0.1.0",
            ) as log,
            open_content(
                database=f"sqlite:///{directory}/audit.db",
                keys_directory=directory / "payload-keys",
                settings=SETTINGS,
                log=log,
                clock=CLOCK,
                random_bytes=os.urandom,
            ) as content,
        ):
            yield log, content


async def _requests(log, content, *, erases):
    """Store and record requests until killed; now and then erase the last one."""
    common = {"tenant": TENANT.name, "key_id": "abcd2345", "route": "/v1/completions", "model": "demo"}
    while True:
        request_id = new_entry_id(int(CLOCK() * 1000), os.urandom(10))
        capture = content.captures.begin(TENANT, request_id)
        said = await capture.keep_request(f"asked in {request_id}".encode())
        more = {"stream": True, "client": "loopback", "body_bytes": 1, "content_mode": "encrypted"}
        await log.append(EntryType.REQUEST_INTENT, request_id=request_id, **common, **more, **said)
        capture.observe(f"said in {request_id}".encode())
        said = await capture.keep_answer()
        more = {"outcome": "completed", "status": 200, "duration_ms": 1}
        await log.append(EntryType.REQUEST_OUTCOME, request_id=request_id, **common, **more, **said)
        os.write(1, b"kept\n")
        if erases:
            wanted = Erasure(tenant=TENANT.name, requests=(request_id,), before_ms=None, basis="a request")
            await content.retention.erase(wanted, actor="admin")
            os.write(1, b"erased\n")


async def _child(directory):
    async with _open(directory) as (log, content), asyncio.TaskGroup() as tasks:
        for writer in range(WRITERS):
            tasks.create_task(_requests(log, content, erases=writer == 0))


def _run_and_kill(directory, seconds):
    """Start the process, kill it some time after its first erasure, and return its output."""
    lines = []
    with subprocess.Popen([sys.executable, __file__, "child", directory], stdout=subprocess.PIPE) as child:
        while b"erased\n" not in lines:
            lines.append(child.stdout.readline())
            assert lines[-1], "it ended by itself"
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    return lines


def test_content_and_log_agree_after_every_sigkill(tmp_path):
    """Five kills at random moments, then the auditor finds every payload, or the entry that erased it."""
    create_signing_key(tmp_path / "audit.key")
    chance = random.Random(6962)
    for _ in range(KILLS):
        assert _run_and_kill(tmp_path, chance.uniform(0.0, 0.2))

    async def close_properly():
        async with _open(tmp_path):
            pass

    asyncio.run(close_properly())
    url = f"sqlite:///{tmp_path}/audit.db"
    signer = load_signing_key(tmp_path / "audit.key", SETTINGS.origin)
    keys = PayloadKeys(
        tmp_path / "payload-keys", master_key=None, key_days=7, clock=CLOCK, random_bytes=os.urandom
    )
    with closing(SqlAuditStore(url)) as store, closing(SqlPayloadStore(url)) as payloads:
        export_log(store, tmp_path / "export", vkey=signer.vkey)
        export_payloads(payloads, tmp_path / "export")
        report = verify.verify_export(tmp_path / "export", verify.parse_key(signer.vkey), None)
        verify.check_payloads(report, tmp_path / "export", {})
        assert (report.problems, report.exit_code) == ([], verify.ExitCode.ERASED)
        assert report.payloads.erased >= 2 * KILLS
        assert report.payloads.checked > 0
        assert not any(name.is_retired for name in keys.names())
        opened = 0
        for leaf in store.leaves(0, sys.maxsize):
            fields = decode(leaf.leaf).fields
            part = Part.REQUEST if leaf.type == "request.intent" else Part.RESPONSE
            found = payloads.get(leaf.request_id, part) if "payload_digest" in fields else None
            if found is not None:
                key = keys.read(keys.find(found.key_id, Purpose.WRAPPING))
                content = open_sealed(
                    found.sealed.blob,
                    place(SETTINGS.origin, leaf.request_id, part),
                    unwrap(found.sealed.wrapped_key, key.key),
                    digest=fields["payload_digest"],
                    commitment=fields["payload_commitment"],
                )
                assert content.decode().endswith(leaf.request_id)
                opened += 1
        assert opened == report.payloads.checked


if __name__ == "__main__" and sys.argv[1:2] == ["child"]:
    asyncio.run(_child(Path(sys.argv[2])))
