"""One gateway's batches: everything is real but the gateway's requests, the workers and the clock."""

import asyncio
import json
import os
from collections import Counter
from contextlib import contextmanager

from sqlalchemy import create_engine

from appliance.audit.content.payload_keys import PayloadKeys
from appliance.audit.entry import new_entry_id
from appliance.audit.pending import Receipt
from appliance.gateway.batch.answerer import find_owner
from appliance.gateway.batch.batch import FilePurpose
from appliance.gateway.batch.batch_runner import BatchRunner
from appliance.gateway.batch.batches import Batches
from appliance.gateway.batch.bounds import StorageThreads
from appliance.gateway.batch.executor import BatchParts
from appliance.gateway.batch.files import TenantFiles, Upload
from appliance.gateway.batch.lines import parse_line
from appliance.gateway.batch.request import BatchRequest
from appliance.gateway.batch.results import LineAnswer
from appliance.gateway.batch.store import SqlBatchStore
from appliance.gateway.batch.tables import metadata
from appliance.gateway.batch.vault import FileVault
from appliance.infra.settings import BatchSettings
from appliance.tenancy import ContentPolicy, Tenant, TenantDirectory, make_key
from tests.clock import Clock
from tests.fakes import audit_fields

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "an unmistakable secret"}]}
_, KEY = make_key(bytes(range(37)))
_, OTHER_KEY = make_key(bytes(range(1, 38)))


def requests(*ids, body=BODY):
    lines = [{"custom_id": each, "method": "POST", "url": CHAT, "body": body} for each in ids]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


class Sink:
    """An audit log in memory, which refuses entries if `refusal` is set."""

    def __init__(self):
        self.entries = []
        self.refusal = None

    def submit(self, entry_type, /, **fields):
        if self.refusal is not None:
            raise self.refusal
        self.entries.append({"type": str(entry_type), **audit_fields(entry_type, fields)})
        done = asyncio.get_running_loop().create_future()
        done.set_result(Receipt(index=len(self.entries) - 1, entry_id="x"))
        return done

    async def confirm(self, pending):
        return await pending

    def of(self, entry_type):
        return [entry for entry in self.entries if entry["type"] == entry_type]


class Answers:
    """Answers lines as the test sets; counts the requests of each."""

    def __init__(self):
        self.asked = Counter()
        self.statuses = {}  # of the next answers, by custom id
        self.held = asyncio.Event()  # answers arrive while it is set
        self.held.set()
        self.limit = None  # concurrent answers, the others are refused with 429; None: no limit
        self.refused = 0
        self.allowed = None  # answers left, later ones wait for ever; None: no limit
        self.at_once = 0
        self.most_at_once = 0
        self.left = []  # whether the client of each aborted line counts as gone

    async def read(self, batch, number, line):
        return parse_line(number, line, batch.endpoint)

    async def ask(self, batch, line, caller, reply):
        self.asked[line.custom_id] += 1
        is_too_many = self.limit is not None and self.at_once >= self.limit
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            await self.held.wait()
            if self.allowed == 0:
                await asyncio.get_running_loop().create_future()
            elif self.allowed is not None:
                self.allowed -= 1
        except asyncio.CancelledError:
            self.left.append(reply.client_left)
            raise
        finally:
            self.at_once -= 1
        if is_too_many:
            self.refused += 1
            return LineAnswer(request_id=f"r-{line.number}", status=429, body="{}")
        waiting = self.statuses.get(line.custom_id, [])
        status = waiting.pop(0) if waiting else 200
        body = {"said": line.custom_id} if status == 200 else {"error": {"message": "no"}}
        return LineAnswer(request_id=f"r-{line.number}", status=status, body=json.dumps(body))


class OpenGate:
    """Admits as many lines as the test sets."""

    room = 4
    lines = 0

    def admits(self, model, mine):
        return self.lines < self.room

    @contextmanager
    def batch(self):
        yield

    def line_started(self):
        self.lines += 1

    def line_ended(self):
        self.lines -= 1


class Scene:
    """One gateway, which can restart on the same directory."""

    def __init__(self, directory, *, content=ContentPolicy.NONE, gateway="one", parallel=8, **settings):
        self.directory, self.parallel = directory, parallel
        self.settings = BatchSettings(keep_free_bytes=0, **settings)
        self.clock, self.sink, self.answers, self.gate = Clock(1_800_000_000.0), Sink(), Answers(), OpenGate()
        self.tenants = TenantDirectory(
            (Tenant(name="acme", keys=(KEY,), content=content), Tenant(name="other", keys=(OTHER_KEY,))),
            clock=self.clock,
        )
        url = f"sqlite:///{directory / 'audit.db'}"
        engine = create_engine(url)
        metadata.create_all(engine)
        engine.dispose()
        self.store = SqlBatchStore(url)
        self.keys = PayloadKeys(
            directory / "keys", master_key=None, key_days=7, clock=self.clock, random_bytes=os.urandom
        )
        self.threads = StorageThreads()
        self.gateway = gateway
        self.counted = Counter()
        self.build()

    def build(self):
        """Make every part from the directory, as a start does."""
        self.vault = FileVault(
            self.directory / "files",
            self.gateway,
            self.keys,
            keep_free_bytes=self.settings.keep_free_bytes,
            clock=self.clock,
            random_bytes=os.urandom,
        )
        self.files = TenantFiles(
            store=self.store,
            vault=self.vault,
            audit=self.sink,
            settings=self.settings,
            threads=self.threads,
            clock=self.clock,
        )
        self.files.recover()
        self.parts = BatchParts(
            store=self.store,
            vault=self.vault,
            files=self.files,
            threads=self.threads,
            audit=self.sink,
            gate=self.gate,
            answerer=self.answers,
            find_owner=lambda tenant, key_id: find_owner(self.tenants, tenant, key_id, self.clock()),
            count=lambda tenant, result: self.counted.update([result]),
            clock=self.clock,
            new_id=self.new_id,
            max_line_bytes=100_000,
            max_requests=self.settings.max_requests,
        )
        self.runner = BatchRunner(self.parts, parallel=self.parallel, clock=self.clock, logger=Silent())
        self.batches = Batches(
            store=self.store,
            vault=self.vault,
            files=self.files,
            audit=self.sink,
            settings=self.settings,
            threads=self.threads,
            clock=self.clock,
            wake=self.runner.wake,
        )

    def new_id(self):
        return new_entry_id(int(self.clock() * 1000), os.urandom(10))

    def caller(self, tenant="acme"):
        """A caller with a key."""
        owner = self.tenants.tenant(tenant)
        return find_owner(self.tenants, tenant, owner.keys[0].key_id, self.clock())

    async def upload(self, content, tenant="acme", size=None, **more):
        size = len(content) if size is None else size
        async with self.files.receive(self.caller(tenant), size) as incoming:
            await incoming.write(content)
            about = {"filename": "in.jsonl", "purpose": FilePurpose.BATCH, "kept_seconds": None, **more}
            return await self.files.keep(incoming, Upload(**about))

    async def begin(self, content, tenant="acme", window_seconds=3600):
        """Upload a file and create its batch."""
        stored = await self.upload(content, tenant)
        return await self.begin_with(stored.file_id, tenant, window_seconds)

    async def begin_with(self, file_id, tenant="acme", window_seconds=3600):
        order = BatchRequest(
            input_file_id=file_id,
            endpoint=CHAT,
            completion_window="1h",
            window_seconds=window_seconds,
            metadata={},
            output_seconds=None,
        )
        return await self.batches.create(self.caller(tenant), order, client="loopback")

    def row(self, batch):
        """The batch as the database has it."""
        return self.store.batch(batch.tenant, batch.batch_id)

    async def lines(self, tenant, file_id):
        stored = await self.files.get(tenant, file_id)
        text = b"".join([piece async for piece in self.files.read(stored)])
        return [json.loads(line) for line in text.splitlines()]

    def on_disk(self):
        """Names of all files in the gateway's directory."""
        return {path.name for path in (self.directory / "files" / self.gateway).iterdir()}


class Silent:
    """A logger without output."""

    def warning(self, *_args, **_fields):
        pass

    def exception(self, event, **fields):
        """A defect in a batch fails the test."""
        raise AssertionError(event, fields)
