"""
Harvesting on a real gateway's log: permission, erasure, and kills at any point.

The worker is scripted but counts tokens with the demo target's tokenizer, loaded by another library, and a
template written here: the harvest must agree with its counts.
"""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from appliance.audit import verify
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.entry_types import EntryType
from appliance.cli import cli
from appliance.cli.register import change_roster
from appliance.drafts.harvest.dataset import DATASETS, open_dataset
from appliance.drafts.harvest.tokenizer import open_tokenizer
from appliance.errors import DraftRefusedError
from appliance.infra.settings import DEMO_TARGET, DataSettings, Settings, process_environment
from appliance.sovereignty.environment import offline_environment
from appliance.tenancy import ApiKey, Tenant, make_key
from appliance.tenancy.edits import add_key, create_tenant
from demo.process import ApplianceProcess
from tests.fakes import MODEL, FakeWorker, until

SECONDS = 600
HARVEST = ("draft", "harvest", "--model", MODEL)
OK = 200
MAY = {"content": "encrypted", "may": ["train_drafts"]}
TENANTS: dict[str, dict[str, Any]] = {
    "acme": MAY,
    "clinic": MAY,
    "silent": {"content": "encrypted"},
    "notary": {"content": "digest", "may": ["train_drafts"]},
}


class CountingWorker(FakeWorker):
    """A worker that reports token counts like the demo target."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
        self.said: dict[str, str] = {}
        """Scripted answers by question."""

    async def completions(self, request: Any) -> Any:
        """Answer each question."""
        asked = json.loads(await request.read())
        self.question = asked.get("prompt") or asked["messages"][-1]["content"]
        answer = f"def reply_{len(self.said)}(x):\n    return x + {len(self.said)}\n"
        self.said[self.question] = answer
        self.pieces = [answer[:7], answer[7:]]
        return await super().completions(request)

    def counted(self, path: str) -> dict[str, int]:
        """Token counts of the last request, the final token included."""
        prompt = rendered(self.question) if "chat" in path else self.question
        counts = {
            "prompt_tokens": len(self.tokens(prompt)),
            "completion_tokens": len(self.tokens("".join(self.pieces))) + 1,
        }
        return {**counts, "total_tokens": sum(counts.values())}

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def whole(self, path: str) -> dict:
        return super().whole(path) | {"usage": self.counted(path)}

    def frames(self, path: str, asked: dict) -> list[bytes]:
        *content, done = (frame for frame in super().frames(path, asked) if b'"usage"' not in frame)
        counts = {"id": "c", "choices": [], "usage": self.counted(path)}
        return [*content, f"data: {json.dumps(counts)}\n\n".encode(), done]


def rendered(question: str) -> str:
    """What the demo target's chat template makes of one question."""
    return f"<|begin|><|user|>{question}<|end|><|assistant|>"


class Site:
    """A gateway process, its tenants and its files."""

    def __init__(self, data: Path, worker: CountingWorker, process: ApplianceProcess) -> None:
        self.data = data
        self.worker = worker
        self.process = process
        self.keys: dict[str, str] = {}
        self.asked: dict[str, list[str]] = {}
        self.printed: list[str] = []

    @property
    def settings(self) -> Settings:
        return Settings(data=DataSettings(directory=self.data))

    async def run(self, *words: str, expecting: int = 0) -> str:
        """Run a command of the appliance; what it printed."""
        arguments = [*words, "--data", str(self.data)]
        done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
        assert done.exit_code == expecting, done.exception or done.output
        if words[:2] != ("audit", "open"):  # which shows content, as it should
            self.printed.append(done.output)
        return done.output

    async def enrol(self) -> None:
        """Make the tenants, each with a key."""
        members: dict[str, ApiKey] = {}
        for number, name in enumerate(TENANTS):
            self.keys[name], members[name] = make_key(bytes([number]) * 37)

        def edit(tenants: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
            for name, policy in TENANTS.items():
                tenants = add_key(create_tenant(tenants, name, policy), name, members[name])
            return tenants

        await asyncio.to_thread(change_roster, self.settings, edit)
        # A gateway sees it when it next looks.
        async with self.client(next(iter(TENANTS))) as client:
            async with asyncio.timeout(SECONDS):
                while (await client.get("/v1/models")).status_code != OK:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.2)

    def client(self, tenant: str) -> httpx.AsyncClient:
        """A client with a tenant's key."""
        return self._client(self.keys[tenant])

    async def erase(self, tenant: str, *requests: str) -> dict[str, Any]:
        """Let the gateway erase all kept content of a tenant, or some of it."""
        body: dict[str, Any] = {"tenant": tenant, "basis": "a request"}
        if requests:
            body["requests"] = requests
        async with self._client((self.data / "admin.key").read_text().strip()) as client:
            done = await client.post("/admin/v1/audit/erasures", json=body)
        assert done.status_code == OK, done.text
        return done.json()

    def _client(self, key: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(
            base_url=self.process.admin_url, headers=headers, trust_env=False, timeout=SECONDS
        )

    async def talk(self, tenant: str, count: int) -> None:
        """Send new prompts: chats and completions, streamed and not."""
        async with self.client(tenant) as client:
            for number in range(count):
                question = f"what does {tenant} want to know in question {number}?"
                ask: dict[str, Any] = {"model": MODEL, "stream": number % 2 == 0}
                if number % 3:
                    path, more = "chat/completions", {"messages": [{"role": "user", "content": question}]}
                else:
                    path, more = "completions", {"prompt": question}
                answer = await client.post(f"/v1/{path}", json={**ask, **more})
                assert answer.status_code == OK, answer.text
                self.asked.setdefault(tenant, []).append(question)

    def entries(self, kind: EntryType) -> list[dict[str, Any]]:
        """Members of the entries of a type."""
        with closing(SqlPayloadStore(f"sqlite:///{self.data / 'audit.db'}")) as store:
            return [entry for _, entry in store.entries(kind)]

    def samples(self) -> dict[str, bytes]:
        """Requests that have a sample, with its nonce."""
        query = "SELECT request_id, nonce FROM audit_payloads WHERE part = 'sample'"
        with closing(sqlite3.connect(self.data / "audit.db")) as database:
            return dict(database.execute(query).fetchall())

    def tenant_keys(self) -> set[str]:
        """Tenants that have a key to content."""
        return {file.name.partition(".")[0] for file in (self.data / "payload-keys").iterdir()}

    async def verify(self, verdict: verify.ExitCode) -> None:
        """Run the auditor's verifier on the log and all content."""
        await self.run("audit", "verify", expecting=verdict)


@asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[Site]:
    """Run one in front of a worker."""
    async with CountingWorker().serving() as worker:
        environment = {
            "APPLIANCE_POOL__URLS": json.dumps([worker.url]),
            "APPLIANCE_AUDIT__CHECKPOINT_SECONDS": "0.2",
        }
        process = ApplianceProcess("gateway", data=directory / "data", environment=environment)
        try:
            await asyncio.to_thread(process.wait_ready)
            site = Site(directory / "data", worker, process)
            await site.enrol()
            yield site
        finally:
            await asyncio.to_thread(process.stop)
            process.process.stdout.close()


@pytest.fixture
async def site(tmp_path: Path, wrote: Callable[[str, str], None]) -> AsyncIterator[Site]:
    async with gateway(tmp_path) as site:
        yield site
    wrote("commands", "".join(site.printed))


async def test_data_set_has_only_permitted_and_unerased_content(site: Site):
    """From a real gateway's log, with the target's own tokenizer; the log verifies before and after."""
    for tenant in TENANTS:
        await site.talk(tenant, 6)
    planned = await site.run(*HARVEST, "--dry-run")
    assert "12 of 12 requests" in planned
    assert "silent" not in planned
    assert "notary" not in planned
    assert site.entries(EntryType.DRAFT_HARVESTED) == []
    assert site.samples() == {}

    said = await site.run(*HARVEST, "--purpose", "spring refresh")
    begun, done = site.entries(EntryType.DRAFT_HARVESTED)
    assert (begun["stage"], done["stage"]) == ("begun", "done")
    assert begun["tenants"] == done["tenants"] == ["acme", "clinic"]
    assert (done["samples"], done["purpose"]) == (12, "spring refresh")
    assert done["dataset"] in said
    assert "skipped" not in said

    dataset = open_dataset(site.settings, done["dataset"])
    samples = [*dataset.read(False), *dataset.read(True)]
    spoken = {}
    for sample in samples:
        tokens = [sample.prompt, sample.token_ids[len(sample.prompt) :]]
        prompt, answer = (
            site.worker.tokenizer.decode(list(each), skip_special_tokens=False) for each in tokens
        )
        spoken[prompt] = answer
        assert sum(sample.loss_mask) == len(tokens[1])
    expected = {}
    for tenant in ("acme", "clinic"):
        for number, question in enumerate(site.asked[tenant]):
            prompt = rendered(question) if number % 3 else question
            expected[prompt] = site.worker.said[question] + "<|end|>"
    assert spoken == expected
    await site.verify(verify.ExitCode.VALID)

    assert (await site.erase("clinic"))["payloads"] == 12
    assert "clinic" not in site.tenant_keys()
    left = [*dataset.read(False), *dataset.read(True)]
    assert {sample.tenant for sample in left} == {"acme"}
    assert (len(left), dataset.missing) == (6, 6)
    assert set(site.samples()) == {sample.request_id for sample in left}
    await site.verify(verify.ExitCode.ERASED)

    one = left[0].request_id
    assert (await site.erase("acme", one))["payloads"] == 2
    again = {sample.request_id for held in (False, True) for sample in dataset.read(held)}
    assert again == {sample.request_id for sample in left[1:]}
    opened = await site.run("audit", "open", left[1].request_id)
    assert "sample" not in opened
    await site.verify(verify.ExitCode.ERASED)

    # A data set of the remaining content, without text of the erased tenant.
    await site.run(*HARVEST)
    manifests = list((site.data / "drafts" / DATASETS).iterdir())
    assert len(manifests) == 2
    text = "".join(path.read_text() for path in manifests)
    assert not any(question in text for asked in site.asked.values() for question in asked)


async def test_killed_harvest_is_completed_by_the_next(site: Site):
    """Stored samples are reused; no process remains, and the log has two beginnings."""
    await site.talk("acme", 60)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "appliance", *HARVEST, "--data", str(site.data)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    ended = asyncio.create_task(process.stderr.read())
    children: set[int] = set()

    def begun() -> bool:
        assert process.returncode is None, ended.result() if ended.done() else "it was done already"
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        children.update(map(int, found))
        return len(site.samples()) >= 3

    await until(begun, seconds=SECONDS)
    process.send_signal(signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await ended
    before = site.samples()
    assert 3 <= len(before) < 60
    assert children
    await until(lambda: not any(_runs(child) for child in children), seconds=60)
    assert not (site.data / "drafts" / DATASETS).exists()

    await site.run(*HARVEST)
    first, second, done = site.entries(EntryType.DRAFT_HARVESTED)
    assert [first["stage"], second["stage"], done["stage"]] == ["begun", "begun", "done"]
    after = site.samples()
    assert len(after) == done["samples"] == 60
    assert after.items() >= before.items()
    dataset = open_dataset(site.settings, done["dataset"])
    assert len([*dataset.read(False), *dataset.read(True)]) == 60
    await site.verify(verify.ExitCode.VALID)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_target_without_a_tokenizer_is_refused(tmp_path: Path):
    """With the library's message, before any content is read."""
    environment = offline_environment(process_environment(), plugins=())
    with pytest.raises(DraftRefusedError, match="cannot be loaded"), open_tokenizer(tmp_path, environment):
        pass
