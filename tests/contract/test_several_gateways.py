"""Several gateways write one log on PostgreSQL: one history, every request ended once, no fork signed."""

import asyncio
import json
import re
import secrets
import time

import pytest
from sqlalchemy import create_engine

from appliance.audit import verify
from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note, verify_checkpoint
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.integration import accept_after
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import EntryMaker
from appliance.audit.pending_rows import INTEGRATION, Writing
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.errors import AuditEntryError, AuditForkError, AuditRollbackError
from appliance.infra.lease import SqlLease
from tests.audit_log import ORIGIN, intent, outcome
from tests.fakes import until
from tests.writer_process import WriterProcess, assert_kept, open_gateway

INTENT, OUTCOME, READ = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME, EntryType.AUDIT_READ
READING = {"actor": "cli:root", "operation": "tail"}


@pytest.fixture
def directory(tmp_path):
    create_signing_key(tmp_path / "audit.key")
    return tmp_path


@pytest.fixture
def gateway(directory, postgres_url, open_store):
    """Open the log as a gateway of that name, with its own store."""

    def open_(name, **settings):
        return open_gateway(directory, open_store(postgres_url), name, **settings)

    return open_


@pytest.fixture
def signer(directory):
    return load_signing_key(directory / "audit.key", ORIGIN)


@pytest.fixture
def entries(postgres_url, open_store):
    """Type and fields of everything in the log."""
    store = open_store(postgres_url)

    def entries_():
        return [(leaf.type, decode(leaf.leaf).fields) for leaf in store.leaves(0, 100_000)]

    return entries_


@pytest.fixture
def report(postgres_url, open_store, directory, signer):
    """The report of an auditor on the whole log, and on every stored checkpoint."""

    def report_(url=postgres_url):
        store = open_store(url)
        tree, roots = CompactRange(), {}
        for leaf_hash in store.hashes(0, 0, 100_000):
            tree.append(leaf_hash)
            roots[tree.size] = tree.root()
        engine = create_engine(url)
        with engine.connect() as connection:
            notes = connection.exec_driver_sql("SELECT note FROM audit_checkpoints").scalars().all()
        engine.dispose()
        for note in notes:
            checkpoint = verify_checkpoint(note, signer.verifier_key)
            assert checkpoint.root == roots[checkpoint.size]
        export = directory / f"export-{tree.size}"
        assert export_log(store, export, vkey=signer.vkey) == tree.size
        return verify.verify_export(export, verify.parse_key(signer.vkey), None)

    return report_


@pytest.fixture
def verdict(report):
    """The verdict of an auditor who finds no problem."""

    def verdict_(*url):
        found = report(*url)
        assert found.problems == []
        return found.exit_code

    return verdict_


async def durable(log, kind, **fields):
    """As a request does: it waits until the entry is durable, not until it has an index."""
    return await log.confirm(log.submit(kind, **fields))


def _ended(entries, kind=EntryType.REQUEST_ABORTED):
    return {fields["request_id"]: fields.get("reason") for type_, fields in entries if type_ == kind}


async def test_gateways_take_turns_and_sign_one_history(gateway, entries, verdict):
    """The slower gateway follows the other's entries, and every checkpoint of both is of one log."""
    async with gateway("one") as one, gateway("two") as two:
        for number in range(20):
            for name, log in (("one", one), ("two", two)):
                await durable(log, INTENT, **intent(f"{name}-{number}"))
                await durable(log, OUTCOME, **outcome(f"{name}-{number}"))
        both = [log.append(INTENT, **intent(f"at-once-{name}")) for name, log in (("1", one), ("2", two))]
        await asyncio.gather(*both)
        await one.append(OUTCOME, **outcome("at-once-1"))
        await two.append(OUTCOME, **outcome("at-once-2"))
        await until(lambda: one.state().size == two.state().size == one.state().checkpoint_size)
        assert one.state().root == two.state().root
    begun = [fields["gateway"] for type_, fields in entries() if type_ == INTENT]
    assert begun.count("one") == begun.count("two") == 21
    assert verdict() == verify.ExitCode.VALID


async def test_starting_gateway_does_not_end_requests_of_others(gateway, entries, verdict):
    """Only what it began itself, and what those began who are gone, is ended at a start."""
    async with gateway("one") as one:
        await one.append(INTENT, **intent("mine"))
        async with gateway("two") as two:
            assert two.state().open_requests == 0
        async with gateway("two"):
            pass
        assert _ended(entries()) == {}
        await one.append(OUTCOME, **outcome("mine"))
    assert verdict() == verify.ExitCode.VALID


async def test_the_requests_of_a_gateway_that_died_are_ended_by_another(
    gateway, directory, postgres_url, open_store, entries, verdict
):
    """After a kill its requests get an end after some time, and only those."""
    dead = WriterProcess(directory, postgres_url, "dead", "d")
    dead.wait_for(20)
    async with gateway("alive", gateway_dead_seconds=1.5) as alive:
        await alive.append(INTENT, **intent("running"))
        dead.kill()
        store = SqlAuditStore(postgres_url)
        await until(lambda: store.open_intents() == ["running"])
        store.close()
        aborted = _ended(entries())
        assert all(request_id.startswith("d-") for request_id in aborted)
        assert set(aborted.values()) <= {"gateway_stopped"}
        await alive.append(OUTCOME, **outcome("running"))
    assert_kept(dead.acknowledged, open_store(postgres_url).leaves(0, 100_000))
    assert verdict() == verify.ExitCode.VALID


async def test_gateway_declared_dead_stops_and_no_request_ends_twice(gateway, entries, verdict):
    """It was only slow: others have ended its requests, so it accepts nothing more until it starts again."""
    async with gateway("hasty", gateway_dead_seconds=1.5):
        with pytest.raises(AuditForkError, match="declared it dead"):  # noqa: PT012 - on leaving the block
            async with gateway("slow", gateway_dead_seconds=3600) as slow:
                await slow.append(INTENT, **intent("a"))
                await durable(slow, INTENT, **intent("b"))
                await until(lambda: set(_ended(entries())) == {"a", "b"})
                with pytest.raises(AuditForkError, match="start this gateway again"):
                    await durable(slow, OUTCOME, **outcome("a"))
        async with gateway("slow", gateway_dead_seconds=1.5) as slow:
            assert slow.state().open_requests == 0
            with pytest.raises(AuditEntryError):
                await slow.append(OUTCOME, **outcome("b"))
            await slow.append(INTENT, **intent("c"))
            await slow.append(OUTCOME, **outcome("c"))
    assert _ended(entries(), OUTCOME) == {"c": None}
    assert verdict() == verify.ExitCode.VALID


async def test_no_gateway_follows_a_rewritten_history(gateway, execute, postgres_url):
    """The database owner changes entries that others will read: the gateway stops and signs nothing."""
    with pytest.raises(AuditForkError, match="is not the log of size"):  # noqa: PT012 - on leaving the block
        async with gateway("one", checkpoint_seconds=0.05) as one:
            await one.append(READ, **READING)
            await until(lambda: one.state().checkpoint_size == 2)
            execute(postgres_url, "UPDATE audit_head SET root = decode(repeat('00', 32), 'hex')")
            with pytest.raises(AuditForkError):
                await one.append(READ, **READING)
            assert one.state().checkpoint_size == 2


async def test_altered_log_is_not_signed_even_if_idle(gateway, execute, postgres_url):
    """The head is read back before every checkpoint, the heartbeat's included."""
    with pytest.raises(AuditForkError):  # noqa: PT012 - on leaving the block
        async with gateway("one", heartbeat_seconds=0.1) as one:
            await until(lambda: one.state().checkpoint_size == 1)
            execute(postgres_url, "UPDATE audit_head SET size = 0")
            await asyncio.wait_for(one.wait_failed(), 30)


async def test_a_new_gateway_joins_and_a_known_one_must_bring_its_sealed_head(
    gateway, directory, entries, verdict
):
    """No sealed head is right the first time; later it means that something was removed."""
    async with gateway("one"):
        pass
    async with gateway("two"):
        pass
    (directory / "two.head").unlink()
    with pytest.raises(AuditRollbackError, match="sealed head is missing"):
        async with gateway("two"):
            pytest.fail("opened without its sealed head")
    assert [fields["gateway"] for type_, fields in entries() if type_ == "audit.started"] == ["one", "two"]
    assert verdict() == verify.ExitCode.VALID


async def test_gateways_that_start_on_an_empty_log_together_can_both_come_back(gateway, directory, verdict):
    """A head is sealed before a gateway is known, so one that crashed at once is not locked out."""
    async with gateway("one", checkpoint_seconds=60), gateway("two", checkpoint_seconds=60):
        sealed = {name: (directory / f"{name}.head").read_text() for name in ("one", "two")}
    for name, note in sealed.items():
        (directory / f"{name}.head").write_text(note)
        async with gateway(name):
            pass
    assert verdict() == verify.ExitCode.VALID


async def test_a_second_gateway_of_the_same_name_stops_the_first(gateway, entries):
    """They would end each other's requests: the running one detects it, and stops for good."""
    with pytest.raises(AuditForkError, match="under this gateway's name"):  # noqa: PT012 - on leaving
        async with gateway("one") as first, gateway("one") as second:
            with pytest.raises(AuditForkError, match=r"data directory or an audit\.gateway of its own"):
                await first.append(READ, **READING)
            await second.append(READ, **READING)
    assert [type_ for type_, _ in entries()].count("audit.started") == 2


def test_processes_that_write_at_the_same_time_leave_one_valid_log(
    directory, postgres_url, open_store, verdict
):
    """Three gateways on one database: every entry is at the index that was acknowledged."""
    gateways = [WriterProcess(directory, postgres_url, f"g{number}", f"g{number}") for number in range(3)]
    for one in gateways:
        one.wait_for(120)
    for one in gateways:
        assert one.close() == (0, "")
        assert one.refused == 0
    leaves = open_store(postgres_url).leaves(0, 1_000_000)
    assert [leaf.index for leaf in leaves] == list(range(len(leaves)))
    assert_kept([entry for one in gateways for entry in one.acknowledged], leaves)
    assert verdict() == verify.ExitCode.VALID


@pytest.fixture
async def nobody_integrates(postgres_url):
    """Another process holds the lease and does nothing; yields it."""
    lease = SqlLease(
        postgres_url,
        name=INTEGRATION,
        holder="absent/1",
        seconds=3600,
        clock=time.time,  # noqa: TID251 - a root of its own
    )
    assert await lease.hold()
    yield lease
    lease.close()


async def test_entries_are_durable_before_another_gateway_integrates_them(
    gateway, nobody_integrates, postgres_url, open_store, entries, verdict
):
    """Requests do not wait for it; entries that need an index do, and a killed gateway has lost nothing."""
    store = open_store(postgres_url)
    async with gateway("one") as one:
        begun = await durable(one, INTENT, **intent("a"))
        ended = await durable(one, OUTCOME, **outcome("a"))
        assert (begun.known_index, ended.known_index, entries()) == (None, None, [])
        reading = asyncio.create_task(one.append(READ, **READING))
        await until(lambda: len(store.accepted_leaves()) == 4)
        assert not reading.done()
        await nobody_integrates.release()
        receipt = await reading
        assert (begun.known_index, ended.known_index, receipt.index) == (1, 2, 3)
        await until(lambda: one.state().checkpoint_size == 4)
    assert [type_ for type_, _ in entries()] == ["audit.started", INTENT, OUTCOME, READ]
    assert [fields["sequence"] for _, fields in entries()] == [1, 2, 3, 4]
    assert store.accepted_leaves() == []
    assert verdict() == verify.ExitCode.VALID


@pytest.mark.parametrize(
    "attack",
    [
        "DELETE FROM audit_pending WHERE seq = 2",
        "DELETE FROM audit_pending",
        "UPDATE audit_pending SET leaf = leaf || '.' WHERE seq = 2",
        "UPDATE audit_pending SET leaf = '.', leaf_hash = sha256('\\x002e') WHERE seq = 2",
    ],
)
async def test_a_gateway_stops_if_an_entry_it_accepted_is_removed_or_changed(
    gateway, nobody_integrates, execute, postgres_url, attack
):
    """By the owner of the database, before it was integrated."""
    execute(postgres_url, "DROP TRIGGER audit_pending_no_update ON audit_pending")
    with pytest.raises(AuditForkError, match="neither in the log nor waiting"):  # noqa: PT012 - on leaving
        async with gateway("one") as one:
            await durable(one, INTENT, **intent("a"))
            execute(postgres_url, attack)
            await asyncio.wait_for(one.wait_failed(), 30)


async def test_a_gateway_stops_if_its_entries_are_not_integrated_in_time(
    gateway, nobody_integrates, monkeypatch
):
    """Twice the lease and the time of a takeover; until then it serves."""
    monkeypatch.setattr("appliance.audit.shared_writer.TAKEOVER_SECONDS", 0.5)
    with pytest.raises(AuditForkError, match="did not come into the audit log"):  # noqa: PT012 - on leaving
        async with gateway("one", gateway_dead_seconds=1.0) as one:
            await durable(one, READ, **READING)
            await asyncio.wait_for(one.wait_failed(), 30)


async def test_a_gateway_stops_if_another_entry_was_integrated_in_place_of_its_own(
    gateway, nobody_integrates, execute, postgres_url
):
    """Moved into the log by the owner, with head and hashes made to fit: the gateway knows its own."""
    with pytest.raises(AuditForkError, match="neither in the log nor waiting"):  # noqa: PT012 - on leaving
        async with gateway("one") as one:
            leaf = json.dumps({"log": ORIGIN, "type": "audit.read"}).encode()
            tree = CompactRange()
            tree.append(hash_leaf(leaf))
            execute(
                postgres_url,
                "INSERT INTO audit_leaves (idx, leaf, leaf_hash, type) "
                f"VALUES (0, '\\x{leaf.hex()}', '\\x{hash_leaf(leaf).hex()}', 'audit.read');"
                f"UPDATE audit_head SET size = 1, root = '\\x{tree.root().hex()}', "
                f"frontier = '\\x{tree.root().hex()}'; DELETE FROM audit_pending;"
                "UPDATE audit_writers SET integrated_seq = 1",
            )
            await asyncio.wait_for(one.wait_failed(), 30)


async def test_a_gateway_whose_lease_is_taken_accepts_and_takes_it_back(
    gateway, postgres_url, execute, open_store, entries, verdict
):
    """The one that integrates is fenced off in the middle: no entry is refused, lost or written twice."""
    store = open_store(postgres_url)
    async with gateway("one", gateway_dead_seconds=3.0) as one:
        first = await durable(one, INTENT, **intent("a"))
        assert first.known_index == 1
        execute(
            postgres_url,
            "UPDATE control_lease SET holder = 'absent/1', epoch = epoch + 1, expires_at = 'infinity' "
            f"WHERE name = '{INTEGRATION}'",
        )
        second = await durable(one, OUTCOME, **outcome("a"))
        third = await durable(one, INTENT, **intent("b"))
        assert (second.known_index, third.known_index, store.head().size) == (None, None, 2)
        execute(postgres_url, f"UPDATE control_lease SET holder = '' WHERE name = '{INTEGRATION}'")
        await until(lambda: third.known_index is not None)
        await durable(one, OUTCOME, **outcome("b"))
    assert [type_ for type_, _ in entries()] == ["audit.started", INTENT, OUTCOME, INTENT, OUTCOME]
    assert verdict() == verify.ExitCode.VALID


async def test_a_checkpoint_that_contradicts_the_log_stops_every_gateway_that_reads_it(
    gateway, execute, postgres_url, directory, signer
):
    """Gateways that do not sign compare what others signed with the tree they know, and seal it."""
    contradicts = "is not of the log that this gateway knows"
    with pytest.raises(AuditForkError, match=contradicts):  # noqa: PT012 - on leaving the block
        async with gateway("one", checkpoint_seconds=3600, checkpoint_entries=3):
            with pytest.raises(AuditForkError, match=contradicts):  # noqa: PT012 - on leaving
                async with gateway("two") as two:
                    await two.append(READ, **READING)
                    await until(lambda: two.state().checkpoint_size == 3)
                    sealed = (directory / "two.head").read_text()
                    assert verify_checkpoint(sealed, signer.verifier_key).size == 3
                    await two.append(READ, **READING)
                    forged = Checkpoint(origin=ORIGIN, size=4, root=bytes(32))
                    note = sign_note(encode_body(forged), [signer])
                    execute(
                        postgres_url,
                        "DELETE FROM audit_checkpoints; INSERT INTO audit_checkpoints (size, note, time) "
                        f"VALUES (4, '{note}', '2026-11-20T12:00:00.000Z')",
                    )
                    await asyncio.wait_for(two.wait_failed(), 30)


async def test_entries_behind_a_hole_come_into_the_log_and_the_hole_is_reported(
    gateway, postgres_url, execute, open_store, entries, report
):
    """
    The owner of the database removed an accepted entry of a dead gateway and changed another.

    That gateway does not start until another has integrated what is left; then it continues.
    """
    async with gateway("one"):
        pass
    store = open_store(postgres_url)
    long_ago = time.time() - 100  # noqa: TID251 - as the writer's
    found = store.register(Writing(gateway="one", instance="killed"), long_ago)
    maker = EntryMaker(origin=ORIGIN, clock=lambda: long_ago, random_bytes=secrets.token_bytes, gateway="one")
    taken = [
        maker.make(INTENT, intent("a")),
        maker.make(OUTCOME, outcome("a")),
        maker.make(INTENT, intent("b")),
        maker.make(OUTCOME, outcome("b")),
        maker.make(INTENT, intent("c")),
    ]
    store.accept(found.writing, accept_after(found.end, taken, "one", found.writing.epoch))
    execute(postgres_url, "DROP TRIGGER audit_pending_no_update ON audit_pending")
    execute(postgres_url, "DELETE FROM audit_pending WHERE seq = 2")
    execute(
        postgres_url,
        "UPDATE audit_pending SET leaf = '.', leaf_hash = sha256('\\x002e') WHERE seq = 4",
    )
    broken = []
    with pytest.raises(AuditRollbackError, match="accepted entry 2 is missing"):
        async with gateway("one"):
            pass
    async with gateway("two", gateway_dead_seconds=1.5, on_break=lambda *what: broken.append(what)):
        await until(lambda: set(_ended(entries())) == {"a", "b", "c"})
        async with gateway("one", gateway_dead_seconds=1.5) as one:
            await one.append(READ, **READING)
    assert broken == [("one", "accepted entry 2 is missing")]
    begun = [fields["request_id"] for type_, fields in entries() if type_ == INTENT]
    assert (begun, _ended(entries(), OUTCOME)) == (["a", "b", "c"], {})
    with store._reading() as connection:
        assert connection.exec_driver_sql("SELECT seq FROM audit_pending").scalars().all() == [4]
    assert store.accepted_leaves() == []
    found = report()
    assert found.exit_code == verify.ExitCode.INVALID
    assert [re.sub(r"^entry \d+ is ", "", problem) for problem in found.problems] == [
        "number 3 of those that gateway one accepted, and 1 before it are missing",
        "number 5 of those that gateway one accepted, and 1 before it are missing",
    ]
