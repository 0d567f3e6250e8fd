"""
Files and batches as the OpenAI client uses them: a gateway process in front of a scripted worker.

What the tests leave in the audit log is verified when the gateway has stopped.
"""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from appliance.audit import verify
from demo.process import ApplianceProcess
from tests.command import run_command
from tests.fakes import METRICS, MODEL, FakeWorker, chat, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
HELD = "hold this"
SECRET = "an unmistakable secret"
PATIENCE_SECONDS = 100
ENDED = {"completed", "failed", "expired", "cancelled"}


class EchoWorker(FakeWorker):
    """Answers with the request's content, and reports its queue."""

    def __init__(self):
        super().__init__()
        self.running = self.waiting = 0
        self.begin(pause_seconds=0.0)

    def begin(self, *, pause_seconds: float, seats: int = 64) -> None:
        """Start counting: from now on it answers `seats` requests at a time, each after a pause."""
        self.pause_seconds, self.seats = pause_seconds, asyncio.Semaphore(seats)
        self.completed = self.most_running = 0
        self.release = asyncio.Event()
        """Until it is set, requests whose message begins with HELD are not answered."""
        self.asked: list[str] = []
        """The last message of each request, in the order they began to be answered."""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        said = json.loads(await request.read())["messages"][-1]["content"]
        self.waiting += 1
        async with self.seats:
            self.waiting, self.running = self.waiting - 1, self.running + 1
            self.asked.append(said)
            self.most_running = max(self.most_running, self.running)
            try:
                await asyncio.sleep(self.pause_seconds)
                if said.startswith(HELD):
                    await self.release.wait()
            finally:
                self.running -= 1
            self.completed += 1
            whole = self.whole(request.path)
            whole["choices"][0]["message"]["content"] = said
            return web.json_response(whole)

    async def metrics_page(self, request: web.Request) -> web.Response:
        self.metrics = METRICS.replace(
            'running{engine="0",model_name="demo"} 0.0',
            f'running{{engine="0",model_name="demo"}} {self.running}',
        ).replace(
            'waiting{engine="0",model_name="demo"} 0.0',
            f'waiting{{engine="0",model_name="demo"}} {self.waiting}',
        )
        return await super().metrics_page(request)


class Appliance:
    """A gateway process on one data directory, which can be killed and started again."""

    def __init__(self, data: Path, worker: FakeWorker, **settings: str) -> None:
        self.data, self.worker = data, worker
        self._environment = {
            "APPLIANCE_POOL__URLS": json.dumps([worker.url]),
            "APPLIANCE_BATCH__KEEP_FREE_BYTES": "0",
            "APPLIANCE_MONITOR__INTERVAL_SECONDS": "0.1",
            **settings,
        }
        self.key = ""
        self.verdict = verify.ExitCode.VALID
        """The expected report of the verifier."""
        self.process: ApplianceProcess | None = None

    def change_setting(self, variable: str, value: object) -> None:
        """For the next start."""
        self._environment[variable] = str(value)

    async def start(self) -> "Appliance":
        """Start it and wait until it is ready."""
        self.process = ApplianceProcess(
            "gateway", data=self.data, key=self.key, environment=self._environment
        )
        await asyncio.to_thread(self.process.wait_ready)
        self.key = self.process.key
        return self

    async def kill(self) -> None:
        """End it with SIGKILL."""
        await asyncio.to_thread(self.process.stop, signal.SIGKILL)
        self.process.process.stdout.close()

    async def stop(self) -> int:
        """Stop it in order."""
        status = await asyncio.to_thread(self.process.stop)
        self.process.process.stdout.close()
        return status

    def client(self, key: str | None = None) -> openai.AsyncOpenAI:
        """The real client."""
        return openai.AsyncOpenAI(
            base_url=f"{self.process.url}/v1",
            api_key=key or self.key,
            max_retries=0,
            http_client=httpx.AsyncClient(verify=False, trust_env=False, timeout=PATIENCE_SECONDS),
        )

    async def run(self, *arguments: str, expecting: int = 0) -> str:
        """Run a command on its data directory; return what it printed."""
        done = await asyncio.to_thread(run_command, *arguments, "--data", self.data)
        assert done.returncode == expecting, done.stdout + done.stderr
        return done.stdout

    async def tenant(self, name: str, *options: str) -> str:
        """Create a tenant; return a key of it."""
        await self.run("tenant", "create", name, *options)
        return (await self.run("key", "create", name)).strip()

    async def entries(self, tenant: str, *types: str) -> list[dict]:
        """Every entry of these types about a tenant."""
        text = await self.run("audit", "tail", "--json", "--count", "100000")
        entries = [entry for entry in map(json.loads, text.splitlines()) if entry["type"] in types]
        return [entry for entry in entries if entry["tenant"] == tenant]

    def files(self) -> set[str]:
        """Names of the files it keeps."""
        return {path.name for path in (self.data / "files").rglob("*") if path.is_file()}


@asynccontextmanager
async def running(data: Path, **settings: str) -> AsyncIterator[Appliance]:
    worker = EchoWorker()
    async with worker.serving():
        appliance = await Appliance(data, worker, **settings).start()
        try:
            yield appliance
            assert await appliance.stop() == 0, "".join(appliance.process.output)
            await appliance.run("audit", "verify", expecting=appliance.verdict)
        finally:
            if appliance.process.process.poll() is None:
                await appliance.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def appliance(tmp_path_factory) -> AsyncIterator[Appliance]:
    """The gateway of all tests; each test has its own tenant."""
    settings = {
        "APPLIANCE_BATCH__MAX_FILE_BYTES": "200000",
        "APPLIANCE_API__MAX_BODY_BYTES": "20000",
        # Of four requests at a time batches may make two.
        "APPLIANCE_ADMISSION__WORKER_REQUESTS": "4",
        "APPLIANCE_BATCH__IDLE_SHARE": "0.5",
    }
    async with running(tmp_path_factory.mktemp("gateway") / "data", **settings) as appliance:
        yield appliance


def requests(*ids: str, **more) -> bytes:
    """The input of a batch that says each id."""
    lines = [
        {"custom_id": each, "method": "POST", "url": CHAT, "body": {**chat(), "messages": said(each), **more}}
        for each in ids
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


async def begin(client: openai.AsyncOpenAI, content: bytes, **more):
    """Upload a file and make a batch of it."""
    stored = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=stored.id, endpoint=CHAT, completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str):
    """Wait for the end of a batch."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ENDED:
                return batch
            await asyncio.sleep(0.1)


async def lines(client: openai.AsyncOpenAI, file_id: str) -> list[dict]:
    """The lines of an output file."""
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_two_hundred_lines_are_each_answered_once_however_often_the_gateway_is_killed(tmp_path):
    """Three times SIGKILL in the middle; the log shows the repeated requests."""
    ids = [f"patient {number}" for number in range(200)]
    async with running(tmp_path / "data") as appliance:
        worker = appliance.worker
        worker.begin(pause_seconds=0.05)
        async with appliance.client() as client:
            batch = await begin(client, requests(*ids), metadata={"ward": "7"})
            assert (batch.status, batch.metadata) == ("validating", {"ward": "7"})
        for killed_at in (40, 90, 140):
            await until(lambda at=killed_at: worker.completed >= at, PATIENCE_SECONDS)
            await appliance.kill()
            await appliance.start()
        async with appliance.client() as client:
            done = await ended(client, batch.id)
            assert done.status == "completed"
            assert (done.request_counts.total, done.request_counts.completed) == (200, 200)
            assert done.error_file_id is None
            outputs = await lines(client, done.output_file_id)
        assert Counter(line["custom_id"] for line in outputs) == Counter(ids)
        for line in outputs:
            response = line["response"]
            assert (response["status_code"], line["error"]) == (200, None)
            assert response["body"]["choices"][0]["message"]["content"] == line["custom_id"]
        assert set(worker.asked) == set(ids)
        intents = await appliance.entries("demo", "request.intent")
        assert {entry["batch"] for entry in intents} == {batch.id}
        assert {entry["batch_line"] for entry in intents} == set(range(1, 201))
        by_request = {entry["request_id"]: entry["batch_line"] for entry in intents}
        assert all(
            ids[by_request[line["response"]["request_id"]] - 1] == line["custom_id"] for line in outputs
        )
        (end,) = await appliance.entries("demo", "batch.ended")
        assert (end["outcome"], end["requests"], end["completed"]) == ("completed", 200, 200)
        assert appliance.files() == {batch.input_file_id, done.output_file_id}


async def test_new_directory_of_files_loses_no_file_and_no_result_of_the_old_one(tmp_path):
    """A batch is killed in the middle, and the gateway starts again with `batch.directory`."""
    ids = [f"line-{number}" for number in range(40)]
    elsewhere = tmp_path / "elsewhere"
    async with running(tmp_path / "data") as appliance:
        worker = appliance.worker
        worker.begin(pause_seconds=0.1)
        async with appliance.client() as client:
            kept = await client.files.create(file=("in.jsonl", requests("kept")), purpose="batch")
            batch = await begin(client, requests(*ids))
        results = appliance.data / "files"
        await until(lambda: any(path.stat().st_size for path in results.rglob("batch_*")), PATIENCE_SECONDS)
        await appliance.kill()
        asked = len(worker.asked)
        appliance.change_setting("APPLIANCE_BATCH__DIRECTORY", elsewhere)
        await appliance.start()
        async with appliance.client() as client:
            done = await ended(client, batch.id)
            assert (done.status, done.request_counts.completed) == ("completed", 40)
            outputs = await lines(client, done.output_file_id)
            assert Counter(line["custom_id"] for line in outputs) == Counter(ids)
            # Results of before are not computed again.
            assert set(worker.asked[asked:]) < set(ids)
            assert (await client.files.content(kept.id)).content == requests("kept")
            added = await client.files.create(file=("in.jsonl", requests("added")), purpose="batch")
            assert appliance.files() == {kept.id, batch.input_file_id}
            assert {path.name for path in elsewhere.rglob("file-*")} == {added.id, done.output_file_id}
            for file_id in (kept.id, batch.input_file_id, added.id, done.output_file_id):
                assert (await client.files.delete(file_id)).deleted
        assert appliance.files() == set()
        assert list(elsewhere.rglob("file-*")) == []


async def test_files_are_taken_listed_given_out_and_deleted(appliance):
    """Every call of the client's `files`, and what another tenant gets."""
    keys = [await appliance.tenant("filing"), await appliance.tenant("prying")]
    before, content = appliance.files(), requests("a", "b")
    async with appliance.client(keys[0]) as client, appliance.client(keys[1]) as other:
        made = [
            await client.files.create(
                file=("../in 1.jsonl", content),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 7200},
            ),
            await client.files.create(file=("two.jsonl", b"x" * 200_000), purpose="batch"),
        ]
        assert (made[0].filename, made[0].bytes, made[0].purpose) == ("in 1.jsonl", len(content), "batch")
        assert (made[0].object, made[0].status) == ("file", "processed")
        assert made[0].expires_at - made[0].created_at == 7200
        assert made[1].expires_at - made[1].created_at == 30 * 86400
        assert (await client.files.content(made[0].id)).content == content
        assert await client.files.retrieve(made[0].id) == made[0]
        listed = [stored async for stored in client.files.list(limit=1)]
        assert listed == made[::-1]
        assert [stored async for stored in client.files.list(order="asc")] == made
        assert [stored async for stored in client.files.list(purpose="batch_output")] == []
        assert [stored async for stored in other.files.list()] == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError) as missing:
                await call(made[0].id)
            assert missing.value.code == "file_not_found"
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=made[0].id, endpoint=CHAT, completion_window="24h")
        assert (await client.files.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made[0].id)
        for size in (200_001, 400_000):
            with pytest.raises(openai.APIStatusError) as large:
                await client.files.create(file=("big.jsonl", b"x" * size), purpose="batch")
            assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("x", b"x"), purpose="fine-tune")
        assert refused.value.param == "purpose"
    entries = await appliance.entries("filing", "file.created", "file.deleted")
    assert [(entry["type"], entry["file"]) for entry in entries] == [
        ("file.created", made[0].id),
        ("file.created", made[1].id),
        ("file.deleted", made[0].id),
    ]
    assert appliance.files() - before == {made[1].id}


async def test_batches_are_listed_cancelled_and_report_errors(appliance):
    """Every call of the client's `batches`."""
    worker = appliance.worker
    worker.begin(pause_seconds=0.1)
    async with appliance.client(await appliance.tenant("listing")) as client:
        bad = await begin(client, requests("a", "a") + b"{}\n")
        failed = await ended(client, bad.id)
        assert failed.status == "failed"
        assert [(error.line, error.code) for error in failed.errors.data] == [
            (2, "duplicate_custom_id"),
            (3, "missing_required_parameter"),
        ]
        assert worker.asked == []
        ids = [f"line-{number}" for number in range(400)]
        long = await begin(client, requests(*ids))
        await until(lambda: worker.completed >= 8, PATIENCE_SECONDS)
        with pytest.raises(openai.ConflictError):
            await client.files.delete(long.input_file_id)
        assert (await client.batches.cancel(long.id)).status == "cancelling"
        cancelled = await ended(client, long.id)
        assert cancelled.status == "cancelled"
        assert cancelled.cancelled_at >= cancelled.cancelling_at >= cancelled.in_progress_at
        done = await lines(client, cancelled.output_file_id)
        rest = await lines(client, cancelled.error_file_id)
        assert Counter(line["custom_id"] for line in done + rest) == Counter(ids)
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        assert cancelled.request_counts.completed == len(done)
        assert len(worker.asked) < 100
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(long.id)
        assert [batch.id async for batch in client.batches.list(limit=1)] == [long.id, bad.id]
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch_none")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.batches.create(
                input_file_id=long.input_file_id, endpoint=CHAT, completion_window="1y"
            )
        assert refused.value.param == "completion_window"
        assert (await client.files.delete(long.input_file_id)).deleted


async def test_interactive_requests_go_first(appliance):
    """While they use the share of batches, no line starts; later the batch resumes."""
    worker = appliance.worker
    worker.begin(pause_seconds=0.2, seats=4)
    async with appliance.client(await appliance.tenant("urgent")) as client:

        async def ask(text: str) -> None:
            await client.chat.completions.create(model=MODEL, messages=said(text))

        async with asyncio.TaskGroup() as tasks:
            batch = await begin(client, requests(*(f"line-{number}" for number in range(60))))
            await until(lambda: worker.completed >= 6, PATIENCE_SECONDS)
            assert worker.running <= 2
            # Two in the worker are the share of two in four.
            for number in range(2):
                tasks.create_task(ask(f"{HELD} {number}"))
            await until(lambda: sum(each.startswith(HELD) for each in worker.asked) == 2, PATIENCE_SECONDS)
            await until(lambda: worker.running == 2, PATIENCE_SECONDS)
            asked = len(worker.asked)
            for number in range(5):
                await ask(f"urgent {number}")
            assert worker.asked[asked:] == [f"urgent {number}" for number in range(5)]
            worker.release.set()
        assert (await ended(client, batch.id)).status == "completed"


async def test_revoking_a_key_stops_its_batches(appliance):
    """Another key of the tenant can read the finished lines."""
    worker = appliance.worker
    worker.begin(pause_seconds=0.1)
    key = await appliance.tenant("revoked")
    other = (await appliance.run("key", "create", "revoked")).strip()
    async with appliance.client(key) as client, appliance.client(other) as colleague:
        batch = await begin(client, requests(*(f"line-{number}" for number in range(300))))
        await until(lambda: worker.completed >= 6, PATIENCE_SECONDS)
        await appliance.run("key", "revoke", key.split("-")[1])
        done = await ended(colleague, batch.id)
        assert done.status == "failed"
        assert [error.code for error in done.errors.data] == ["invalid_api_key"]
        asked = len(worker.asked)
        outputs = await lines(colleague, done.output_file_id)
        assert 6 <= len(outputs) == done.request_counts.completed
        await asyncio.sleep(0.5)
        assert len(worker.asked) == asked


async def test_lines_are_held_to_the_limits_of_their_tenant(appliance):
    """No more at once than the limit, and the batch still completes."""
    worker = appliance.worker
    worker.begin(pause_seconds=0.05)
    async with appliance.client(
        await appliance.tenant("limited", "--limit", "concurrent_requests=1")
    ) as client:
        batch = await begin(client, requests(*(f"line-{number}" for number in range(8))))
        done = await ended(client, batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 8)
    assert worker.most_running == 1
    denied = await appliance.entries("limited", "request.denied")
    assert {entry["reason"] for entry in denied} == {"rate_limit_exceeded"}


async def test_content_of_an_encrypted_tenant_is_nowhere_in_the_clear_and_can_be_erased(appliance):
    """Input, output and intermediate files; erasing the tenant covers all of them."""
    worker = appliance.worker
    worker.begin(pause_seconds=0.05)
    key = await appliance.tenant("sealed", "--content", "encrypted")
    before = appliance.files()

    def clear() -> list[str]:
        paths = [path for path in appliance.data.rglob("*") if path.is_file()]
        return [path.name for path in paths if SECRET.encode() in path.read_bytes()]

    async with appliance.client(key) as client:
        ids = [f"{SECRET} {number}" for number in range(40)]
        batch = await begin(client, requests(*ids))
        await until(lambda: worker.completed >= 10, PATIENCE_SECONDS)
        assert await asyncio.to_thread(clear) == []
        done = await ended(client, batch.id)
        assert Counter(line["custom_id"] for line in await lines(client, done.output_file_id)) == Counter(ids)
        assert await asyncio.to_thread(clear) == []
        where = ("--url", appliance.process.admin_url)
        erasing = ("audit", "erase", "--tenant", "sealed", "--basis", "end of contract", "--yes", *where)
        await appliance.run(*erasing)
        appliance.verdict = verify.ExitCode.ERASED
        for file_id in (batch.input_file_id, done.output_file_id):
            with pytest.raises(openai.NotFoundError):
                await client.files.content(file_id)
    assert appliance.files() == before
    reasons = [entry["reason"] for entry in await appliance.entries("sealed", "file.deleted")]
    assert reasons == ["erased", "erased"]
