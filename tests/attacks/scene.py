"""
The setting of an attack: a log with a history, access as the database's owner, and stolen keys.

Everything is done with SQL on the tables as they are, or by running the gateway's own software on
stolen parts; nothing of the writer is reached into.
"""

import asyncio
import secrets
import shutil
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, create_engine, insert, text

from appliance.audit.append import append_entry
from appliance.audit.checkpoint import parse_body, parse_note, parse_verifier_keys
from appliance.audit.content.payload_keys import ulid_ms
from appliance.audit.content.payloads import Payload, SqlPayloadStore, export_payloads
from appliance.audit.content.sealing import Part, place, seal, unwrap
from appliance.audit.entry import format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.integration import AcceptedRow, accept_after
from appliance.audit.merkle import TILE_WIDTH, HashTree
from appliance.audit.pending import EntryMaker
from appliance.audit.pending_rows import INTEGRATION, Writing
from appliance.audit.sealed import SealedHead
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.store import Timestamp, Timestamps
from appliance.audit.timestamps.timestamping import latest_text
from appliance.audit.witness.home import WitnessHome
from appliance.audit.witness.witness import CONFLICT, OK, AddCheckpoint, Witness, encode_request
from appliance.control.tenants.enrolment import seal_upgraded
from appliance.control.tenants.registrar import Edit, Registrar
from appliance.infra.data_directory import locate
from appliance.infra.lease import SqlLease
from appliance.infra.schema import upgrade_database
from appliance.infra.settings import Settings
from appliance.tenancy import ApiKey, Tenant
from appliance.tenancy.edits import revoke_key
from appliance.tenancy.store import SqlTenantStore, open_tenant_store
from tests.audit_log import ORIGIN, intent, open_log, outcome, prepare, settings_for, signer_in
from tests.disposed_log import DAY_MS, aged, dispose
from tests.forwarding import Collected, make_forwarder
from tests.timestamp_authority import TimestampAuthority
from tests.tree_proofs import consistency_proof

WRAPPING_KEY = bytes(range(32))
"""The tenant's key; it is not in the database."""
WRAPPING_KEY_ID = "acme.01HZZZZZZZZZZZZZZZZZZZZZZZ"
TRIGGERS = {
    "sqlite": "SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": (
        "SELECT tgname, relname FROM pg_trigger JOIN pg_class ON tgrelid = pg_class.oid "
        "WHERE NOT tgisinternal"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """The log's database and sealed head, as they were."""

    tables: Mapping[str, Sequence[dict]]
    sealed_head: bytes

    @property
    def size(self) -> int:
        """Entries it has."""
        return len(self.tables["audit_leaves"])


class Scene:
    """One log in a directory and a database; `url` is the database as its owner reaches it."""

    def __init__(self, directory: Path, url: str | None = None) -> None:
        self.directory = directory
        self.settings: Settings = settings_for(directory, url, checkpoint_entries=1)
        self.installation = locate(self.settings)
        self.engine: Engine = create_engine(self.installation.database_url)

    def close(self) -> None:
        """Release every connection."""
        self.engine.dispose()

    @property
    def vkey(self) -> str:
        """The key an auditor was given."""
        return signer_in(self.directory).vkey

    def serve(self, *requests: str, archived: Sequence[str] = (), erased: Sequence[str] = ()) -> None:
        """
        Start, record requests, the prompts of some in the archive, and stop in order.

        Of those in the archive, prompts can be erased again, all from before a time.
        """

        async def serve_() -> None:
            async with open_log(self.settings, store) as log:
                for name in (*requests, *archived):
                    kept = self._keep(name) if name in archived else {}
                    await log.sink.append(EntryType.REQUEST_INTENT, **{**intent(name), **kept})
                    await log.sink.append(EntryType.REQUEST_OUTCOME, **outcome(name))
                if erased:
                    await log.sink.append(
                        EntryType.ERASURE,
                        tenant="acme",
                        payloads=len(erased),
                        legal_basis="end of purpose",
                        actor="cli:root",
                        before=format_time(ulid_ms(max(erased)) + 1),
                        before_index=log.log.state().size,
                    )

        store = SqlAuditStore(self.installation.database_url)
        try:
            asyncio.run(serve_())
        finally:
            store.close()

    def fill(self, count: int) -> None:
        """Record many entries."""

        async def fill_() -> None:
            async with open_log(self.settings, store) as log:
                reading = {"actor": "cli:root", "operation": "tail"}
                for pending in [log.sink.submit(EntryType.AUDIT_READ, **reading) for _ in range(count)]:
                    await log.sink.confirm(pending)

        with closing(SqlAuditStore(self.installation.database_url)) as store:
            asyncio.run(fill_())

    def forward(self, stream: Path) -> None:
        """Send the log to a SIEM as a gateway does, which stores it in `stream`; raises AuditError."""
        collector = Collected()
        with closing(SqlAuditStore(self.installation.database_url)) as store:
            try:
                asyncio.run(make_forwarder(store, collector).forward(until_sent=True))
            finally:
                with stream.open("ab") as file:
                    file.write(collector.stream)

    def accept(self, count: int) -> None:
        """Accept entries as a gateway that is killed before another integrates them."""

        async def rows_() -> list[AcceptedRow]:
            maker = EntryMaker(
                origin=ORIGIN,
                clock=time.time,  # noqa: TID251 - a root of its own
                random_bytes=secrets.token_bytes,
            )
            reading = {"actor": "cli:root", "operation": "tail"}
            taken = [maker.make(EntryType.AUDIT_READ, reading) for _ in range(count)]
            return accept_after(found.end, taken, "gateway", found.writing.epoch)

        with closing(SqlAuditStore(self.installation.database_url)) as store:
            writing = Writing(gateway="gateway", instance="killed")
            found = store.register(writing, time.time())  # noqa: TID251 - a root of its own
            store.accept(found.writing, asyncio.run(rows_()))

    @contextmanager
    def absent_integrator(self) -> Iterator[None]:
        """Hold the right to integrate, and do nothing."""
        lease = SqlLease(
            self.installation.database_url,
            name=INTEGRATION,
            holder="absent/1",
            seconds=3600,
            clock=time.time,  # noqa: TID251 - a root of its own
        )
        with closing(lease):
            assert asyncio.run(lease.hold())
            yield
            asyncio.run(lease.release())

    @contextmanager
    def tenant_store(self) -> Iterator[SqlTenantStore]:
        """Tenants and keys as the gateway's machine reads and writes them."""
        with closing(open_tenant_store(self.installation)) as store:
            yield store

    def append(self, entry_type: EntryType, fields: dict) -> None:
        """Add an entry as a command does."""
        with closing(SqlAuditStore(self.installation.database_url)) as log:
            append_entry(log, entry_type, fields, origin=ORIGIN, clock=time.time)  # noqa: TID251 - a root

    def change_tenants(self, edit: Edit) -> None:
        """Change tenants and keys as a command does, with entries."""

        async def record(entry_type: EntryType, **fields) -> None:
            self.append(entry_type, fields)

        with self.tenant_store() as store:
            asyncio.run(Registrar(store=store, record=record).apply(edit, actor="cli:root"))

    def start_tenants(self) -> None:
        """What a start does about tenants and keys; raises TenantsUnavailableError."""

        async def record(entry_type: EntryType, **fields) -> None:
            self.append(entry_type, fields)

        with self.tenant_store() as store, closing(SqlAuditStore(self.installation.database_url)) as log:
            registrar = Registrar(store=store, record=record)
            asyncio.run(
                seal_upgraded(
                    registrar, store, log, continues=True, actor="cli:root", clock=lambda: 1_800_000_000.0
                )
            )
            store.read()

    def export(self, name: str) -> Path:
        """Export the log for an auditor."""
        directory = self.directory / name
        store = SqlAuditStore(self.installation.database_url)
        payloads = SqlPayloadStore(self.installation.database_url)
        try:
            export_log(store, directory, vkey=self.vkey)
            export_payloads(payloads, directory)
        finally:
            store.close()
            payloads.close()
        return directory

    def data_keys(self) -> dict[str, str]:
        """
        The keys to the archived prompts, as they are handed to an auditor who may read them.

        Raises:
            AuditVerificationError: one of them was altered.
        """
        rows = self.rows("SELECT request_id, part, wrapped_key FROM audit_payloads")
        keys = {f"{row['request_id']}/{row['part']}": row["wrapped_key"] for row in rows}
        return {name: b64encode(unwrap(key, WRAPPING_KEY)).decode() for name, key in keys.items()}

    def _keep(self, request_id: str) -> dict:
        """Seal and keep a prompt; return what its entry says about it."""
        where = place(self.settings.audit.origin, request_id, Part.REQUEST)
        prompt = f"the prompt of {request_id}".encode()
        sealed, commitment = seal(prompt, where, WRAPPING_KEY, random_bytes=secrets.token_bytes)
        payloads = SqlPayloadStore(self.installation.database_url)
        try:
            payloads.add(
                [
                    Payload(
                        request_id=request_id,
                        part=Part.REQUEST,
                        tenant="acme",
                        key_id=WRAPPING_KEY_ID,
                        sealed=sealed,
                        time="2026-11-21T00:00:00.000Z",
                    )
                ]
            )
        finally:
            payloads.close()
        return {
            "content_mode": "encrypted",
            "payload_commitment": commitment,
            "payload_digest": sealed.digest,
            "payload_key": WRAPPING_KEY_ID,
        }

    def checkpoint(self) -> str:
        """The newest checkpoint, as anyone may have it."""
        return self.rows("SELECT note FROM audit_checkpoints ORDER BY size DESC LIMIT 1")[0]["note"]

    def have_stamped(self, authority: TimestampAuthority) -> None:
        """Have the newest checkpoint time-stamped."""
        token = authority.stamp(parse_note(self.checkpoint()).text.encode())
        with closing(SqlAuditStore(self.installation.database_url)) as store:
            stamp = Timestamp(size=latest_text(store)[1], token=token, time=0)
            Timestamps(store.database).save(stamp)

    def have_cosigned(self, witness: Witness) -> bool:
        """Ask a witness for its cosignature of the newest checkpoint, with the best proof there is."""
        note = self.checkpoint()
        new = parse_body(parse_note(note).text).size
        answer = witness.add_checkpoint(encode_request(AddCheckpoint(old=0, proof=(), note=note)))
        if answer.status == CONFLICT:  # it says at which size it stands
            old = int(answer.text)
            rows = self.rows("SELECT idx, leaf_hash FROM audit_leaves ORDER BY idx")
            hashes = [row["leaf_hash"] for row in rows]
            proof = consistency_proof(hashes, old, new) if 0 < old < new <= len(hashes) else []
            if self.rows("SELECT * FROM audit_disposal"):
                with closing(SqlAuditStore(self.installation.database_url)) as store:
                    proof = HashTree(new, store.hashes).consistency_proof(old)
            request = AddCheckpoint(old=old, proof=tuple(proof), note=note)
            answer = witness.add_checkpoint(encode_request(request))
        return answer.status == OK

    def rows(self, query: str, **values) -> list[dict]:
        """Return what a query finds."""
        with self.engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(query), values).mappings()]

    def run(self, *statements: str, **values) -> None:
        """Run statements in one transaction."""
        with self.engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement), values)

    def drop_triggers(self) -> None:
        """Drop every trigger there is."""
        dialect = self.engine.dialect.name
        with self.engine.begin() as connection:
            for name, table in connection.execute(text(TRIGGERS[dialect])).all():
                on = f" ON {table}" if dialect == "postgresql" else ""
                connection.execute(text(f"DROP TRIGGER {name}{on}"))

    def back_up(self) -> Backup:
        """Copy every table and the sealed head."""
        with self.engine.connect() as connection:
            tables = {
                name: [dict(row) for row in connection.execute(table.select()).mappings()]
                for name, table in _tables(connection, LOG_TABLES + TENANT_TABLES).items()
            }
        return Backup(tables=tables, sealed_head=self.installation.sealed_head.read_bytes())

    def restore(self, backup: Backup) -> None:
        """Put the database back; the sealed head stays as it is."""
        with self.engine.begin() as connection:
            _refill(connection, LOG_TABLES, backup)

    def restore_tenants(self, backup: Backup) -> None:
        """Put tenants and keys back; the log stays as it is."""
        with self.engine.begin() as connection:
            _refill(connection, TENANT_TABLES, backup)

    def seal(self, backup: Backup) -> None:
        """Put the sealed head back."""
        self.installation.sealed_head.write_bytes(backup.sealed_head)

    def elsewhere(self, since: Backup | None, *requests: str) -> Backup:
        """
        Write another history with the stolen key, on the thief's own machine.

        Args:
            since: where it leaves the true history; None for the beginning.
            requests: what it records from there on.
        """
        thief = Scene(Path(tempfile.mkdtemp(dir=self.directory)))
        shutil.copyfile(self.installation.signing_key, thief.installation.signing_key)
        thief.installation.signing_key.chmod(0o600)
        try:
            if since is not None:
                SqlAuditStore(thief.installation.database_url).close()
                thief.drop_triggers()
                thief.restore(since)
                thief.seal(since)
            thief.serve(*requests)
            return thief.back_up()
        finally:
            thief.close()


def _new_witness(directory: Path, log_keys) -> Witness:
    home = WitnessHome(directory=directory)
    home.create("witness.test/one", log_keys, post_quantum=False)
    return home.open(clock=time.time)  # noqa: TID251 - a root of its own


LOG_TABLES = (
    "audit_leaves",
    "audit_tile_hashes",
    "audit_open_requests",
    "audit_head",
    "audit_checkpoints",
    "audit_timestamps",
)
TENANT_TABLES = ("tenants", "api_keys", "tenancy_generation")


def _tables(connection: Connection, names: Sequence[str]):
    """The tables as they are; the schema's own version is not part of the log."""
    metadata = MetaData()
    metadata.reflect(connection)
    return {name: table for name, table in metadata.tables.items() if name in names}


def _refill(connection: Connection, names: Sequence[str], backup: Backup) -> None:
    for name, table in _tables(connection, names).items():
        connection.execute(table.delete())
        if rows := backup.tables[name]:
            connection.execute(insert(table), rows)


class Past:
    """A log with a history: copies of earlier states, and checkpoints that others keep."""

    def __init__(self, directory: Path, url: str | None = None) -> None:
        prepare(directory)
        if url is not None:
            upgrade_database(url)
        self.scene = Scene(directory, url)
        trusted = parse_verifier_keys(self.scene.vkey)
        self.witness_of_monday, self.witness = (
            _new_witness(directory / name, trusted) for name in ("witness-of-monday", "witness")
        )
        """One that was never asked again, and one that saw every checkpoint."""
        self.archived = [new_entry_id(number, secrets.token_bytes(10)) for number in (1, 2)]
        """Requests whose prompts are kept, encrypted."""
        erased = new_entry_id(0, secrets.token_bytes(10))
        self.scene.serve("monday-1", "monday-2", archived=[*self.archived, erased], erased=[erased])
        self.scene.fill(2 * TILE_WIDTH)  # a start reads newer entries only
        (self.erased,) = self.scene.rows("SELECT * FROM audit_payloads WHERE request_id = :one", one=erased)
        """The row of a prompt that was erased, in a copy of the database."""
        self.scene.run("DELETE FROM audit_payloads WHERE request_id = :one", one=erased)
        keys = (ApiKey(key_id="abcd2345", digest="01" * 32), ApiKey(key_id="efgh2345", digest="23" * 32))
        self.scene.change_tenants(lambda _before: (Tenant(name="acme", keys=keys),))
        authority = TimestampAuthority(directory / "authority")
        self.scene.have_stamped(authority)
        self.monday = self.scene.back_up()
        self.held_on_monday = self._hold("held-on-monday")
        self.stream_of_monday, self.stream = (directory / name for name in ("stream-of-monday", "stream"))
        """What a SIEM had stored on Monday, and what it has now."""
        self.scene.forward(self.stream_of_monday)
        for witness in (self.witness_of_monday, self.witness):
            assert self.scene.have_cosigned(witness)
        self.scene.change_tenants(lambda before: revoke_key(before, "efgh2345", now=1_800_000_000))
        self.scene.serve("tuesday-1", "tuesday-2")
        self.scene.have_stamped(authority)
        self.tuesday = self.scene.back_up()
        self.scene.forward(self.stream)
        self.held = self._hold("held")
        """The newest checkpoint, which an auditor has kept."""
        assert self.scene.have_cosigned(self.witness)

    @classmethod
    def with_disposed_entries(cls, directory: Path, url: str | None = None) -> "Past":
        """Another log, which is years old: of its first entries it has disposed, as its rules allow."""
        past = cls.__new__(cls)
        prepare(directory)
        if url is not None:
            upgrade_database(url)
        past.scene = scene = Scene(directory, url)
        trusted = parse_verifier_keys(scene.vkey)
        past.witness_of_monday, past.witness = (
            _new_witness(directory / name, trusted) for name in ("witness-of-monday", "witness")
        )
        with closing(SqlAuditStore(scene.installation.database_url)) as store:
            log = aged(store, signer_in(directory), old=700, accepted=3, step_ms=DAY_MS, began_ms=0)
            assert dispose(log).below == 2 * TILE_WIDTH
            SealedHead(scene.installation.sealed_head).write(log.sign())
        scene.run(
            "INSERT INTO audit_writers (gateway, seen_at, epoch, instance, integrated_seq, integrated_hash) "
            "SELECT 'gateway', 0, 1, '', 3, leaf_hash FROM audit_leaves WHERE idx = 3"
        )
        scene.serve("monday-1", "monday-2")
        scene.fill(2 * TILE_WIDTH)  # a start reads newer entries only
        keys = (ApiKey(key_id="abcd2345", digest="01" * 32),)
        scene.change_tenants(lambda _before: (Tenant(name="acme", keys=keys),))
        scene.serve("tuesday-1")
        past.stream_of_monday, past.stream = (directory / name for name in ("stream-of-monday", "stream"))
        scene.forward(past.stream)
        past.held_on_monday = past.held = past._hold("held")
        assert scene.have_cosigned(past.witness)
        return past

    def copy(self, directory: Path, url: str | None = None) -> "Past":
        """The same past in another directory; a database at `url` is a copy already."""
        past = copy(self)
        shutil.copytree(self.scene.directory, directory)
        past.scene = Scene(directory, url)
        past.witness_of_monday, past.witness = (
            WitnessHome(directory=directory / name).open(clock=time.time)  # noqa: TID251 - a root of its own
            for name in ("witness-of-monday", "witness")
        )
        past.held_on_monday, past.held = (directory / path.name for path in (self.held_on_monday, self.held))
        past.stream_of_monday, past.stream = (
            directory / path.name for path in (self.stream_of_monday, self.stream)
        )
        return past

    def _hold(self, name: str) -> Path:
        path = self.scene.directory / name
        path.write_text(self.scene.checkpoint(), encoding="utf-8")
        return path
