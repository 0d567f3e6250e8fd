"""
A real gateway process whose audit database stops taking entries: what clients get, what is left.

The database is locked by another connection, or its disk is full (where a small file system can be
mounted).  Every test ends by verifying the whole log.
"""

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from appliance.audit import verify
from appliance.audit.entry import decode
from appliance.audit.export import export_log
from appliance.audit.signing_keys import load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.infra.settings import AuditSettings
from demo.process import ApplianceProcess
from tests.command import run_command
from tests.fakes import FakeWorker, chat, until

DISK_BYTES = 4 * 2**20
KEPT = "x-appliance-audit-kept"


@dataclass
class Site:
    """A gateway's files, and the way to make its database refuse entries."""

    data: Path
    database: Path
    outage: Callable
    key: str = ""

    @asynccontextmanager
    async def gateway(self, worker, durability, **audit):
        """Run a gateway process in front of the worker."""
        chosen = {
            "durability": durability,
            "database_url": f"sqlite:///{self.database}",
            "low_disk_bytes": 0,
            **audit,
        }
        environment = {f"APPLIANCE_AUDIT__{name.upper()}": str(value) for name, value in chosen.items()}
        environment["APPLIANCE_POOL__URLS"] = json.dumps([worker.url])
        process = ApplianceProcess("gateway", data=self.data, key=self.key, environment=environment)
        try:
            await asyncio.to_thread(process.wait_ready)
            self.key = process.key
            timeout = aiohttp.ClientTimeout(total=60)
            headers = {"Authorization": f"Bearer {self.key}"}
            async with aiohttp.ClientSession(process.url, headers=headers, timeout=timeout) as session:
                yield Running(process, session)
        finally:
            await asyncio.to_thread(process.stop)
            process.process.stdout.close()

    def leaves(self):
        """Return every entry in the log."""
        store = SqlAuditStore(f"sqlite:///{self.database}")
        try:
            return [decode(leaf.leaf) for leaf in store.leaves(0, 10**6)]
        finally:
            store.close()

    def report(self):
        """Verify the whole log as an auditor would; problems are failures here."""
        signer = load_signing_key(self.data / "audit.key", AuditSettings().origin)
        store = SqlAuditStore(f"sqlite:///{self.database}")
        target = self.data / "export"
        try:
            export_log(store, target, vkey=signer.vkey)
        finally:
            store.close()
        report = verify.verify_export(target, verify.parse_key(signer.vkey), None)
        assert report.problems == []
        return report

    def recorded(self, request_id):
        """Return the types of a request's entries, in order."""
        return [str(entry.type) for entry in self.leaves() if entry.fields.get("request_id") == request_id]


@dataclass
class Running:
    """A gateway that answers."""

    process: ApplianceProcess
    session: aiohttp.ClientSession

    async def ask(self, **more):
        """Post a chat request; return its status, its headers and its text."""
        async with self.session.post("/v1/chat/completions", json=chat(**more)) as response:
            return response.status, response.headers, await response.text()

    async def ready(self):
        """Return the status and the content of the readiness page."""
        async with self.session.get("/readyz") as response:
            return response.status, await response.json()

    async def metric(self, name):
        """Return one sample without labels."""
        async with self.session.get(f"{self.process.admin_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])

    async def drained(self):
        """Wait until the log accepts entries again and has no deferred ones."""
        async with asyncio.timeout(60):
            while (await self.ready())[1]["warnings"]:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)


@contextmanager
def locked(database):
    """Hold the database's write lock."""
    other = sqlite3.connect(database, isolation_level=None, timeout=60)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@contextmanager
def full(database):
    """Leave the database's disk no room."""
    ballast = database.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    try:
        yield
    finally:
        ballast.unlink()


@pytest.fixture(params=["locked", "full"])
def site(request, tmp_path):
    """A site whose database can be taken down."""
    if request.param == "locked":
        yield Site(data=tmp_path / "data", database=tmp_path / "audit.db", outage=locked)
        return
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("A FULL DISK IS NOT TRIED: this account may not mount a file system")
    try:
        yield Site(data=tmp_path / "data", database=disk / "audit.db", outage=full)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
async def worker():
    """A scripted worker, listening."""
    async with FakeWorker().serving() as worker:
        yield worker


async def _until_down(running, *, status):
    """Ask until the outage shows: a database may have a little room left in its own files."""
    async with asyncio.timeout(60):
        while True:
            found, headers, _ = await running.ask()
            if found == status and (status != 200 or KEPT in headers):
                return


async def test_strict_answers_no_unrecorded_request(site, worker):
    """503, no word of the worker's answer; afterwards it serves, and the log is whole."""
    async with site.gateway(worker, "strict") as running:
        assert (await running.ask())[0] == 200
        with site.outage(site.database):
            await _until_down(running, status=503)
            for stream in (False, True):
                status, _, text = await running.ask(stream=stream)
                assert (status, json.loads(text)["error"]["code"]) == (503, "audit_unavailable")
                assert "def " not in text
            status, page = await running.ready()
            assert status == 503
            assert page["checks"]["audit"] != "ok"
        async with asyncio.timeout(60):
            while (await running.ask())[0] != 200:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)
        assert await running.metric("appliance_audit_dropped_entries_total") == 0
        assert await running.metric("appliance_audit_spooled_entries_total") == 0
    assert site.report().exit_code is verify.ExitCode.VALID


async def test_spool_keeps_serving_and_loses_no_entry(site, worker):
    """Answers say that they are spooled; once the database is back, every one is in the log."""
    async with site.gateway(worker, "spool", spool_after_seconds=0.2) as running:
        assert "x-appliance-audit" in (await running.ask())[1]
        with site.outage(site.database):
            await _until_down(running, status=200)
            answers = await asyncio.gather(*(running.ask(stream=number % 2 == 0) for number in range(20)))
            assert {(status, headers.get(KEPT)) for status, headers, _ in answers} == {(200, "spooled")}
            assert all("x-appliance-audit" not in headers for _, headers, _ in answers)
            status, page = await running.ready()
            assert (status, page["checks"]["audit"]) == (200, "ok")
            assert any("spooling since" in warning for warning in page["warnings"])
            assert await running.metric("appliance_audit_spool_entries") >= 40
        await running.drained()
        assert "x-appliance-audit" in (await running.ask())[1]
        assert await running.metric("appliance_audit_spool_entries") == 0
        assert await running.metric("appliance_audit_dropped_entries_total") == 0
    for _, headers, _ in answers:
        assert site.recorded(headers["x-request-id"]) == ["request.intent", "request.outcome"]
    report = site.report()
    assert report.exit_code is verify.ExitCode.VALID
    assert report.entries_by_type["audit.spooled"] == 1


async def test_low_disk_is_a_warning_while_requests_are_served(tmp_path, worker):
    """Readiness warns and stays ready; nothing is refused yet."""
    site = Site(data=tmp_path / "data", database=tmp_path / "audit.db", outage=locked)
    async with site.gateway(worker, "strict", low_disk_bytes=2**60) as running:
        async with asyncio.timeout(60):
            while not (await running.ready())[1]["warnings"]:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)
        status, page = await running.ready()
        assert (status, page["status"]) == (200, "ready")
        assert "the database disk has" in page["warnings"][0]
        assert await running.metric('appliance_audit_disk_low{disk="database"}') == 1
        assert (await running.ask())[0] == 200
        words = ("status", "--once", "--data", site.data, "--url", running.process.admin_url)
        shown = await asyncio.to_thread(run_command, *words)
        assert shown.returncode == 0, shown.stderr
        assert "strict, 0 entries in the spool, 0 dropped" in shown.stdout
        assert "the database disk has" in shown.stdout
        assert re.search(r"checked\s+│? *(\d+ entries|not yet)", shown.stdout)
    assert any("audit_disk_low" in line for line in running.process.output)


async def test_kill_9_while_spooling_loses_nothing_that_was_answered(site, worker):
    """The next start brings the spool into the log before it serves."""
    answered = []
    async with site.gateway(worker, "spool", spool_after_seconds=0.2) as running:
        assert (await running.ask())[0] == 200
        with site.outage(site.database):
            await _until_down(running, status=200)

            async def keep_asking():
                while True:
                    try:
                        status, headers, text = await running.ask()
                    except (aiohttp.ClientError, ConnectionError):
                        return
                    assert (status, headers[KEPT]) == (200, "spooled")
                    assert json.loads(text)["choices"]
                    answered.append(headers["x-request-id"])

            tasks = [asyncio.create_task(keep_asking()) for _ in range(4)]
            await until(lambda: len(answered) >= 40)
            os.kill(running.process.process.pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
    assert running.process.process.returncode == -signal.SIGKILL
    async with site.gateway(worker, "spool") as running:
        assert (await running.ask())[0] == 200
    leaves = site.leaves()
    types = {}
    for entry in leaves:
        types.setdefault(entry.fields.get("request_id"), []).append(str(entry.type))
    assert all(types[request_id] == ["request.intent", "request.outcome"] for request_id in answered)
    assert site.report().exit_code is verify.ExitCode.VALID


async def test_running_gateway_detects_an_altered_log(tmp_path, worker):
    """Not ready, no new requests until an operator acts; the auditor's verifier agrees."""
    site = Site(data=tmp_path / "data", database=tmp_path / "audit.db", outage=locked)
    async with site.gateway(worker, "strict", verify_seconds=0.2) as running:
        assert (await running.ask())[0] == 200
        other = sqlite3.connect(site.database, isolation_level=None, timeout=60)
        triggers = other.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in triggers:
            other.execute(f"DROP TRIGGER {name}")
        other.execute(
            "UPDATE audit_leaves SET leaf = CAST(replace(leaf, 'version', 'venison') AS BLOB) WHERE idx = 0"
        )
        other.close()
        async with asyncio.timeout(60):
            while (await running.ready())[0] == 200:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)
        assert "the audit log is damaged" in (await running.ready())[1]["checks"]["audit"]
        assert await running.metric("appliance_audit_damaged") == 1
        status, _, text = await running.ask()
        assert (status, json.loads(text)["error"]["code"]) == (503, "audit_unavailable")
    assert any("audit_damage_found" in line for line in running.process.output)
    with pytest.raises(AssertionError):
        site.report()
