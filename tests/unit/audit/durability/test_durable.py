"""Every acknowledged entry reaches the log exactly once and in order, or is counted as missing."""

import asyncio
import json
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.audit import verify
from appliance.audit.durability import durable
from appliance.audit.durability.losses import short_name
from appliance.audit.durability.spool import Spool
from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Kept
from appliance.errors import AuditEntryError, AuditUnavailableError, ConfigurationError
from tests.durable_log import BEGUN, ENDED, INTENT, OUTCOME, READ, Bench, begin, end, until

READING = {"actor": "cli:root", "operation": "tail"}
DOWN = ("full", "lossy", "blind")
"""Nothing is written; it is written and the answer lost; nothing is written or read."""


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """The log is asked often whether it is back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "RETRY_SECONDS", 0.005)
        patch.setattr(durable, "LONGEST_RETRY_SECONDS", 0.05)
        yield


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


async def _back(guarded):
    await until(lambda: not guarded.sink.state().spooling and not guarded.sink.state().gap_entries)


# Strict.


async def test_strict_refuses_entries_that_the_database_does_not_take(bench):
    """As without any spool: no durable entry, no acknowledgement."""
    async with bench.open("strict") as guarded:
        await begin(guarded.sink, "a")
        bench.store.state = "full"
        with pytest.raises(AuditUnavailableError, match="the disk is full"):
            await begin(guarded.sink, "b")
        assert guarded.sink.state().spooled_entries == 0
        assert bench.metrics.audit_refused._value.get() == 1
        assert bench.metrics.audit_last_failure._value.get() > 0
        bench.store.state = "up"
        await end(guarded.sink, "a")
    counted = {kind: bench.metrics.audit_entries.labels(kind)._value.get() for kind in EntryType}
    assert counted == {kind: len(bench.entries(kind)) for kind in EntryType}
    assert bench.verdict().exit_code is verify.ExitCode.VALID
    assert bench.metrics.audit_dropped._value.get() == 0


# Spool.


@pytest.mark.parametrize("way", DOWN)
async def test_spooled_entries_reach_the_log_in_order_and_once(bench, way):
    """Requests before, across and in an outage are all recorded as if there had been none."""
    async with bench.open() as guarded:
        await begin(guarded.sink, "across")
        bench.store.state = way
        spooled = [await begin(guarded.sink, "inside"), await end(guarded.sink, "inside")]
        spooled += [await end(guarded.sink, "across"), await begin(guarded.sink, "after")]
        assert [one.kept for one in spooled] == [Kept.SPOOLED] * 4
        assert guarded.sink.state().spooled_entries == 4
        bench.store.state = "up"
        await _back(guarded)
        receipt = await end(guarded.sink, "after")
        assert (receipt.kept, bench.entries()[receipt.index].id) == (Kept.LOGGED, receipt.entry_id)
    wanted = [one.entry_id for one in spooled]
    assert [one for one in bench.ids() if one in wanted] == wanted
    assert bench.entries(EntryType.REQUEST_ABORTED) == []
    (report,) = bench.entries(EntryType.AUDIT_SPOOLED)
    assert report.fields["entries"] == 4
    assert bench.verdict().exit_code is verify.ExitCode.VALID
    assert list((bench.directory / "spool").glob("*.spool")) == []


async def test_log_does_not_abort_a_request_whose_intent_commit_is_in_doubt(bench):
    """It was acknowledged from the spool, so its caller will record its end."""
    async with bench.open() as guarded:
        bench.store.state = "lossy"
        assert (await begin(guarded.sink, "running")).kept is Kept.SPOOLED
        bench.store.state = "up"
        await _back(guarded)
        assert (await end(guarded.sink, "running")).kept is Kept.LOGGED
    assert bench.entries(EntryType.REQUEST_ABORTED) == []
    assert bench.verdict().exit_code is verify.ExitCode.VALID


async def test_spooled_entry_keeps_its_time(bench):
    """The time distinguishes entries that waited from later ones."""
    async with bench.open() as guarded:
        bench.store.state = "full"
        receipt = await guarded.sink.append(READ, **READING)
        before = bench.clock.now
        bench.clock.now += 3600
        bench.store.state = "up"
        await _back(guarded)
    entries = {entry.id: entry for entry in bench.entries()}
    (report,) = bench.entries(EntryType.AUDIT_SPOOLED)
    assert entries[receipt.entry_id].time < report.time
    assert report.fields["since"] <= report.fields["until"]
    assert bench.clock.now >= before + 3600


async def test_slow_database_starts_spooling(bench):
    """After `spool_after_seconds` the entry is spooled, and is not recorded twice when it comes through."""
    async with bench.open(spool_after_seconds=0.05) as guarded:
        bench.store.gate.clear()
        receipt = await guarded.sink.append(READ, **READING)
        assert receipt.kept is Kept.SPOOLED
        bench.store.gate.set()
        await _back(guarded)
    assert bench.ids().count(receipt.entry_id) == 1
    assert bench.verdict().exit_code is verify.ExitCode.VALID


async def test_full_spool_refuses_requests_and_takes_ends_of_accepted_ones(bench):
    """An eighth is reserved for ends; when the database is back, entries are accepted again."""
    async with bench.open(spool_bytes=8000) as guarded:
        bench.store.state = "full"
        accepted = []
        with suppress(AuditUnavailableError):
            for number in range(100):
                await begin(guarded.sink, f"r{number}")
                accepted.append(f"r{number}")
        assert 0 < len(accepted) < 100
        with pytest.raises(AuditUnavailableError, match="the disk is full; and the spool is full"):
            await begin(guarded.sink, "refused")
        assert (await end(guarded.sink, accepted[0])).kept is Kept.SPOOLED
        assert guarded.sink.state().spool_full
        assert guarded.monitor.health().problem("the disk is full")
        bench.store.state = "up"
        await _back(guarded)
        for request_id in accepted[1:]:
            await end(guarded.sink, request_id)
    assert bench.verdict().exit_code is verify.ExitCode.VALID
    assert bench.metrics.audit_dropped._value.get() == 0


async def test_request_whose_end_was_refused_is_closed_later(bench):
    """Its caller got an error; the log must not keep a request that never ends."""
    async with bench.open(spool_bytes=2600) as guarded:
        await begin(guarded.sink, "a")
        bench.store.state = "full"
        with suppress(AuditUnavailableError):
            for number in range(20):
                await begin(guarded.sink, f"fill{number}")
        for filled in range(number):
            with suppress(AuditUnavailableError):
                await end(guarded.sink, f"fill{filled}")
        with pytest.raises(AuditUnavailableError, match="the spool is full"):
            await end(guarded.sink, "a")
        bench.store.state = "up"
        await _back(guarded)
    aborted = [entry.fields for entry in bench.entries(EntryType.REQUEST_ABORTED)]
    assert {"request_id": "a", "reason": "entry_not_durable"} in aborted
    report = bench.verdict()
    assert (report.exit_code, report.open_requests) == (verify.ExitCode.VALID, {})


async def test_spool_disk_that_fails_refuses_entries(bench, monkeypatch):
    """Fails closed: an fsync that fails acknowledges nothing, and the next segment takes over."""
    async with bench.open() as guarded:
        bench.store.state = "full"
        await guarded.sink.append(READ, **READING)
        with monkeypatch.context() as patch:

            def fail(_descriptor):
                raise OSError(5, "Input/output error")

            patch.setattr("appliance.audit.durability.spool.os.fsync", fail)
            with pytest.raises(AuditUnavailableError, match="cannot be written"):
                await begin(guarded.sink, "lost")
        receipt = await begin(guarded.sink, "a")
        assert receipt.kept is Kept.SPOOLED
        bench.store.state = "up"
        await _back(guarded)
        await end(guarded.sink, "a")
    assert bench.verdict().exit_code is verify.ExitCode.VALID
    assert receipt.entry_id in bench.ids()


# Restarts.


async def test_spooled_entries_survive_a_restart(bench):
    """Also requests whose intent is in the database and whose end is in the spool."""
    async with bench.open() as guarded:
        await begin(guarded.sink, "across")
        bench.store.state = "full"
        receipts = [await end(guarded.sink, "across"), await begin(guarded.sink, "cut")]
    bench.store.state = "up"
    async with bench.open() as guarded:
        assert not guarded.sink.state().spooling
        # The tasks have nothing left to do, and go on waiting.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guarded.sink.wait_failed(), 20 * durable.RETRY_SECONDS)
    assert [bench.ids().count(one.entry_id) for one in receipts] == [1, 1]
    (aborted,) = bench.entries(EntryType.REQUEST_ABORTED)
    assert aborted.fields == {"request_id": "cut", "reason": "gateway_stopped"}
    assert bench.verdict().exit_code is verify.ExitCode.VALID


async def test_a_gateway_that_drained_a_spool_at_its_start_runs_on(bench):
    """And spools again in the next outage."""
    async with bench.open() as guarded:
        bench.store.state = "full"
        await begin(guarded.sink, "cut")
    bench.store.state = "up"
    async with bench.open() as guarded:
        running = asyncio.create_task(guarded.run())
        for _ in range(2):
            # Many retries of the drain later.
            for _ in range(200):
                await guarded.sink.append(READ, **READING)
            assert not running.done(), running.exception()
            bench.store.state = "full"
            await guarded.sink.append(READ, **READING)
            bench.store.state = "up"
            await _back(guarded)
        running.cancel()
    assert len(bench.events("audit_spooling_ended")) == 3


@pytest.mark.parametrize("mode", ["spool", "strict"])
async def test_drained_spool_that_is_restored_changes_nothing(bench, mode):
    """A crash between the last commit and the removal: nothing is recorded twice, in any mode."""
    async with bench.open() as guarded:
        bench.store.state = "full"
        for number in range(5):
            await begin(guarded.sink, f"r{number}")
            await end(guarded.sink, f"r{number}")
        shutil.copytree(bench.directory / "spool", bench.directory / "kept")
        bench.store.state = "up"
        await _back(guarded)
    size = len(bench.ids())
    shutil.rmtree(bench.directory / "spool")
    shutil.copytree(bench.directory / "kept", bench.directory / "spool")
    async with bench.open(mode):
        pass
    assert len(bench.ids()) == size + 1  # audit.started
    assert len(bench.entries(EntryType.AUDIT_SPOOLED)) == 1
    assert bench.verdict().exit_code is verify.ExitCode.VALID


async def test_strict_does_not_start_if_a_spool_cannot_be_drained(bench):
    """Changing the mode must not leave entries behind."""
    async with bench.open() as guarded:
        bench.store.state = "full"
        receipt = await guarded.sink.append(READ, **READING)
    with pytest.raises(AuditUnavailableError):
        async with bench.open("strict"):
            pass
    bench.store.state = "up"
    async with bench.open("strict"):
        pass
    assert bench.ids().count(receipt.entry_id) == 1


async def test_two_gateways_cannot_share_a_spool(bench):
    """Each would drain what the other one writes."""
    async with bench.open():
        with pytest.raises(ConfigurationError, match="another gateway uses the spool"):
            async with bench.open():
                pass


async def test_spool_refuses_the_end_of_a_request_whose_intent_it_refuses(bench, monkeypatch):
    """Even if the end was handed over before the refusal, and although there is room for an end."""
    async with bench.open(spool_bytes=8000) as guarded:
        bench.store.state = "full"
        await begin(guarded.sink, "accepted")
        with suppress(AuditUnavailableError):
            while True:
                await guarded.sink.append(READ, **READING)
        append = Spool.append
        monkeypatch.setattr(Spool, "append", lambda *arguments: (time.sleep(0.1), append(*arguments)))
        fits = guarded.sink.submit(OUTCOME, request_id="accepted", **ENDED)
        intent = guarded.sink.submit(INTENT, request_id="a", **BEGUN)
        await until(lambda: guarded.sink._spooler.is_writing)
        outcome = guarded.sink.submit(OUTCOME, request_id="a", **ENDED)
        assert (await guarded.sink.confirm(fits)).kept is Kept.SPOOLED
        for refused in (intent, outcome):
            with pytest.raises(AuditUnavailableError, match="the spool is full"):
                await guarded.sink.confirm(refused)
        bench.store.state = "up"
        await _back(guarded)
    assert bench.verdict().exit_code is verify.ExitCode.VALID


# Gaps.


GAP = {"reason": "the disk is full", "entries": 3, "since": "2026-01-01T00:00:00.000Z", "size": 0}


def leave_gap(bench, **changed):
    """Leave the file of a version that served requests unrecorded."""
    (bench.directory / "spool").mkdir(exist_ok=True)
    content = json.dumps(GAP | {"doubtful": []} | changed).encode()
    (bench.directory / "spool" / "gap").write_bytes(content.ljust(2**17, b"\0"))


@pytest.mark.parametrize("mode", ["strict", "spool"])
async def test_log_admits_once_the_gap_that_an_older_version_left(bench, mode):
    """In every mode, before the first request."""
    leave_gap(bench)
    for _ in range(2):
        async with bench.open(mode) as guarded:
            assert guarded.sink.state().gap_entries == 0
    (gap,) = bench.entries(EntryType.AUDIT_GAP)
    assert gap.fields["entries"] == 3
    report = bench.verdict()
    assert (report.exit_code, report.missing_entries) == (verify.ExitCode.INCOMPLETE, 3)


async def test_gap_does_not_count_doubtful_entries_that_the_log_holds(bench):
    """The database took one of them although it reported an error."""
    async with bench.open("strict") as guarded:
        await guarded.sink.append(READ, **READING)
    recorded = [short_name(leaf.leaf_hash) for leaf in bench.store.leaves(0, 10) if leaf.type == READ]
    leave_gap(bench, doubtful=recorded)
    async with bench.open("strict"):
        pass
    assert bench.verdict().missing_entries == 2


async def test_gap_that_was_admitted_is_not_admitted_again(bench):
    """Also if the process ended after the entry and before it could forget the count."""
    for _ in range(2):
        leave_gap(bench)
        async with bench.open():
            pass
    assert bench.verdict().missing_entries == 3


async def test_gap_that_cannot_be_read_keeps_the_gateway_from_starting(bench):
    """An operator has to note it before it is removed."""
    async with bench.open():
        pass
    (bench.directory / "spool" / "gap").write_bytes(b"{")
    with pytest.raises(ConfigurationError, match="counts unrecorded entries"):
        async with bench.open():
            pass


async def test_log_admits_spooled_entries_that_it_refuses(bench, monkeypatch):
    """They were acknowledged; the end of a request whose intent is lost is lost as well."""
    append = type(bench.store).append

    def refuse(store, leaves, **heads):
        if any(leaf.request_id == "bad" for leaf in leaves):
            message = "a request cannot be recorded twice"
            raise AuditEntryError(message)
        append(store, leaves, **heads)

    monkeypatch.setattr(type(bench.store), "append", refuse)
    async with bench.open() as guarded:
        bench.store.state = "full"
        monkeypatch.setattr(type(bench.store), "append", append)
        await begin(guarded.sink, "good")
        await begin(guarded.sink, "bad")
        monkeypatch.setattr(type(bench.store), "append", refuse)
        bench.store.state = "up"
        await _back(guarded)
        with pytest.raises(AuditEntryError, match="cannot end"):
            await end(guarded.sink, "bad")
        await end(guarded.sink, "good")
        assert guarded.sink.state().dropped_entries == 1
    report = bench.verdict()
    assert (report.exit_code, report.missing_entries) == (verify.ExitCode.INCOMPLETE, 1)
    assert report.open_requests == {}
    assert bench.metrics.audit_dropped._value.get() == 1


# Damage.


@pytest.mark.parametrize("mode", ["strict", "spool"])
async def test_damaged_log_refuses_new_requests_and_takes_ends_of_running_ones(bench, mode):
    """New requests are refused until an operator has acted."""
    async with bench.open(mode) as guarded:
        await begin(guarded.sink, "running")
        guarded.sink.damage = "entry 7 was altered"
        with pytest.raises(AuditUnavailableError, match="was altered"):
            guarded.sink.submit(INTENT, request_id="new", **BEGUN)
        await end(guarded.sink, "running")


# Whatever happens.


STEP = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("event"), st.just(0)),
    st.tuples(st.just("state"), st.sampled_from(["up", *DOWN])),
    st.tuples(st.just("pause"), st.integers(0, 8)),
    st.tuples(st.just("restart"), st.just(0)),
)


async def _live(bench, mode, steps, **chosen):  # noqa: C901 - one step each, in one list
    """Do what the steps say; return what was acknowledged, by id, and how many entries were made."""
    receipts, open_requests, number = [], {}, 0
    rest = list(steps)
    while True:
        bench.store.state = "up"
        async with bench.open(mode, **chosen) as guarded:
            while rest:
                what, value = rest.pop(0)
                if what == "restart":
                    break
                pending = None
                if what == "state":
                    bench.store.state = value
                elif what == "pause":
                    await asyncio.sleep(value / 1000)
                elif what == "begin" and value not in open_requests:
                    number += 1
                    open_requests[value] = f"r{number}"
                    pending = guarded.sink.submit(INTENT, request_id=f"r{number}", **BEGUN)
                elif what == "end" and value in open_requests:
                    request_id = open_requests.pop(value)
                    pending = guarded.sink.submit(OUTCOME, request_id=request_id, **ENDED)
                elif what == "event":
                    pending = guarded.sink.submit(READ, **READING)
                if pending is not None:
                    receipts.append(pending)
                    if len(receipts) % 3:  # some wait, some are made together
                        await guarded.sink.confirm(pending)
            else:
                bench.store.state = "up"
                await asyncio.gather(*receipts)
                await _back(guarded)
                return [one.result() for one in receipts]
            await asyncio.gather(*receipts)
            open_requests.clear()


PROPERTY = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@PROPERTY
@given(st.lists(STEP, min_size=5, max_size=60))
def test_every_acknowledged_entry_is_in_the_log_once_whatever_fails(steps):
    """Random outages, lost answers and restarts, with room in the spool: valid, complete, in order."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        receipts = asyncio.run(_live(bench, "spool", steps))
        ids = bench.ids()
        assert [one for one in ids if one in {each.entry_id for each in receipts}] == [
            one.entry_id for one in receipts
        ]
        report = bench.verdict()
        assert (report.exit_code, report.missing_entries) == (verify.ExitCode.VALID, 0)
