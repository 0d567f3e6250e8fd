"""A log that moves to another database is the same log: every earlier proof still verifies."""

import secrets
import time

import pytest

from appliance.audit import verify
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log, export_receipt
from appliance.audit.integration import accept_after
from appliance.audit.merkle import CompactRange
from appliance.audit.migrate import copy_log
from appliance.audit.pending import EntryMaker
from appliance.audit.pending_rows import Writing
from appliance.audit.store import Head, SqlAuditStore
from appliance.audit.timestamps.store import Timestamp, Timestamps
from appliance.audit.timestamps.timestamping import latest_text
from appliance.errors import AuditUnavailableError, AuditVerificationError, ConfigurationError
from appliance.infra.schema import upgrade_database
from tests.audit_log import ORIGIN, intent, outcome, prepare, signer_in
from tests.timestamp_authority import TimestampAuthority
from tests.writer_process import open_gateway

REQUESTS = 40


def _nothing(_done, _total):
    """Show no progress."""


@pytest.fixture
async def written(tmp_path, open_store):
    """A log on SQLite with checkpoints of several sizes; its directory and URL."""
    directory = tmp_path / "appliance"
    prepare(directory)
    url = f"sqlite:///{directory / 'audit.db'}"
    async with open_gateway(
        directory, open_store(url), "one", checkpoint_seconds=3600, checkpoint_entries=10
    ) as log:
        for number in range(REQUESTS):
            await log.append(EntryType.REQUEST_INTENT, **intent(f"r{number}"))
            await log.append(EntryType.REQUEST_OUTCOME, **outcome(f"r{number}"))
    return directory, url


def _exit_code(store, directory, export, held):
    """The verdict of an auditor who kept a checkpoint from before the move."""
    vkey = signer_in(directory).vkey
    export_log(store, export, vkey=vkey)
    kept = export.with_suffix(".held")
    kept.write_text(held)
    return verify.main([str(export), "--key", vkey, "--held", str(kept)])


async def test_a_log_is_the_same_after_moving_to_postgresql_and_back(
    written, postgres, tmp_path, open_store, execute
):
    """Receipts, checkpoints and time stamps from before verify, payloads are there, and the log continues."""
    authority = TimestampAuthority(tmp_path / "authority")
    directory, url = written
    execute(
        url,
        "INSERT INTO audit_payloads VALUES ('r1', 'request', 'acme', 'k', x'00ff', x'01', x'02', 'a time')",
    )
    before = open_store(url)
    held = before.latest_checkpoint().note
    text, size = latest_text(before)
    stamp = Timestamp(size=size, token=authority.stamp(text.encode()), time=7)
    Timestamps(before.database).save(stamp)
    leaf, receipt = export_receipt(before, 7)
    there, back = postgres.new_database(), f"sqlite:///{tmp_path / 'back.db'}"
    upgrade_database(there)
    seen = []
    copy_log(url, there, progress=lambda done, total: seen.append((done, total)))
    copy_log(there, back, progress=_nothing)
    assert seen[0] == (0, before.head().size)
    assert seen[-1] == (before.head().size,) * 2
    for number, target in enumerate((there, back)):
        store = open_store(target)
        assert store.head() == before.head()
        assert store.hashes(0, 0, 10_000) == before.hashes(0, 0, 10_000)
        assert export_receipt(store, 7) == (leaf, receipt)
        assert list(Timestamps(store.database).all()) == [stamp]
        with store._engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT * FROM audit_payloads").all()
        assert [tuple(row) for row in rows] == [
            ("r1", "request", "acme", "k", b"\x00\xff", b"\x01", b"\x02", "a time")
        ]
        async with open_gateway(directory, store, "one") as log:
            await log.append(EntryType.REQUEST_INTENT, **intent(f"after-{number}"))
        # The second copy was made before the first one grew: each is checked against what was held then.
        assert _exit_code(store, directory, tmp_path / f"export{number}", held) == verify.ExitCode.VALID
        (directory / "one.head").write_text(held)


async def test_a_log_with_entries_that_wait_to_be_integrated_is_not_copied(
    postgres_url, tmp_path, open_store
):
    """SQLite has no integrator: they would be lost.  Neither are entries accepted during the copy."""
    prepare(tmp_path)
    store = open_store(postgres_url)
    found = store.register(Writing(gateway="one", instance="killed"), 0.0)
    maker = EntryMaker(origin=ORIGIN, clock=lambda: 1e9, random_bytes=secrets.token_bytes, gateway="one")
    pending = maker.make(EntryType.REQUEST_INTENT, intent("a"))

    def accept(_done=0, _total=0):
        if not store.accepted_leaves():
            store.accept(found.writing, accept_after(found.end, [pending], "one", found.writing.epoch))

    for number, progress in enumerate((accept, _nothing)):
        with pytest.raises(AuditUnavailableError, match=r"written to while|wait to be integrated"):
            copy_log(postgres_url, f"sqlite:///{tmp_path / f'{number}.db'}", progress=progress)
    async with open_gateway(tmp_path, store, "one"):
        pass
    copy_log(postgres_url, f"sqlite:///{tmp_path / 'copy.db'}", progress=_nothing)
    (leaf,) = open_store(f"sqlite:///{tmp_path / 'copy.db'}").leaf_by_request("a")[:1]
    assert (leaf.index, leaf.type) == (0, EntryType.REQUEST_INTENT)


def _count(url, table):
    store = SqlAuditStore(url)
    with store._engine.connect() as connection:
        count = connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar()
    store.close()
    return count


async def test_a_target_with_anything_in_it_is_refused(written, url, open_store):
    """Two logs in one database would be neither."""
    _, source = written
    open_store(url).beat("somebody", time.time())  # noqa: TID251 - a root of its own
    with pytest.raises(ConfigurationError, match=r"audit_writers.*empty database"):
        copy_log(source, url, progress=_nothing)
    assert _count(url, "audit_leaves") == 0


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE audit_leaves SET leaf = replace(leaf, 'acme', 'evil') WHERE idx = 5",
        "DELETE FROM audit_leaves WHERE idx = 5",
        "UPDATE audit_leaves SET type = 'audit.read' WHERE idx = 5",
        "UPDATE audit_leaves SET request_id = 'other' WHERE idx = 5",
        "UPDATE audit_head SET root = zeroblob(32)",
        "UPDATE audit_head SET size = size - 1",
        "UPDATE audit_checkpoints SET size = size - 1 WHERE size = (SELECT min(size) FROM audit_checkpoints)",
        "UPDATE audit_checkpoints SET note = (SELECT max(note) FROM audit_checkpoints)",
    ],
)
async def test_a_damaged_log_is_not_copied_as_if_it_were_whole(written, tmp_path, execute, damage):
    """What does not agree with itself ends the copy with the reason."""
    _, source = written
    for operation in ("update", "delete"):
        execute(source, f"DROP TRIGGER audit_leaves_no_{operation}")
    execute(source, damage)
    with pytest.raises(AuditVerificationError):
        copy_log(source, f"sqlite:///{tmp_path / 'copy.db'}", progress=_nothing)


async def test_a_log_that_is_written_to_meanwhile_is_not_copied(written, tmp_path, open_store):
    """A copy that lacks the newest entries must not pass for the log."""
    directory, source = written
    store = open_store(source)

    def write(done, total):
        if done == total and store.head().size == total:
            leaf = store.leaves(0, 1)[0]
            new = type(leaf)(
                index=total, leaf=leaf.leaf, leaf_hash=leaf.leaf_hash, type=leaf.type, request_id=None
            )
            store.append([new], expected=store.head(), new=_grown(store, leaf.leaf_hash))

    with pytest.raises(AuditUnavailableError, match="written to while it was copied"):
        copy_log(source, f"sqlite:///{tmp_path / 'copy.db'}", progress=write)
    assert directory.exists()


def _grown(store, leaf_hash):
    tree = CompactRange()
    for known in store.hashes(0, 0, 10_000):
        tree.append(known)
    tree.append(leaf_hash)
    return Head.of(tree)
