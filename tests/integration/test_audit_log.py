"""
A real writer process is killed in the middle of its work, again and again; and reads are recorded.

The promises: every entry whose append returned is in the log, and an auditor finds the log valid;
each read of the log of a running gateway is recorded, by the gateway or by the command.
Run with `child` as first argument, this file is that writer.
"""

import asyncio
import json
import os
import pwd
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from appliance.audit import verify
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.infra.settings import AuditSettings

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


async def _requests(log, prefix, *, late):
    """
    Append requests until killed; acknowledge each entry on standard output once its append returned.

    Half of the writers are one entry late, so that every commit leaves requests open.
    """
    number = 0
    if late:
        await log.append(EntryType.AUDIT_READ, actor="tester", operation="tail")
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
            tasks.create_task(_requests(log, f"{run}-{writer}", late=writer % 2 == 0))


def _run_and_kill(directory, run, seconds):
    """Start the writer, kill it after a while, and return what it had acknowledged."""
    child = subprocess.Popen([sys.executable, __file__, "child", directory, str(run)], stdout=subprocess.PIPE)
    first = [child.stdout.readline() for _entry in range(2 * WRITERS)]
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    # A line that was cut off was not acknowledged in full; the child writes each with one call.
    lines = (b"".join(first) + child.communicate()[0]).split(b"\n")
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


async def _read(running, *words):
    """Run a command on the log of a running gateway; return what it printed."""
    (running.directory / "admin.key").write_text(f"{running.admin_key}\n")
    command = ["-m", "appliance", "audit", *words, "--data", str(running.directory)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    printed, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return printed.decode()


async def test_a_gateway_records_who_reads_its_log(running):
    """The admin key vouches for the reader; the entry is in the log before the command prints."""
    await running.post({"model": "demo", "messages": []})
    outcome = await running.outcome()
    size = len(running.entries())
    printed = await _read(running, "tail", "--json", "--purpose", "review", "--url", running.admin_url)
    assert len(printed.splitlines()) == min(20, size)
    assert json.loads(printed.splitlines()[-1])["type"] != "audit.read"
    (read,) = running.entries("audit.read")
    assert read == {
        "index": size,
        "type": "audit.read",
        "actor": f"cli:{pwd.getpwuid(os.getuid()).pw_name}",
        "operation": "tail",
        "start": max(0, size - 20),
        "end": size,
        "purpose": "review",
        "key_id": running.admin_key.split("-")[1],
    }
    assert outcome["outcome"] == "completed"


async def test_readers_are_recorded_while_a_gateway_writes(running):
    """Their commands write the entries themselves; no request suffers, and all verifies."""
    requests = [running.post({"model": "demo", "messages": []}) for _ in range(20)]
    readers = [_read(running, "tail", "--json") for _ in range(3)]
    *replies, _, _, _ = await asyncio.gather(*requests, *readers)
    assert [reply.status for reply in replies] == [200] * 20
    assert (await running.post({"model": "demo", "messages": []})).status == 200
    assert len(running.entries("audit.read")) == 3
    assert all("key_id" not in read for read in running.entries("audit.read"))
    assert [entry["index"] for entry in running.entries()] == list(range(len(running.entries())))


if __name__ == "__main__" and sys.argv[1:2] == ["child"]:
    asyncio.run(_child(Path(sys.argv[2]), sys.argv[3]))
