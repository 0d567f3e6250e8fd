"""
A real writer process is killed in the middle of its work, again and again.

The promise: every entry whose append returned is in the log, and an auditor finds the log valid.
Run with `child` as first argument, this file is that writer.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from appliance.audit import verify
from appliance.audit.entry import decode
from appliance.audit.export import export_log
from appliance.audit.keys import create_signing_key, load_signing_key
from appliance.audit.log import AuditLog
from appliance.audit.registry import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.settings import AuditSettings

KILLS = 5
WRITERS = 8
SETTINGS = AuditSettings(origin="appliance.test/audit", checkpoint_seconds=0.02)


def _open(directory, store, clock=time.time):  # noqa: TID251 - a root: the clock enters here
    return AuditLog.open(
        store=store,
        signer=load_signing_key(directory / "audit.key", SETTINGS.origin),
        settings=SETTINGS,
        sealed_head_path=directory / "audit.head",
        clock=clock,
        version="0.1.0",
    )


async def _requests(log, prefix):
    """Append requests for ever; acknowledge each entry on standard output once its append returned."""
    number = 0
    while True:
        request_id = f"{prefix}-{number}"
        number += 1
        common = {
            "request_id": request_id,
            "tenant": "acme",
            "key_id": "abcd2345",
            "route": "/v1/chat/completions",
            "model": "demo",
        }
        for entry_type, fields in (
            (
                EntryType.REQUEST_INTENT,
                {"stream": True, "client": "loopback", "body_bytes": 1, "content_mode": "none"},
            ),
            (EntryType.REQUEST_OUTCOME, {"outcome": "completed", "status": 200, "duration_ms": 1}),
        ):
            receipt = await log.append(entry_type, **common, **fields)
            os.write(1, f"{json.dumps([receipt.index, receipt.entry_id])}\n".encode())


async def _child(directory, run):
    async with (
        _open(directory, SqlAuditStore(f"sqlite:///{directory}/audit.db")) as log,
        asyncio.TaskGroup() as tasks,
    ):
        for writer in range(WRITERS):
            tasks.create_task(_requests(log, f"{run}-{writer}"))


def _run_and_kill(directory, run, seconds):
    """Start the writer, kill it after a while, and return what it had acknowledged."""
    child = subprocess.Popen([sys.executable, __file__, "child", directory, str(run)], stdout=subprocess.PIPE)
    first = child.stdout.readline()
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    # A line that was cut off was not acknowledged in full; the child writes each with one call.
    lines = (first + child.communicate()[0]).split(b"\n")
    assert child.returncode == -signal.SIGKILL
    return [json.loads(line) for line in lines[:-1]]


def test_every_acknowledged_entry_survives_sigkill(tmp_path):
    """Five kills at random moments: nothing acknowledged is lost, no index is used twice, all verifies."""
    create_signing_key(tmp_path / "audit.key")
    chance = random.Random(6962)
    acknowledged = []
    for run in range(KILLS):
        entries = _run_and_kill(tmp_path, run, chance.uniform(0.05, 0.4))
        assert len(entries) > WRITERS
        acknowledged += entries

    store = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")

    async def close_properly():
        async with _open(tmp_path, store):
            pass

    asyncio.run(close_properly())
    leaves = store.leaves(0, sys.maxsize)
    assert [leaf.index for leaf in leaves] == list(range(len(leaves)))
    ids = [decode(leaf.leaf).id for leaf in leaves]
    assert all(ids[index] == entry_id for index, entry_id in acknowledged)
    assert len({index for index, _ in acknowledged}) == len(acknowledged)

    signer = load_signing_key(tmp_path / "audit.key", SETTINGS.origin)
    exported = tmp_path / "export"
    assert export_log(store, exported, vkey=signer.vkey) == len(leaves)
    store.close()
    report = verify.verify_export(exported, verify.parse_key(signer.vkey), None)
    assert (report.problems, report.exit_code) == ([], verify.ExitCode.VALID)
    assert report.entries_by_type["audit.started"] == KILLS + 1
    # Every kill hits requests in flight; each was closed by the next start.
    assert report.entries_by_type["request.aborted"] >= KILLS


if __name__ == "__main__" and sys.argv[1:2] == ["child"]:
    asyncio.run(_child(Path(sys.argv[2]), sys.argv[3]))
