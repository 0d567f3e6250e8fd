"""What the audit tests share: a clock, a signer, a store in memory that can fail, and an open log."""

import secrets

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit.export import export_log
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import Signer
from appliance.audit.store import SqlAuditStore
from appliance.infra.settings import AuditSettings
from tests import audit_log
from tests.clock import TickingClock
from tests.memory_store import MemoryAuditStore

ORIGIN = "appliance.test/audit"
START = 1_800_000_000.0


@pytest.fixture
def clock():
    return TickingClock(START)


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
    """Open a log on a store; keyword arguments are settings, or replace the argument of that name."""

    def open_(
        store, *, on_commit=lambda _count, _seconds: None, signed_by=signer, gateway="gateway", **settings
    ):
        return AuditLog.open(
            store=store,
            signer=signed_by,
            settings=AuditSettings(origin=ORIGIN, **settings),
            sealed_head_path=sealed_path,
            clock=clock,
            version="0.1.0",
            gateway=gateway,
            on_commit=on_commit,
            random_bytes=secrets.token_bytes,
        )

    return open_


@pytest.fixture
def intent():
    """Fields of a `request.intent`."""
    return audit_log.intent


@pytest.fixture
def outcome():
    """Fields of a `request.outcome` of a request with speculation."""
    return lambda request_id: {
        **audit_log.outcome(request_id),
        "acceptance_length": "2.750",
        "verdicts": ("allowed",),
    }


@pytest.fixture
def export(tmp_path, signer):
    """Export a store into a new directory and return it."""

    def export_(store, name="export"):
        directory = tmp_path / name
        export_log(store, directory, vkey=signer.vkey)
        return directory

    return export_
