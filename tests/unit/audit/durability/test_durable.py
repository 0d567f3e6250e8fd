"""What is acknowledged ends up in the log exactly once and in order, or is counted."""

import asyncio
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from appliance.audit import verify
from appliance.audit.durability import durable
from appliance.audit.durability.gap import GapFile
from appliance.audit.pending import Kept
from appliance.audit.registry import EntryType
from appliance.errors import AuditUnavailableError, ConfigurationError
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


async def test_strict_refuses_what_the_database_does_not_take(bench):
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
async def test_spooled_entries_come_into_the_log_in_order_and_once(bench, way):
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


async def test_a_running_request_whose_intent_was_written_although_it_failed_is_not_ended_by_the_log(bench):
    """It was acknowledged from the spool, so its caller will come back with its end."""
    async with bench.open() as guarded:
        bench.store.state = "lossy"
        assert (await begin(guarded.sink, "running")).kept is Kept.SPOOLED
        bench.store.state = "up"
        await _back(guarded)
        assert (await end(guarded.sink, "running")).kept is Kept.LOGGED
    assert bench.entries(EntryType.REQUEST_ABORTED) == []
    assert bench.verdict().exit_code is verify.ExitCode.VALID


async def test_an_entry_keeps_the_time_it_was_made_at(bench):
    """What waited is told from what happened later by its time."""
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


async def test_a_database_that_hangs_is_not_waited_for(bench):
    """After `spool_after_seconds` the entry is spooled, and is not recorded twice when it comes through."""
    async with bench.open(spool_after_seconds=0.05) as guarded:
        bench.store.gate.clear()
        receipt = await guarded.sink.append(READ, **READING)
        assert receipt.kept is Kept.SPOOLED
        bench.store.gate.set()
        await _back(guarded)
    assert bench.ids().count(receipt.entry_id) == 1
    assert bench.verdict().exit_code is verify.ExitCode.VALID


async def test_a_full_spool_refuses_and_still_ends_what_it_accepted(bench):
    """An eighth is left to ends; when the database is back, everything goes on."""
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
        assert guarded.watch.health().problem("the disk is full")
        bench.store.state = "up"
        await _back(guarded)
        for request_id in accepted[1:]:
            await end(guarded.sink, request_id)
    assert bench.verdict().exit_code is verify.ExitCode.VALID
    assert bench.metrics.audit_dropped._value.get() == 0


async def test_an_end_that_nothing_took_closes_its_request_later(bench):
    """Its caller was told; the log must not be left with a request that never ends."""
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


async def test_a_failing_spool_disk_is_as_good_as_none(bench, monkeypatch):
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


async def test_what_is_spooled_survives_a_stop_and_a_start(bench):
    """Also requests whose intent is in the database and whose end is in the spool."""
    async with bench.open() as guarded:
        await begin(guarded.sink, "across")
        bench.store.state = "full"
        receipts = [await end(guarded.sink, "across"), await begin(guarded.sink, "cut")]
    bench.store.state = "up"
    async with bench.open() as guarded:
        assert not guarded.sink.state().spooling
    assert [bench.ids().count(one.entry_id) for one in receipts] == [1, 1]
    (aborted,) = bench.entries(EntryType.REQUEST_ABORTED)
    assert aborted.fields == {"request_id": "cut", "reason": "gateway_stopped"}
    assert bench.verdict().exit_code is verify.ExitCode.VALID


@pytest.mark.parametrize("mode", ["spool", "strict"])
async def test_a_spool_that_comes_back_after_it_was_drained_changes_nothing(bench, mode):
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


async def test_strict_does_not_start_while_a_spool_waits_and_the_database_takes_nothing(bench):
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


async def test_two_gateways_cannot_have_one_spool(bench):
    """Each would drain what the other one writes."""
    async with bench.open():
        with pytest.raises(ConfigurationError, match="another gateway uses the spool"):
            async with bench.open():
                pass


# Open.


@pytest.mark.parametrize("way", DOWN)
async def test_open_serves_and_the_log_admits_what_is_missing(bench, way):
    """The verifier then says incomplete, with the right number."""
    async with bench.open("open", spool_bytes=0) as guarded:
        await begin(guarded.sink, "across")
        bench.store.state = way
        receipts = [await begin(guarded.sink, "inside"), await end(guarded.sink, "inside")]
        receipts += [await end(guarded.sink, "across"), await begin(guarded.sink, "late")]
        assert {one.kept for one in receipts} == {Kept.UNRECORDED}
        assert bench.events("audit_entries_dropped")
        assert any("not recorded" in one for one in guarded.watch.health().warnings)
        bench.store.state = "up"
        await _back(guarded)
        # Its intent was not recorded, so its end is not either, and is counted.
        assert (await end(guarded.sink, "late")).kept is Kept.UNRECORDED
        await _back(guarded)
        assert (await begin(guarded.sink, "b")).kept is Kept.LOGGED
        await end(guarded.sink, "b")
    report = bench.verdict()
    assert report.exit_code is verify.ExitCode.INCOMPLETE
    recorded = sum(one.entry_id in bench.ids() for one in receipts)
    assert report.missing_entries + recorded == 5
    assert report.open_requests == {}
    assert bench.metrics.audit_dropped._value.get() == 5


async def test_a_gap_is_admitted_even_if_the_process_ended_in_it(bench):
    """The count is on disk before the request is served; it is admitted once."""
    async with bench.open("open", spool_bytes=0) as guarded:
        bench.store.state = "full"
        for number in range(3):
            await begin(guarded.sink, f"r{number}")
        await guarded.sink.append(READ, **READING)
    bench.store.state = "up"
    for _ in range(2):
        async with bench.open("open"):
            pass
    (gap,) = bench.entries(EntryType.AUDIT_GAP)
    assert gap.fields["entries"] == 4
    assert bench.verdict().missing_entries == 4


async def test_a_gap_that_was_admitted_is_not_admitted_again(bench):
    """Also when the process ended after the entry and before it could forget the count."""
    async with bench.open("open", spool_bytes=0) as guarded:
        bench.store.state = "full"
        await guarded.sink.append(READ, **READING)
        kept = (bench.directory / "spool" / "gap").read_bytes()
        bench.store.state = "up"
        await _back(guarded)
    (bench.directory / "spool" / "gap").write_bytes(kept)
    async with bench.open("open"):
        pass
    assert bench.verdict().missing_entries == 1


async def test_open_serves_even_if_the_count_cannot_be_written(bench, monkeypatch):
    """The mode fails open; the count is kept in memory and admitted all the same."""

    def fail(_file, _gap):
        raise OSError(5, "Input/output error")

    async with bench.open("open", spool_bytes=0) as guarded:
        bench.store.state = "full"
        monkeypatch.setattr(GapFile, "write", fail)
        assert (await guarded.sink.append(READ, **READING)).kept is Kept.UNRECORDED
        bench.store.state = "up"
        await _back(guarded)
    assert bench.verdict().missing_entries == 1


async def test_a_count_that_cannot_be_read_keeps_the_gateway_from_starting(bench):
    """Somebody has to note it before it is removed."""
    async with bench.open("open"):
        pass
    (bench.directory / "spool" / "gap").write_bytes(b"{")
    with pytest.raises(ConfigurationError, match="counts unrecorded entries"):
        async with bench.open("open"):
            pass


async def test_the_end_of_a_request_that_went_unrecorded_goes_unrecorded_too(bench, monkeypatch):
    """Even if it was handed over before anybody knew, and although there would be room for it."""
    async with bench.open("open", spool_bytes=8000) as guarded:
        bench.store.state = "full"
        while (await guarded.sink.append(READ, **READING)).kept is Kept.SPOOLED:
            pass
        write = GapFile.write
        monkeypatch.setattr(GapFile, "write", lambda *arguments: (time.sleep(0.1), write(*arguments)))
        intent = guarded.sink.submit(INTENT, request_id="a", **BEGUN)
        await until(lambda: guarded.sink._spooler.is_writing)
        outcome = guarded.sink.submit(OUTCOME, request_id="a", **ENDED)
        receipts = [await guarded.sink.confirm(one) for one in (intent, outcome)]
        assert [one.kept for one in receipts] == [Kept.UNRECORDED] * 2
        bench.store.state = "up"
        await _back(guarded)
    assert bench.verdict().missing_entries == 3


async def test_open_uses_the_spool_first(bench):
    """Only what does not fit goes unrecorded."""
    async with bench.open("open", spool_bytes=4000) as guarded:
        bench.store.state = "full"
        receipts = [await guarded.sink.append(READ, **READING) for _ in range(40)]
        kept = [one.kept for one in receipts]
        assert kept == sorted(kept, key=[Kept.SPOOLED, Kept.UNRECORDED].index)
        assert set(kept) == {Kept.SPOOLED, Kept.UNRECORDED}
        bench.store.state = "up"
        await _back(guarded)
    report = bench.verdict()
    assert report.missing_entries == kept.count(Kept.UNRECORDED)
    assert all(bench.ids().count(one.entry_id) == (one.kept is Kept.SPOOLED) for one in receipts)


# Damage.


@pytest.mark.parametrize(("mode", "refuses"), [("strict", True), ("spool", True), ("open", False)])
async def test_a_damaged_log_takes_no_new_requests_unless_the_mode_is_open(bench, mode, refuses):
    """What runs may end; what is new is refused until somebody has looked."""
    async with bench.open(mode) as guarded:
        await begin(guarded.sink, "running")
        guarded.sink.damage = "entry 7 was altered"
        if refuses:
            with pytest.raises(AuditUnavailableError, match="was altered"):
                guarded.sink.submit(INTENT, request_id="new", **BEGUN)
        else:
            await begin(guarded.sink, "new")
            await end(guarded.sink, "new")
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
def test_whatever_fails_every_acknowledged_entry_is_in_the_log_once(steps):
    """Random outages, lost answers and restarts, with room in the spool: valid, complete, in order."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        receipts = asyncio.run(_live(bench, "spool", steps))
        ids = bench.ids()
        assert all(one.kept is not Kept.UNRECORDED for one in receipts)
        assert [one for one in ids if one in {each.entry_id for each in receipts}] == [
            one.entry_id for one in receipts
        ]
        report = bench.verdict()
        assert (report.exit_code, report.missing_entries) == (verify.ExitCode.VALID, 0)


@PROPERTY
@given(st.lists(STEP, min_size=5, max_size=60), st.sampled_from([0, 2000, 6000]))
@example([("begin", 0), ("state", "lossy"), ("event", 0), ("restart", 0)], 0)  # counted, and recorded
def test_whatever_fails_in_open_mode_entries_and_gaps_add_up(steps, spool_bytes):
    """Every entry is either in the log, once, or counted as missing."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        receipts = asyncio.run(_live(bench, "open", steps, spool_bytes=spool_bytes))
        ids = bench.ids()
        assert len(ids) == len(set(ids))
        recorded = sum(one.entry_id in ids for one in receipts)
        for one in receipts:
            assert one.kept is Kept.UNRECORDED or one.entry_id in ids
        report = bench.verdict()
        assert recorded + report.missing_entries == len(receipts)
        assert report.open_requests == {}
        expected = verify.ExitCode.INCOMPLETE if report.missing_entries else verify.ExitCode.VALID
        assert report.exit_code is expected
