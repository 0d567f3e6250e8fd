"""A durable log over a store in memory that can be taken down, for the tests of durability."""

import asyncio
import io
import json
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry

from appliance.audit import verify
from appliance.audit.durability.guarded import LogFiles, open_guarded
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.signing_keys import Signer
from appliance.audit.store import AuditStore
from appliance.errors import AuditUnavailableError
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AuditSettings
from tests.clock import TickingClock
from tests.memory_store import MemoryAuditStore

ORIGIN = "appliance.test/audit"
START = 1_800_000_000.0
INTENT, OUTCOME, READ = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME, EntryType.AUDIT_READ
COMMON = {"tenant": "acme", "key_id": "abcd2345", "route": "/v1/chat/completions", "model": "demo"}
BEGUN = COMMON | {"stream": True, "client": "loopback", "body_bytes": 1, "content_mode": "none"}
ENDED = COMMON | {"outcome": "completed", "status": 200, "duration_ms": 1}


class OutageStore(MemoryAuditStore):
    """A store that is up, or down in one of several ways."""

    state = "up"

    def append(self, leaves, *, expected, new):
        if self.state == "lossy":
            super().append(leaves, expected=expected, new=new)
        if self.state != "up":
            message = "the disk is full"
            raise AuditUnavailableError(message)
        super().append(leaves, expected=expected, new=new)

    def head(self):
        if self.state == "blind":
            message = "the disk is gone"
            raise AuditUnavailableError(message)
        return super().head()


@dataclass
class Bench:
    """A place for a log, opened as often as a test wants."""

    directory: object
    store: AuditStore = field(default_factory=OutageStore)
    clock: Callable[[], float] = field(default_factory=lambda: TickingClock(START))
    signer: Signer = field(
        default_factory=lambda: Signer(ORIGIN, Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    )
    metrics: Metrics = field(default_factory=lambda: Metrics(CollectorRegistry()))
    said: io.StringIO = field(default_factory=io.StringIO)
    gateway: str = "gateway"

    @asynccontextmanager
    async def open(self, durability="spool", **settings):
        """Open the log; on leaving it is closed in an orderly way."""
        logger = structlog.wrap_logger(
            structlog.PrintLogger(self.said), processors=[structlog.processors.JSONRenderer()]
        )
        chosen = {"checkpoint_seconds": 0.02, "spool_after_seconds": 0.3, "verify_seconds": 0} | settings
        async with open_guarded(
            store=self.store,
            signer=self.signer,
            settings=AuditSettings(origin=ORIGIN, durability=durability, **chosen),
            files=LogFiles(
                database_url=f"sqlite:///{self.directory}/audit.db",
                sealed_head=self.directory / "audit.head",
                spool=self.directory / "spool",
            ),
            gateway=self.gateway,
            version="0.1.0",
            metrics=self.metrics,
            logger=logger,
            clock=self.clock,
        ) as guarded:
            yield guarded

    def entries(self, *types):
        """Return what the log holds, in order."""
        found = [decode(leaf.leaf) for leaf in self.store.leaves(0, 10**6)]
        return [entry for entry in found if not types or entry.type in types]

    def ids(self):
        """Return the ids of all entries in the log."""
        return [entry.id for entry in self.entries()]

    def events(self, name):
        """Return the log lines of an event."""
        lines = map(json.loads, self.said.getvalue().splitlines())
        return [line for line in lines if line["event"] == name]

    def verdict(self):
        """Verify the whole log as an auditor would, once it is known to have no problems."""
        target = self.directory / f"export-{time.monotonic_ns()}"
        export_log(self.store, target, vkey=self.signer.vkey)
        report = verify.verify_export(target, verify.parse_key(self.signer.vkey), None)
        assert report.problems == []
        return report


async def until(condition):
    """Wait for a condition without an event."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def begin(sink, request_id):
    """Record an intent; return its receipt."""
    return await sink.append(INTENT, request_id=request_id, **BEGUN)


async def end(sink, request_id):
    """Record an outcome; return its receipt."""
    return await sink.append(OUTCOME, request_id=request_id, **ENDED)
