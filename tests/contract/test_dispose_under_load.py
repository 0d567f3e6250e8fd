"""Entries are disposed of while real gateways serve: no request is refused, and the log verifies."""

import asyncio
import json
import time
from contextlib import asynccontextmanager, closing

import aiohttp
import pytest

from appliance.audit import verify
from appliance.audit.disposal import store as disposal_store
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.entry import format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.sealed import SealedHead
from appliance.audit.store import SqlAuditStore
from demo.process import ApplianceProcess
from tests.audit_log import ORIGIN, prepare, signer_in
from tests.command import run_command
from tests.contract.test_gateways_on_postgresql import serving_role, two_gateways
from tests.disposed_log import DAY_MS, aged
from tests.fakes import FakeWorker, chat, until

OLD = 6000
STEP_MS = DAY_MS // 24
CLIENTS = 4
BEHIND = 20
"""Requests that are answered after the disposal."""
SERVING = {"APPLIANCE_AUDIT__ORIGIN": ORIGIN, "APPLIANCE_AUDIT__CHECKPOINT_SECONDS": "1"}


def _fill(store, directory):
    """Write a log of which entries are old today; returns the time before which they are."""
    sealed_head, signer = prepare(directory).sealed_head, signer_in(directory)
    now_ms = int(time.time() * 1000)  # noqa: TID251 - the gateways' clock
    began_ms = now_ms - OLD * STEP_MS - 184 * DAY_MS
    aged(store, signer, old=OLD, step_ms=STEP_MS, began_ms=began_ms)
    SealedHead(sealed_head).write(store.latest_checkpoint().note)
    return format_time(now_ms - 184 * DAY_MS)


@asynccontextmanager
async def _steady_requests(urls, key):
    """Clients that ask without a pause; yields the statuses of what they were answered."""
    statuses, done = [], asyncio.Event()

    async def ask(url):
        while not done.is_set():
            async with session.post(f"{url}/v1/chat/completions", json=chat()) as answer:
                await answer.read()
                statuses.append(answer.status)

    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        asyncio.TaskGroup() as clients,
    ):
        for number in range(CLIENTS):
            clients.create_task(ask(urls[number % len(urls)]))
        await until(lambda: len(statuses) >= CLIENTS)
        yield statuses
        enough = len(statuses) + BEHIND
        await until(lambda: len(statuses) >= enough)
        done.set()


def _assert_disposed(store, directory, statuses):
    disposal = store.disposal()
    assert (set(statuses), disposal.below > 5000) == ({200}, True)
    assert len(store.leaves(0, disposal.below)) < 10
    outcomes = [leaf for leaf in store.leaves(OLD, 10**6) if leaf.type == EntryType.REQUEST_OUTCOME]
    assert len(outcomes) == len(statuses)
    signer = signer_in(directory)
    export_log(store, directory / "export", vkey=signer.vkey)
    report = verify.verify_export(directory / "export", verify.parse_key(signer.vkey), None)
    assert (report.problems, report.exit_code) == ([], verify.ExitCode.ERASED)


async def test_a_gateway_on_sqlite_disposes_while_it_serves(tmp_path):
    directory, worker = tmp_path / "appliance", FakeWorker()
    directory.mkdir()
    with closing(SqlAuditStore(f"sqlite:///{directory}/audit.db")) as store:
        _fill(store, directory)
        disposing = Disposing(store=store)
        async with worker.serving():
            environment = {
                **SERVING,
                "APPLIANCE_POOL__URLS": json.dumps([worker.url]),
                "APPLIANCE_AUDIT__DISPOSE_AFTER_DAYS": "184",
            }
            process = ApplianceProcess(
                "gateway", data=directory, environment=environment, module="tests.disposing_gateway"
            )
            try:
                await asyncio.to_thread(process.wait_ready)
                async with _steady_requests([process.url], process.key) as statuses:
                    await until(lambda: store.disposal().below)
                    before = len(statuses)
                    await until(lambda: disposing.recorded() is None)
                    assert len(statuses) > before
                await until(lambda: any("audit_disposed" in line for line in process.output))
            finally:
                status = await asyncio.to_thread(process.stop)
                process.process.stdout.close()
        assert status == 0
        _assert_disposed(store, directory, statuses)


async def test_the_owner_disposes_on_postgresql_while_gateways_serve(postgres, tmp_path, monkeypatch):
    """The gateways' role can neither delete an entry nor say that entries are gone."""
    monkeypatch.setattr(disposal_store, "TILES", 1)
    url, owner = await serving_role(postgres, "loaded")
    directory, worker = tmp_path / "first", FakeWorker()
    with closing(SqlAuditStore(owner)) as store:
        before = _fill(store, directory)
        words = ("audit", "dispose", "--data", directory, "--url", owner, "--before", before, "--yes")
        async with (
            worker.serving(),
            two_gateways(tmp_path, url, worker.url, **SERVING) as gateways,
            _steady_requests([gateway.url for gateway in gateways], gateways[0].key) as statuses,
        ):
            began = len(statuses)
            done = await asyncio.to_thread(run_command, *words, APPLIANCE_AUDIT__ORIGIN=ORIGIN)
            assert (done.returncode, "disposed of the first" in done.stdout) == (0, True), done.stderr
            assert len(statuses) > began
        _assert_disposed(store, directory, statuses)
    database = url.rpartition("/")[2]
    for statement in ("DELETE FROM audit_leaves WHERE idx = 0", "UPDATE audit_disposal SET below = 9984"):
        with pytest.raises(RuntimeError, match="permission denied"):
            postgres.execute(statement, database=database, role="loaded")
