"""The log acknowledges only what is durable, fails closed, and never forks or goes back."""

import asyncio
import shutil
import sqlite3
from contextlib import nullcontext
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit import verify
from appliance.audit.checkpoint import verify_checkpoint
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import TILE_WIDTH
from appliance.audit.signing_keys import Signer
from appliance.audit.store import SqlAuditStore
from appliance.audit.writer import BEATS
from appliance.errors import (
    AuditEntryError,
    AuditForkError,
    AuditRollbackError,
    AuditUnavailableError,
    AuditVerificationError,
)
from tests.grower import Grower

pytestmark = pytest.mark.asyncio

INTENT, OUTCOME, READ = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME, EntryType.AUDIT_READ
READING = {"actor": "cli:root", "operation": "tail"}


@pytest.fixture
def verdict(export, signer):
    """Verify everything a store holds, as an auditor would; return the verdict."""

    def verdict_(store, name="final"):
        report = verify.verify_export(export(store, name), verify.parse_key(signer.vkey), None)
        assert not report.problems
        return report.exit_code

    return verdict_


def _types(store):
    return [leaf.type for leaf in store.leaves(0, 10_000)]


def _reasons(store):
    return [
        (decode(leaf.leaf).fields["request_id"], decode(leaf.leaf).fields["reason"])
        for leaf in store.leaves(0, 10_000)
        if leaf.type == EntryType.REQUEST_ABORTED
    ]


async def _until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["memory_store", "sql_store"])
async def test_a_log_that_was_used_and_closed_is_valid(request, kind, open_log, intent, outcome, verdict):
    """The whole path: open, record, close, export, verify."""
    store = request.getfixturevalue(kind)
    async with open_log(store) as log:
        for number in range(3):
            await log.append(INTENT, **intent(f"r{number}"))
            receipt = await log.append(OUTCOME, **outcome(f"r{number}"))
            assert decode(store.leaves(receipt.index, receipt.index + 1)[0].leaf).id == receipt.entry_id
        assert log.size == 7
    assert _types(store)[0] == EntryType.AUDIT_STARTED
    assert store.latest_checkpoint().size == 7
    assert verdict(store) == verify.ExitCode.VALID


async def test_an_append_returns_only_once_the_entry_is_durable(memory_store, open_log):
    """Until the disk has answered, the log does not answer."""
    async with open_log(memory_store) as log:
        memory_store.gate.clear()
        pending = log.submit(READ, **READING)
        await asyncio.sleep(0.05)
        assert not pending.done()
        assert log.state().queued == 1
        memory_store.gate.set()
        receipt = await log.confirm(pending)
        assert memory_store.stored[receipt.index].type == READ


async def test_acknowledged_entry_is_visible_to_the_next_process(sql_store, open_log, tmp_path):
    """A second connection, without the first being closed, sees the entry."""
    async with open_log(sql_store) as log:
        receipt = await log.append(READ, **READING)
        other = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")
        assert other.leaves(receipt.index, receipt.index + 1)[0].type == READ
        other.close()


async def test_entries_that_wait_together_are_committed_together(memory_store, open_log, monkeypatch):
    """While one commit runs, the next batch gathers; a batch has its bound."""
    monkeypatch.setattr("appliance.audit.writer.COMMIT_ENTRIES", 8)
    seen = []
    async with open_log(memory_store, on_commit=lambda n, s: seen.append((n, s))) as log:
        memory_store.commits.clear()
        seen.clear()
        memory_store.gate.clear()
        pending = [log.submit(READ, **READING)]
        await asyncio.sleep(0.02)
        pending += [log.submit(READ, **READING) for _ in range(20)]
        memory_store.gate.set()
        receipts = [await log.confirm(one) for one in pending]
        assert [receipt.index for receipt in receipts] == list(range(1, 22))
        assert memory_store.commits == [1, 8, 8, 4]
        assert [count for count, _ in seen] == memory_store.commits
        assert all(seconds >= 0 for _, seconds in seen)
        assert log.state().last_commit_seconds == seen[-1][1]


async def test_a_commit_may_wait_for_more_entries(memory_store, open_log):
    """With `batch_seconds`, entries that come one after the other share a commit."""
    async with open_log(memory_store, batch_seconds=0.2) as log:
        memory_store.commits.clear()
        first = log.submit(READ, **READING)
        await asyncio.sleep(0.02)
        second = log.submit(READ, **READING)
        await asyncio.gather(first, second)
        assert memory_store.commits == [2]


async def test_a_full_queue_refuses_new_requests_and_still_ends_running_ones(
    memory_store, open_log, intent, outcome
):
    """What is refused was never accepted; what was accepted can always be closed."""
    async with open_log(memory_store, queue_entries=2) as log:
        await log.append(INTENT, **intent("running"))
        memory_store.gate.clear()
        waiting = [log.submit(INTENT, **intent("a"))]
        await asyncio.sleep(0.02)
        waiting.append(log.submit(INTENT, **intent("b")))
        with pytest.raises(AuditUnavailableError, match="waiting already"):
            log.submit(INTENT, **intent("refused"))
        waiting.append(log.submit(OUTCOME, **outcome("running")))
        memory_store.gate.set()
        await asyncio.gather(*waiting)
        with pytest.raises(AuditEntryError):
            log.submit(OUTCOME, **outcome("refused"))


async def test_a_disk_that_does_not_answer_is_unavailable(memory_store, open_log, intent):
    """The caller is released in time; the entry may yet become durable, and is then in the log."""
    async with open_log(memory_store, append_timeout_seconds=0.05) as log:
        memory_store.gate.clear()
        with pytest.raises(AuditUnavailableError, match=r"within 0\.05 s"):
            await log.append(INTENT, **intent("late"))
        memory_store.gate.set()
        await _until(lambda: memory_store.open_intents() == ["late"])
    assert _reasons(memory_store) == [("late", "gateway_stopped")]


async def test_a_cancelled_caller_cancels_no_entry(memory_store, open_log, intent, outcome):
    """Cancelling the wait does not cancel the entry, so the outcome still has its intent."""
    async with open_log(memory_store) as log:
        memory_store.gate.clear()
        pending = log.submit(INTENT, **intent("gone"))
        task = asyncio.create_task(log.confirm(pending))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        memory_store.gate.set()
        await log.append(OUTCOME, **outcome("gone"))
        assert (await log.confirm(pending)).index == 1
    assert _types(memory_store)[-2:] == [INTENT, OUTCOME]


async def test_a_store_failure_refuses_everything_that_waits_and_recovers(
    memory_store, open_log, intent, outcome, verdict
):
    """Their callers get errors, the next entry works, and the log stays valid and complete."""
    async with open_log(memory_store) as log:
        await log.append(INTENT, **intent("running"))
        memory_store.gate.clear()
        memory_store.fail_before.append(AuditUnavailableError("disk full"))
        failing = [log.submit(INTENT, **intent("a"))]
        await asyncio.sleep(0.02)
        failing += [log.submit(OUTCOME, **outcome("a")), log.submit(OUTCOME, **outcome("running"))]
        memory_store.gate.set()
        for error in await asyncio.gather(*failing, return_exceptions=True):
            assert isinstance(error, AuditUnavailableError)
            assert str(error) == "disk full"
        assert log.state().failure == "disk full"
        await log.append(INTENT, **intent("b"))
        await log.append(OUTCOME, **outcome("b"))
        assert log.state().failure is None
    # The outcome of `running` failed, and its caller gave up: the log closed it.
    assert _reasons(memory_store) == [("running", "entry_not_durable")]
    assert memory_store.leaf_by_request("a") == []
    assert verdict(memory_store) == verify.ExitCode.VALID


async def test_a_commit_that_happened_although_it_failed_is_found(
    memory_store, open_log, intent, outcome, verdict
):
    """The head is read before anything else is written: no fork, no index twice, no request left open."""
    async with open_log(memory_store) as log:
        memory_store.fail_after.append(AuditUnavailableError("connection lost"))
        with pytest.raises(AuditUnavailableError, match="connection lost"):
            await log.append(INTENT, **intent("a"))
        with pytest.raises(AuditEntryError, match="no open intent"):
            log.submit(OUTCOME, **outcome("a"))
        await log.append(INTENT, **intent("b"))
        await log.append(OUTCOME, **outcome("b"))
    assert _reasons(memory_store) == [("a", "entry_not_durable")]
    assert verdict(memory_store) == verify.ExitCode.VALID


async def test_a_commit_that_happens_long_after_it_failed_is_followed(
    memory_store, open_log, intent, outcome, verdict
):
    """A server that did not answer completes the commit later: it is noticed, and its request is ended."""
    late = []

    def delay(leaves, *, expected, new):
        if not late:
            late.append((leaves, expected, new))
            message = "connection lost"
            raise AuditUnavailableError(message)
        if len(late) == 1:
            late.append(None)
            type(memory_store).append(memory_store, late[0][0], expected=late[0][1], new=late[0][2])
        type(memory_store).append(memory_store, leaves, expected=expected, new=new)

    async with open_log(memory_store, gateway_dead_seconds=0.3) as log:
        memory_store.append = delay
        with pytest.raises(AuditUnavailableError, match="connection lost"):
            await log.append(INTENT, **intent("late"))
        await log.append(INTENT, **intent("b"))
        await log.append(OUTCOME, **outcome("b"))
        await _until(lambda: memory_store.open_intents() == [])
        assert _reasons(memory_store) == [("late", "entry_not_durable")]
    assert verdict(memory_store) == verify.ExitCode.VALID


async def test_outage_restarts_the_time_limit_of_silent_gateways(memory_store, open_log, intent):
    """They may have been cut off from the database, too: silence until then does not count."""
    beats, is_out = [], True

    def beat(gateway, now):
        if gateway == "mine":
            if is_out:
                message = "connection lost"
                raise AuditUnavailableError(message)
            beats.append(memory_store.open_intents())
        return {**type(memory_store).beat(memory_store, gateway, now), "other": now - 3600}

    async with open_log(memory_store, gateway="other", gateway_dead_seconds=3600) as other:
        await other.append(INTENT, **intent("theirs"))
        async with open_log(memory_store, gateway="mine", gateway_dead_seconds=0.3):
            memory_store.beat = beat
            await asyncio.sleep(0.5)
            is_out = False
            await _until(lambda: memory_store.open_intents() == [])
    assert _reasons(memory_store) == [("theirs", "gateway_stopped")]
    assert len(beats) >= BEATS - 1
    assert beats[BEATS - 2] == ["theirs"]


async def test_an_outcome_handed_over_during_recovery_is_not_mistaken_for_a_lost_one(
    memory_store, open_log, intent, outcome, verdict
):
    """A request that is being ended while the head is re-read gets its outcome, not an abort."""
    async with open_log(memory_store) as log:
        await log.append(INTENT, **intent("running"))
        memory_store.fail_before.append(AuditUnavailableError("disk full"))
        with pytest.raises(AuditUnavailableError):
            await log.append(READ, **READING)
        await log.append(OUTCOME, **outcome("running"))
    assert _reasons(memory_store) == []
    assert verdict(memory_store) == verify.ExitCode.VALID


async def test_a_store_that_cannot_be_read_after_a_failure_keeps_refusing_until_it_can(
    memory_store, open_log
):
    """Every entry meanwhile is refused; without any entry the log recovers by itself."""
    async with open_log(memory_store, checkpoint_seconds=0.05) as log:
        memory_store.fail_before.append(AuditUnavailableError("disk full"))
        memory_store.fail_reads += [AuditUnavailableError("still full")] * 2
        with pytest.raises(AuditUnavailableError, match="disk full"):
            await log.append(READ, **READING)
        with pytest.raises(AuditUnavailableError, match="still full"):
            await log.append(READ, **READING)
        await _until(lambda: log.state().failure is None)
        await log.append(READ, **READING)


async def test_request_recorded_twice_does_not_affect_its_batch(
    memory_store, open_log, intent, outcome, verdict
):
    """A reused request id costs its own request, not those committed together with it."""
    async with open_log(memory_store) as log:
        await log.append(INTENT, **intent("a"))
        await log.append(OUTCOME, **outcome("a"))
        memory_store.gate.clear()
        waiting = [log.submit(READ, **READING)]
        await asyncio.sleep(0.02)
        waiting += [
            log.submit(INTENT, **intent("b")),
            log.submit(INTENT, **intent("a")),
            log.submit(OUTCOME, **outcome("b")),
        ]
        memory_store.gate.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result).__name__ for result in results] == [
            "Receipt",
            "Receipt",
            "AuditEntryError",
            "Receipt",
        ]
    assert verdict(memory_store) == verify.ExitCode.VALID


async def test_a_malformed_entry_is_refused_at_once_and_harms_nothing(memory_store, open_log, intent):
    """The caller gets the error at the call; nothing is queued or opened."""
    async with open_log(memory_store) as log:
        with pytest.raises(AuditEntryError, match="unknown field"):
            log.submit(INTENT, **intent("a"), prompt="hello")
        await log.append(INTENT, **intent("a"), worker=None)
    assert "worker" not in decode(memory_store.leaf_by_request("a")[0].leaf).fields


async def test_another_writer_of_the_same_name_ends_this_one_for_good(
    sql_store, open_log, tmp_path, sealed_path
):
    """A gateway whose name is taken stops, fails every caller, and never writes again."""
    other = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")
    with pytest.raises(AuditForkError):  # noqa: PT012 - on leaving the block, too
        async with open_log(sql_store) as first:
            async with open_log(other) as second:
                await second.append(READ, **READING)
                watcher = asyncio.create_task(first.wait_failed())
                with pytest.raises(AuditForkError):
                    await first.append(READ, **READING)
                with pytest.raises(AuditForkError):
                    await first.append(READ, **READING)
                with pytest.raises(AuditForkError):
                    await watcher
                await second.append(READ, **READING)
            assert "another writer" in first.state().failure
    other.close()


async def test_two_gateways_on_one_file_write_one_log(
    sql_store, open_log, tmp_path, intent, outcome, verdict
):
    """Where the database takes turns anyway, a second process (a command) costs nothing."""
    other = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")
    async with open_log(sql_store, gateway="one") as one:
        await one.append(INTENT, **intent("a"))
        async with open_log(other, gateway="two") as two:
            await two.append(INTENT, **intent("b"))
            await one.append(INTENT, **intent("c"))
            await two.append(OUTCOME, **outcome("b"))
        await one.append(OUTCOME, **outcome("a"))
        await one.append(OUTCOME, **outcome("c"))
    other.close()
    assert _reasons(sql_store) == []
    assert verdict(sql_store) == verify.ExitCode.VALID


@pytest.mark.parametrize("times", [1, 4, 5])
async def test_a_writer_that_is_overtaken_again_tries_again(memory_store, open_log, times):
    """A writer out of turn costs one attempt; only a log to which no append succeeds counts as forked."""

    def overtaken(size, make):
        overtakings.append(size)
        if len(overtakings) <= times:
            message = "another writer moved the audit log on"
            raise AuditForkError(message)
        type(memory_store).append_behind(memory_store, size, make)

    overtakings, expected = [], pytest.raises(AuditForkError) if times == 5 else nullcontext()
    with expected:
        async with open_log(memory_store) as log:
            grower = Grower(memory_store)
            grower.tree.append(memory_store.stored[0].leaf_hash)
            grower.append((READ, None))
            memory_store.append_behind = overtaken
            await log.append(READ, **READING)
    assert _types(memory_store)[1:] == [READ] * (1 if times == 5 else 2)


async def test_entries_of_others_are_hashed_before_they_are_followed(memory_store, open_log):
    """What does not make the stored head is a fork, even with the right number of leaves."""
    with pytest.raises(AuditForkError, match="is not the log of size"):  # noqa: PT012 - on leaving the block
        async with open_log(memory_store) as log:
            grower = Grower(memory_store)
            grower.tree.append(memory_store.stored[0].leaf_hash)
            grower.append((READ, None))
            memory_store.stored[-1] = replace(memory_store.stored[-1], leaf=b"something else")
            with pytest.raises(AuditForkError):
                await log.append(READ, **READING)


async def test_a_head_moved_during_an_outage_is_a_fork(memory_store, open_log):
    """After a failure the head must be where it was, or where the commit would have put it."""
    with pytest.raises(AuditForkError):  # noqa: PT012 - on leaving the block, too
        async with open_log(memory_store) as log:
            memory_store.fail_before.append(AuditUnavailableError("disk full"))
            with pytest.raises(AuditUnavailableError):
                await log.append(READ, **READING)
            memory_store.stored, memory_store.stored_head = [], type(memory_store)().head()
            with pytest.raises(AuditForkError, match="is not the log of size"):
                await log.append(READ, **READING)


async def test_defect_in_the_writer_fails_every_waiting_entry(memory_store, open_log):
    """An unexpected error refuses all entries and is raised where the log was opened."""
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - on leaving the block
        async with open_log(memory_store) as log:
            memory_store.fail_before.append(ZeroDivisionError())
            with pytest.raises(AuditUnavailableError, match="writer stopped"):
                await log.append(READ, **READING)
            with pytest.raises(AuditUnavailableError, match="writer stopped"):
                log.submit(READ, **READING)


async def test_a_log_closed_in_doubt_still_ends_every_request(memory_store, open_log, intent, verdict):
    """The last commit failed and nothing came after it: closing finds out, and closes what it left."""
    async with open_log(memory_store) as log:
        memory_store.fail_after.append(AuditUnavailableError("connection lost"))
        pending = log.submit(INTENT, **intent("a"))
    assert isinstance(pending.exception(), AuditUnavailableError)
    assert _reasons(memory_store) == [("a", "entry_not_durable")]
    assert verdict(memory_store) == verify.ExitCode.VALID


async def test_a_closed_log_takes_nothing(memory_store, open_log):
    """After the block there is no writer, and the error says so."""
    async with open_log(memory_store) as log:
        pending = log.submit(READ, **READING)
    assert pending.result().index == 1
    with pytest.raises(AuditUnavailableError, match="clos"):
        log.submit(READ, **READING)


async def test_requests_left_open_are_aborted_on_closing(memory_store, open_log, intent, verdict):
    """A log that was closed properly has no request without an end."""
    async with open_log(memory_store) as log:
        await log.append(INTENT, **intent("a"))
        assert log.state().open_requests == 1
    assert _reasons(memory_store) == [("a", "gateway_stopped")]
    assert verdict(memory_store) == verify.ExitCode.VALID


async def test_requests_a_crash_left_open_are_aborted_on_opening(
    sql_store, open_log, intent, outcome, tmp_path, verdict
):
    """A copy of the files taken mid-flight is a crash: the next start closes what was open, and says so."""
    async with open_log(sql_store) as log:
        await log.append(INTENT, **intent("done"))
        await log.append(OUTCOME, **outcome("done"))
        await log.append(INTENT, **intent("a"))
        await log.append(INTENT, **intent("b"))
        for name in ("audit.db", "audit.db-wal"):
            shutil.copy(tmp_path / name, tmp_path / f"crashed-{name}")
    (tmp_path / "audit.head").unlink()
    crashed = SqlAuditStore(f"sqlite:///{tmp_path}/crashed-audit.db")
    async with open_log(crashed):
        pass
    assert _reasons(crashed) == [("a", "gateway_stopped"), ("b", "gateway_stopped")]
    started = decode(crashed.leaves(7, 8)[0].leaf)
    assert started.type is EntryType.AUDIT_STARTED
    assert started.fields == {"version": "0.1.0", "recovered": 2, "tree_size": 5, "gateway": "gateway"}
    assert verdict(crashed) == verify.ExitCode.VALID
    crashed.close()


async def test_checkpoints_follow_entries_in_time(memory_store, open_log, signer, sealed_path):
    """Within `checkpoint_seconds` the head is signed, sealed and stored, all three the same."""
    async with open_log(memory_store, checkpoint_seconds=0.05) as log:
        await log.append(READ, **READING)
        await _until(lambda: log.state().checkpoint_size == 2)
        note = memory_store.latest_checkpoint().note
        assert sealed_path.read_text() == note
        checkpoint = verify_checkpoint(note, signer.verifier_key)
        assert (checkpoint.size, checkpoint.root) == (2, memory_store.head().root)
        assert log.state().checkpoint_time > 0


async def test_checkpoints_follow_entries_in_number(memory_store, open_log, monkeypatch):
    """A burst is signed after `checkpoint_entries`, however fast it is."""
    monkeypatch.setattr("appliance.audit.writer.COMMIT_ENTRIES", 5)
    async with open_log(memory_store, checkpoint_seconds=60, checkpoint_entries=10) as log:
        await asyncio.gather(*(log.submit(READ, **READING) for _ in range(34)))
    assert sorted(memory_store.checkpoints) == [11, 21, 31, 35]


async def test_idle_log_signs_heartbeats(memory_store, open_log):
    """When nothing happens the head is published again, which shows that it could be."""
    async with open_log(memory_store, checkpoint_seconds=0.01, heartbeat_seconds=0.02) as log:
        await _until(lambda: log.state().checkpoint_time > 0)
        before = log.state().checkpoint_time
        await _until(lambda: log.state().checkpoint_time > before)
        assert list(memory_store.checkpoints) == [1]


async def test_a_head_is_sealed_before_anyone_can_see_it(memory_store, open_log, sealed_path):
    """When storing the checkpoint fails, it is sealed already; appending continues and it is retried."""
    async with open_log(memory_store, checkpoint_seconds=0.05) as log:
        await _until(lambda: log.state().checkpoint_size == 1)
        memory_store.fail_checkpoints.append(AuditUnavailableError("disk full"))
        await log.append(READ, **READING)
        await _until(lambda: log.state().checkpoint_failure)
        assert sealed_path.read_text().split("\n")[1] == "2"
        assert memory_store.latest_checkpoint().size == 1
        assert log.state().failure is None
        await log.append(READ, **READING)
        await _until(lambda: log.state().checkpoint_size == 3)
        assert log.state().checkpoint_failure is None


async def test_an_older_copy_of_the_database_is_refused(sql_store, open_log, tmp_path):
    """A backup is whole in itself; the sealed head knows that there was more."""
    async with open_log(sql_store) as log:
        await log.append(READ, **READING)
    sql_store.close()
    shutil.copy(tmp_path / "audit.db", tmp_path / "backup.db")
    async with open_log(sql_store) as log:
        await log.append(READ, **READING)
    sql_store.close()
    shutil.copy(tmp_path / "backup.db", tmp_path / "audit.db")
    restored = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")
    with pytest.raises(AuditRollbackError, match="2 entries, but 4 were signed"):
        async with open_log(restored):
            pytest.fail("a rolled back log was opened")
    restored.close()


async def test_another_history_of_the_same_length_is_refused(memory_store, open_log):
    """The sealed root is compared, not only the size."""
    async with open_log(memory_store) as log:
        await log.append(READ, **READING)
    other = type(memory_store)()
    with pytest.raises(AuditRollbackError, match="entries"):
        async with open_log(other):
            pytest.fail("an empty log was opened in place of a longer one")
    memory_store.stored.reverse()
    with pytest.raises(AuditRollbackError, match="not the ones that were signed"):
        async with open_log(memory_store):
            pytest.fail("a rewritten log was opened")


async def test_a_missing_sealed_head_is_refused(memory_store, open_log, sealed_path):
    """Deleting the file does not avoid the check once anything was signed."""
    async with open_log(memory_store):
        pass
    sealed_path.unlink()
    with pytest.raises(AuditRollbackError, match="sealed head is missing"):
        async with open_log(memory_store):
            pytest.fail("opened without its sealed head")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"log\n1\n"])
async def test_a_damaged_sealed_head_is_refused(memory_store, open_log, sealed_path, content):
    """It is evidence; damage to it is an error."""
    async with open_log(memory_store):
        pass
    sealed_path.write_bytes(content)
    with pytest.raises(AuditVerificationError, match="sealed head"):
        async with open_log(memory_store):
            pytest.fail("opened with a damaged sealed head")


async def test_another_key_is_refused(memory_store, open_log, signer):
    """A log is not continued under a key that did not sign it."""
    async with open_log(memory_store):
        pass
    other = Signer(signer.name, Ed25519PrivateKey.generate())
    with pytest.raises(AuditVerificationError, match="not signed with this key"):
        async with open_log(memory_store, signed_by=other):
            pytest.fail("opened with another key")


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM audit_leaves WHERE idx = (SELECT max(idx) FROM audit_leaves)",
        "UPDATE audit_head SET root = zeroblob(32)",
        "UPDATE audit_head SET frontier = zeroblob(32)",
        "UPDATE audit_head SET size = 2",
    ],
)
async def test_a_damaged_database_is_refused_at_opening(sql_store, open_log, tmp_path, damage):
    """Head and leaves are recomputed against each other before anything is added."""
    async with open_log(sql_store, checkpoint_seconds=0.05) as log:
        for _ in range(3):
            await log.append(READ, **READING)
        await _until(lambda: log.state().checkpoint_size == 4)
        await log.append(READ, **READING)
        copy = tmp_path / "copy.db"
        with sqlite3.connect(tmp_path / "audit.db") as source, sqlite3.connect(copy) as target:
            source.backup(target)
            target.executescript(f"DROP TRIGGER audit_leaves_no_delete; {damage}")
        sealed = (tmp_path / "audit.head").read_bytes()
        source.close()
        target.close()
    (tmp_path / "audit.head").write_bytes(sealed)
    store = SqlAuditStore(f"sqlite:///{copy}")
    with pytest.raises(AuditVerificationError, match="damaged"):
        async with open_log(store):
            pytest.fail("a damaged log was opened")
    store.close()


@pytest.mark.parametrize(("index", "is_found"), [(-1, True), (-256, True), (0, False)])
async def test_an_altered_new_entry_is_found_at_a_start(memory_store, open_log, index, is_found):
    """From the tile of the newest signature on, bytes are hashed again; others are left to the check."""
    async with open_log(memory_store, checkpoint_seconds=1000, checkpoint_entries=1000) as log:
        for pending in [log.submit(READ, **READING) for _ in range(2 * TILE_WIDTH - 1)]:
            await log.confirm(pending)
    assert len(memory_store.stored) == 2 * TILE_WIDTH
    memory_store.stored[index] = replace(memory_store.stored[index], leaf=b"{}")
    if not is_found:
        async with open_log(memory_store):
            return
    with pytest.raises(AuditVerificationError, match="missing or was altered"):
        async with open_log(memory_store):
            pytest.fail("an altered log was opened")


async def test_a_store_that_cannot_be_written_does_not_open(memory_store, open_log):
    """The error occurs at start, not at the first request."""
    memory_store.fail_before.append(AuditUnavailableError("read-only"))
    with pytest.raises(AuditUnavailableError, match="read-only"):
        async with open_log(memory_store):
            pytest.fail("opened without being able to write")


async def test_opening_again_continues_the_same_log(sql_store, open_log, tmp_path, verdict):
    """Five starts, one history: each records the size that it found."""
    for start in range(5):
        store = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")
        async with open_log(store) as log:
            await log.append(READ, **READING)
            assert log.size == 2 * start + 2
        store.close()
    assert verdict(sql_store) == verify.ExitCode.VALID
