"""What the audit tests share: a clock, a signer, a store in memory that can fail, and an open log."""

import secrets
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit.export import export_log
from appliance.audit.keys import Signer
from appliance.audit.log import AuditLog
from appliance.audit.merkle import CompactRange
from appliance.audit.registry import EntryType
from appliance.audit.store import Head, SqlAuditStore
from appliance.errors import AuditEntryError, AuditForkError
from appliance.settings import AuditSettings

ORIGIN = "appliance.test/audit"
START = 1_800_000_000.0
REPOSITORY = Path(__file__).resolve().parents[3]


class Clock:
    """A wall clock that moves when told, and a millisecond at each reading."""

    def __init__(self):
        self.now = START

    def __call__(self):
        self.now += 0.001
        return self.now


class MemoryAuditStore:
    """An audit store in memory; it can be told to fail before or after persisting, or to wait."""

    def __init__(self):
        self.stored = []
        self.stored_head = Head.of(CompactRange())
        self.checkpoints = {}
        self.commits = []
        self.fail_before = []
        """Errors for the next appends, which change nothing."""
        self.fail_after = []
        """Errors for the next appends, which happen all the same."""
        self.fail_reads = []
        self.fail_checkpoints = []
        self.gate = threading.Event()
        """Appends wait for it."""
        self.gate.set()

    def head(self):
        if self.fail_reads:
            raise self.fail_reads.pop(0)
        return self.stored_head

    def append(self, leaves, *, expected, new):
        assert self.gate.wait(10)
        if self.fail_before:
            raise self.fail_before.pop(0)
        if self.stored_head != expected:
            message = "another writer moved the head"
            raise AuditForkError(message)
        known = {(leaf.type, leaf.request_id) for leaf in self.stored if leaf.request_id}
        for leaf in leaves:
            if (leaf.type, leaf.request_id) in known:
                message = "a request cannot be recorded twice"
                raise AuditEntryError(message)
            if leaf.request_id:
                known.add((leaf.type, leaf.request_id))
        self.stored = [*self.stored, *leaves]
        self.stored_head = new
        self.commits.append(len(leaves))
        if self.fail_after:
            raise self.fail_after.pop(0)

    def leaves(self, start, end):
        return self.stored[start:end]

    def leaf_hashes(self, end=None):
        yield from (leaf.leaf_hash for leaf in self.stored[:end])

    def leaf_by_request(self, request_id):
        return [leaf for leaf in self.stored if leaf.request_id == request_id]

    def open_intents(self):
        ended = {leaf.request_id for leaf in self.stored if EntryType(leaf.type).closes_request}
        begun = [leaf.request_id for leaf in self.stored if leaf.type == EntryType.REQUEST_INTENT]
        return [request_id for request_id in begun if request_id not in ended]

    def save_checkpoint(self, checkpoint):
        if self.fail_checkpoints:
            raise self.fail_checkpoints.pop(0)
        self.checkpoints[checkpoint.size] = checkpoint

    def latest_checkpoint(self):
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    def close(self):
        """Hold nothing."""


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def signer():
    return Signer(ORIGIN, Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


@pytest.fixture
def memory_store():
    return MemoryAuditStore()


@pytest.fixture
def sql_store(tmp_path):
    store = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")
    yield store
    store.close()


@pytest.fixture
def sealed_path(tmp_path):
    return tmp_path / "audit.head"


@pytest.fixture
def open_log(signer, clock, sealed_path):
    """Open a log on a store; keyword arguments are settings, or replace what is named alike."""

    def open_(store, *, on_commit=lambda _count, _seconds: None, signed_by=signer, **settings):
        return AuditLog.open(
            store=store,
            signer=signed_by,
            settings=AuditSettings(origin=ORIGIN, **settings),
            sealed_head_path=sealed_path,
            clock=clock,
            version="0.1.0",
            on_commit=on_commit,
            random_bytes=secrets.token_bytes,
        )

    return open_


@pytest.fixture
def intent():
    """Fields of a `request.intent`."""

    def fields(request_id):
        return {
            "request_id": request_id,
            "tenant": "acme",
            "key_id": "abcd2345",
            "route": "/v1/chat/completions",
            "model": "demo",
            "stream": True,
            "client": "loopback",
            "body_bytes": 123,
            "content_mode": "none",
        }

    return fields


@pytest.fixture
def outcome():
    """Fields of a `request.outcome`."""

    def fields(request_id):
        return {
            "request_id": request_id,
            "tenant": "acme",
            "key_id": "abcd2345",
            "route": "/v1/chat/completions",
            "model": "demo",
            "outcome": "completed",
            "status": 200,
            "duration_ms": 42,
            "acceptance_length": "2.750",
            "verdicts": ("allowed",),
        }

    return fields


@pytest.fixture
def export(tmp_path, signer):
    """Export a store into a new directory and return it."""

    def export_(store, name="export"):
        directory = tmp_path / name
        export_log(store, directory, vkey=signer.vkey)
        return directory

    return export_


@pytest.fixture(scope="module")
def vectors():
    """Folder of the external Merkle vectors; without it the tests say loudly that they prove less."""
    folder = REPOSITORY.parent / "shared" / "vectors" / "merkle"
    if not folder.is_dir():
        pytest.skip(
            "EXTERNAL MERKLE VECTORS ARE MISSING: put transparency-dev/merkle's testdata into "
            "shared/vectors/merkle beside the checkout; CI has them"
        )
    return folder
