"""The log is forwarded in order and at least once, whatever becomes of the connection and of the gateway."""

import asyncio
import itertools
import random
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from appliance.audit.forward import forwarder as module
from appliance.audit.forward.cursor import Cursor, ForwardStore
from appliance.audit.verify import ExitCode
from appliance.errors import AuditError, AuditUnavailableError, AuditVerificationError, ForwardError
from appliance.infra.metrics import Metrics
from tests.forwarding import DESTINATION, Collected, indices, judge_stream, make_forwarder, split_frames

REQUESTS = [f"r{number}" for number in range(30)]
ENTRIES = 2 * len(REQUESTS) + 1


class Losing(Collected):
    """A collector that reads late: when it dies, up to so many bytes that were sent are lost."""

    def __init__(self, unread_bytes: int, chance: random.Random) -> None:
        super().__init__()
        self._unread_bytes, self._chance = unread_bytes, chance
        self._unread: list[bytes] = []

    @asynccontextmanager
    async def connect(self):
        self.connections += 1
        self._unread = []
        yield self

    async def send(self, data: bytes) -> None:
        self._unread += split_frames(data)
        while sum(map(len, self._unread)) > self._unread_bytes:
            self.messages.append(self._unread.pop(0))
        if self._chance.random() < 0.4:
            raise ForwardError("it was killed")

    def read(self) -> None:
        """Read what has arrived."""
        self.messages += self._unread
        self._unread = []


async def keep_trying(forwarder):
    """Send everything that is due, over as many connections as it takes."""
    while True:
        try:
            return await forwarder.forward(until_sent=True)
        except ForwardError:
            pass


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr("appliance.audit.forward.reader.BATCH_ENTRIES", 5)
    monkeypatch.setattr(module, "MARK_BYTES", 1)
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)


async def test_entries_come_in_order_each_checkpoint_behind_what_it_covers(record, sql_store):
    await record(*REQUESTS)
    collector = Collected()
    await make_forwarder(sql_store, collector).forward(until_sent=True)
    assert indices(collector.messages) == list(range(ENTRIES))
    sent = 0
    for message in collector.messages:
        if indices([message]):
            sent += 1
        else:
            assert f'"size":{sent},'.encode() in message or f'"size":{sent}}}'.encode() in message


async def test_a_growing_log_is_continued(record, sql_store, small_batches):
    collector = Collected()
    for at in range(0, len(REQUESTS), 10):
        await record(*REQUESTS[at : at + 10])
        await make_forwarder(sql_store, collector, window_bytes=0).forward(until_sent=True)
    assert set(indices(collector.messages)) == set(range(sql_store.head().size))
    assert collector.connections == 3


@pytest.mark.parametrize("seed", range(8))
async def test_what_a_killed_collector_had_not_read_is_sent_again(
    record, sql_store, small_batches, seed, tmp_path, signer
):
    """As long as it is not more than the window."""
    await record(*REQUESTS)
    chance = random.Random(seed)
    collector = Losing(unread_bytes=8000, chance=chance)
    forwarder = make_forwarder(sql_store, collector, window_bytes=8000 + 20_000)
    await keep_trying(forwarder)
    collector.read()
    stream = tmp_path / "stream"
    stream.write_bytes(collector.stream)
    code, report = judge_stream(stream, signer.vkey)
    assert (code, report["start"], report["end"]) == (ExitCode.VALID, 0, ENTRIES)


async def test_a_window_that_is_too_small_would_lose_entries(record, sql_store, small_batches):
    """So the test above can fail."""
    await record(*REQUESTS)
    losses = 0
    for seed in range(8):
        collector = Losing(unread_bytes=8000, chance=random.Random(seed))
        forwarder = make_forwarder(sql_store, collector, window_bytes=0)
        forwarder._destination = f"{DESTINATION}{seed}"
        await keep_trying(forwarder)
        collector.read()
        losses += set(indices(collector.messages)) != set(range(ENTRIES))
    assert losses


async def test_the_cursor_stays_a_window_behind(record, sql_store, small_batches):
    """And is that of a checkpoint, with the frontier of its tree."""
    await record(*REQUESTS)
    window = 9000
    collector = Collected()
    await make_forwarder(sql_store, collector, window_bytes=window).forward(until_sent=True)
    cursor = ForwardStore(sql_store.database).load(DESTINATION)
    assert 0 < cursor.size < cursor.sent == ENTRIES
    behind = itertools.dropwhile(lambda message: indices([message]) != [cursor.size], collector.messages)
    assert sum(len(message) for message in behind) >= window - 100
    again = Collected()
    await make_forwarder(sql_store, again).forward(until_sent=True)
    assert indices(again.messages) == list(range(cursor.size, ENTRIES))


async def test_a_cursor_that_cannot_be_kept_skips_nothing(record, sql_store, small_batches, monkeypatch):
    await record(*REQUESTS)
    collector = Collected()
    forwarder = make_forwarder(sql_store, collector, window_bytes=0)

    def refuse(*_arguments):
        raise AuditUnavailableError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ForwardStore, "save", refuse)
        with pytest.raises(AuditUnavailableError):
            await forwarder.forward(until_sent=True)
    await forwarder.forward(until_sent=True)
    assert set(indices(collector.messages)) == set(range(ENTRIES))


async def test_a_cursor_never_goes_back(sql_store):
    """Of two gateways, one with an old lease keeps the place of the other."""
    store = ForwardStore(sql_store.database)
    newer = Cursor(size=4, subtrees=(bytes(32),), sent=9)
    store.save(DESTINATION, newer)
    store.save(DESTINATION, Cursor(size=2, subtrees=(bytes(32),), sent=3))
    assert store.load(DESTINATION) == newer
    assert store.load("another:6514") == Cursor()


ALTERATIONS = {
    "an entry": "UPDATE audit_leaves SET leaf = CAST(replace(leaf, 'acme', 'evil') AS BLOB) WHERE idx = 3",
    "a deleted entry": "DELETE FROM audit_leaves WHERE idx = 3",
}


@pytest.mark.parametrize("statement", ALTERATIONS.values(), ids=ALTERATIONS)
async def test_an_altered_log_is_not_forwarded(record, sql_store, statement, execute):
    """The gateway says so; what was sent before stays provable."""
    await record("r1", "r2", "r3")
    execute(statement)
    collector = Collected()
    with pytest.raises(AuditVerificationError):
        await make_forwarder(sql_store, collector).forward(until_sent=True)
    assert not collector.messages


async def test_a_log_that_was_rolled_back_behind_what_was_forwarded_is_not_continued(
    record, sql_store, execute, small_batches
):
    await record(*REQUESTS)
    await make_forwarder(sql_store, Collected(), window_bytes=0).forward(until_sent=True)
    execute("DELETE FROM audit_checkpoints WHERE size > 8")
    with pytest.raises(AuditVerificationError, match="rolled back or altered"):
        await make_forwarder(sql_store, Collected()).forward(until_sent=True)


@pytest.fixture
def execute(sql_store):
    """Run SQL as the owner of the database, who can drop the triggers."""

    def execute_(statement):
        with sql_store.database.engine(5.0).begin() as connection:
            for (name,) in connection.exec_driver_sql(
                "SELECT name FROM sqlite_master WHERE type = 'trigger'"
            ).all():
                connection.exec_driver_sql(f"DROP TRIGGER {name}")
            connection.exec_driver_sql(statement)

    return execute_


class Dead:
    """A collector that cannot be reached, until it can."""

    def __init__(self):
        self.is_up = asyncio.Event()
        self.collected = Collected()

    @asynccontextmanager
    async def connect(self):
        if not self.is_up.is_set():
            raise ForwardError("Connection refused")
        async with self.collected.connect() as connection:
            yield connection


async def until(holds):
    """Wait for a condition; the test's own time limit ends it."""
    while not holds():  # noqa: ASYNC110 - of what other threads change
        await asyncio.sleep(0.01)


async def test_a_dead_collector_costs_lag_and_a_warning_only(record, sql_store, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(module, "OBSERVE_SECONDS", 0.01)
    await record(*REQUESTS)
    metrics, collector = Metrics(CollectorRegistry()), Dead()
    sample = metrics.registry.get_sample_value
    forwarder = make_forwarder(sql_store, collector, metrics=metrics)
    running = asyncio.create_task(forwarder.run())
    try:
        await until(lambda: forwarder.state.failure and forwarder.state.lag_entries == ENTRIES)
        assert "61 entries behind: Connection refused" in forwarder.warning
        assert sample("appliance_audit_forward_lag_entries") == ENTRIES
        assert sample("appliance_audit_forward_lag_seconds") >= 0
        assert sample("appliance_audit_forward_failures_total") >= 1
        collector.is_up.set()
        await until(lambda: forwarder.warning is None and forwarder.state.lag_entries == 0)
        assert sample("appliance_audit_forward_lag_entries") == 0
        assert forwarder.state.lag_seconds == 0
    finally:
        running.cancel()
    assert indices(collector.collected.messages) == list(range(ENTRIES))


async def test_the_age_of_the_oldest_entry_is_the_lag_in_seconds(record, sql_store, clock):
    await record("r1")
    forwarder = make_forwarder(sql_store, Collected())
    forwarder._clock = lambda: clock() + 500
    behind, seconds = forwarder._measure()
    assert behind == 3
    assert 495 < seconds < 505


class Elsewhere:
    """A lease that another gateway holds."""

    async def hold(self):
        return False

    async def release(self):
        return


async def test_a_gateway_without_the_lease_sends_nothing_and_shows_the_same_lag(
    record, sql_store, monkeypatch
):
    monkeypatch.setattr(module, "OBSERVE_SECONDS", 0.01)
    await record("r1")
    collector = Collected()
    forwarder = make_forwarder(sql_store, collector, lease=Elsewhere())
    running = asyncio.create_task(forwarder.run())
    await until(lambda: forwarder.state.lag_entries == 3)
    running.cancel()
    assert collector.connections == 0
    assert forwarder.warning is None


async def test_the_last_checkpoint_of_a_quiet_log_is_sent_again(record, sql_store, monkeypatch):
    """So a SIEM can tell a quiet log from one that is not forwarded any more."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    await record("r1")
    collector = Collected()
    forwarder = make_forwarder(sql_store, collector)
    hours = itertools.count(0, 30)
    forwarder._monotonic = lambda: float(next(hours))
    running = asyncio.create_task(forwarder.run())
    last = b'"size":3'
    await until(lambda: sum(last in message for message in collector.messages) >= 3)
    running.cancel()
    assert indices(collector.messages) == [0, 1, 2]


async def test_the_state_of_a_failed_database_is_an_error_of_the_log(sql_store):
    """One line, like every other."""
    sql_store.database.engine(5.0).dispose()
    store = ForwardStore("sqlite:////nowhere/audit.db")
    with pytest.raises(AuditError, match="could not be read"):
        store.load(DESTINATION)
