"""Two real gateways, as operators start them, on one PostgreSQL that lets them append and no more."""

import asyncio
import re
import shutil
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp

from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.infra.schema import grants, upgrade_database
from demo.process import DEMO_KEY, make_demo_tenant
from tests.command import run_command
from tests.fakes import FakeWorker, until

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
SHARED = ("audit.key", "tenants-mac.key", "control.token")
PATIENCE_SECONDS = 120


class Gateway:
    """One `appliance gateway` process."""

    def __init__(self, directory, database_url, worker_url, **environment):
        self.directory = directory
        self._environment = {
            "APPLIANCE_AUDIT__DATABASE_URL": database_url,
            "APPLIANCE_AUDIT__GATEWAY_DEAD_SECONDS": "3",
            "APPLIANCE_POOL__URLS": f'["{worker_url}"]',
            **environment,
        }
        self.url = self.admin_url = self.key = ""
        self.process = None

    async def start(self):
        """Start it and wait until it is ready."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "appliance", "gateway", "--data", self.directory, "--port=0", "--admin-port=0"),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for line in self.process.stdout:
                said.append(line.decode())
                if found := re.match(r"ready\s+(\S+)/v1", said[-1]):
                    self.url = found[1]
                if found := re.match(r"admin API\s+(\S+)/admin/v1", said[-1]):
                    self.admin_url = found[1]
                    # Unread output would block it.
                    self._listening = asyncio.create_task(self.process.stdout.read())
                    return
        raise AssertionError("".join(said))

    async def end(self, number):
        """Send a signal, wait for the end, and return the exit status."""
        self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._listening
            return await self.process.wait()


@asynccontextmanager
async def two_gateways(directory, database_url, worker_url, **environment):
    """Two gateways that share a database and keys; both stop in order."""
    first, second = pair = [
        Gateway(directory / name, database_url, worker_url, **environment) for name in ("first", "second")
    ]
    make_demo_tenant(first.directory)
    first.key = (first.directory / DEMO_KEY).read_text(encoding="utf-8").strip()
    await first.start()
    second.directory.mkdir(mode=0o700)
    for name in SHARED:
        shutil.copy2(first.directory / name, second.directory / name)
    await second.start()
    yield pair
    assert [await gateway.end(signal.SIGTERM) for gateway in pair] == [0, 0]


async def command(gateway, url, *words):
    """Run a command while the gateways run; returns its output."""
    environment = {"APPLIANCE_AUDIT__DATABASE_URL": url}
    done = await asyncio.to_thread(run_command, *words, "--data", gateway.directory, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def serving_role(postgres, name):
    """A database with the log's tables: its URL for a role that appends and no more, and for its owner."""
    owner = postgres.new_database()
    await asyncio.to_thread(upgrade_database, owner)
    database = owner.rpartition("/")[2]
    postgres.execute(f"CREATE ROLE {name} LOGIN; {grants(name)}", database=database)
    return postgres.url_of(database, role=name), owner


async def _ask(session, gateway, key):
    """Ask for one answer; the status, or None where the gateway is gone."""
    try:
        async with session.post(
            f"{gateway.url}/v1/chat/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return None


async def test_two_gateways_serve_into_one_log_and_survive_each_other(postgres, tmp_path):
    """Both serve, one is killed and comes back: every answered request is in the log, which verifies."""
    url, _ = await serving_role(postgres, "serving")
    worker = FakeWorker()
    async with (
        worker.serving(),
        aiohttp.ClientSession() as session,
        two_gateways(tmp_path, url, worker.url) as (first, second),
    ):
        both = [_ask(session, gateway, first.key) for gateway in (first, second) for _ in range(15)]
        assert await asyncio.gather(*both) == [200] * 30
        asking = [asyncio.create_task(_ask(session, second, first.key)) for _ in range(15)]
        await asyncio.sleep(0.01)
        assert await second.end(signal.SIGKILL) == -signal.SIGKILL
        answered = 30 + (await asyncio.gather(*asking)).count(200)
        assert await asyncio.gather(*(_ask(session, first, first.key) for _ in range(5))) == [200] * 5
        await second.start()
        assert await _ask(session, second, first.key) == 200
        store = SqlAuditStore(url)
        await until(lambda: store.open_intents() == [])
    leaves = store.leaves(0, 10_000)
    store.close()
    assert [leaf.index for leaf in leaves] == list(range(len(leaves)))
    outcomes = [leaf for leaf in leaves if leaf.type == EntryType.REQUEST_OUTCOME]
    assert len(outcomes) >= answered + 6
    begun = {decode(leaf.leaf).fields["gateway"] for leaf in leaves if leaf.type == EntryType.REQUEST_INTENT}
    assert begun == {(tmp_path / name / "gateway.id").read_text().strip() for name in ("first", "second")}
    await command(first, url, "audit", "verify")


async def test_the_header_of_every_gateway_leads_to_a_receipt(postgres, tmp_path):
    """By index from the gateway that integrates, by request from the other; before it was integrated, too."""
    url, _ = await serving_role(postgres, "receipts")
    worker = FakeWorker()
    async with (
        worker.serving(),
        aiohttp.ClientSession() as session,
        two_gateways(tmp_path, url, worker.url) as gateways,
    ):
        named = []
        for gateway in gateways:
            async with session.post(
                f"{gateway.url}/v1/chat/completions",
                json=BODY,
                headers={"Authorization": f"Bearer {gateways[0].key}"},
            ) as answer:
                await answer.read()
                named.append(answer.headers["x-appliance-audit"].rpartition("/")[2])
        store = SqlAuditStore(url)
        await until(lambda: not store.is_waiting() and not store.open_intents())
        size = store.head().size
        await until(lambda: store.latest_checkpoint().size >= size)
        for name in named:
            proof = await command(gateways[0], url, "audit", "receipt", name, "--unrecorded")
            index = int(re.search(r"^index (\d+)$", proof, re.MULTILINE)[1])
            (leaf,) = store.leaves(index, index + 1)
            assert leaf.type == EntryType.REQUEST_INTENT
            assert name in {str(index), leaf.request_id}
        store.close()
    assert not named[1].isdecimal()
