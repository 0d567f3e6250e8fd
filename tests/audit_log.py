"""
A real audit log in a directory, opened as `appliance.app.gateway_process` opens it.
"""

import time
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.durability.guarded import LogFiles, open_guarded
from appliance.audit.export import tile_path
from appliance.audit.merkle import hash_leaf, root_from_leaf_hashes
from appliance.audit.signing_keys import Signer, create_signing_key, load_signing_key
from appliance.audit.store import AuditStore
from appliance.infra.data_directory import Installation, locate
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AuditSettings, DataSettings, Settings

ORIGIN = "appliance.test/audit"
NEVER_SECONDS = 3600.0


def settings_for(directory: Path, database_url: str | None = None, **audit) -> Settings:
    """Settings of a log in `directory`; checkpoints come by number of entries, never by the clock."""
    given = {"checkpoint_seconds": NEVER_SECONDS, "heartbeat_seconds": NEVER_SECONDS, **audit}
    return Settings(
        data=DataSettings(directory=directory),
        audit=AuditSettings(origin=ORIGIN, database_url=database_url, **given),
    )


def prepare(directory: Path) -> Installation:
    """Make the directory and the signing key, which every later start finds."""
    directory.mkdir(parents=True, exist_ok=True)
    installation = locate(settings_for(directory))
    create_signing_key(installation.signing_key)
    return installation


def signer_in(directory: Path) -> Signer:
    """The signer of the log in `directory`."""
    return load_signing_key(locate(settings_for(directory)).signing_key, ORIGIN)


def open_log(settings: Settings, store: AuditStore, clock=time.time):  # noqa: TID251 - a root of its own
    """Open the log the settings describe on `store`, as the gateway does; entries go to its `sink`."""
    installation = locate(settings)
    files = LogFiles(
        database_url=installation.database_url,
        sealed_head=installation.sealed_head,
        spool=installation.spool,
    )
    return open_guarded(
        store=store,
        signer=load_signing_key(installation.signing_key, settings.audit.origin),
        settings=settings.audit,
        files=files,
        gateway="gateway",
        version="0.1.0",
        metrics=Metrics(CollectorRegistry()),
        logger=structlog.wrap_logger(
            structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(0)
        ),
        clock=clock,
    )


def intent(request_id: str) -> dict:
    """Fields of a `request.intent`."""
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


def outcome(request_id: str) -> dict:
    """Fields of a `request.outcome`."""
    return {
        "request_id": request_id,
        "tenant": "acme",
        "key_id": "abcd2345",
        "route": "/v1/chat/completions",
        "model": "demo",
        "outcome": "completed",
        "status": 200,
        "duration_ms": 42,
    }


def write_export(directory: Path, leaves: list[bytes], signer: Signer) -> Path:
    """Write an export of any leaves, signed: what a writer with the key could show."""
    hashes = [hash_leaf(leaf) for leaf in leaves]
    nodes, level = hashes, 0
    while nodes:
        above = []
        for number, start in enumerate(range(0, len(nodes), 256)):
            tile = nodes[start : start + 256]
            _write(directory / tile_path(str(level), number, len(tile)), b"".join(tile))
            if level == 0:
                bundle = (len(leaf).to_bytes(2) + leaf for leaf in leaves[start : start + 256])
                _write(directory / tile_path("entries", number, len(tile)), b"".join(bundle))
            if len(tile) == 256:
                above.append(root_from_leaf_hashes(tile))
        nodes, level = above, level + 1
    body = encode_body(Checkpoint(origin=signer.name, size=len(leaves), root=root_from_leaf_hashes(hashes)))
    _write(directory / "checkpoint", sign_note(body, [signer]).encode())
    _write(directory / "vkey", f"{signer.vkey}\n".encode())
    return directory


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
