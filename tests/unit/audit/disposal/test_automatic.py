"""A gateway on SQLite disposes of entries by age, once a day, if that is set."""

import pytest

from appliance.audit.disposal.automatic import FIRST_SECONDS, ROUND_SECONDS, AutomaticDisposal
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.entry_types import EntryType
from tests.disposed_log import DAY_MS, aged


class EndedError(Exception):
    """The test has seen enough."""


@pytest.fixture
def log(sql_store, signer):
    return aged(sql_store, signer, old=1000, step_ms=DAY_MS)


@pytest.fixture
def automatic(log):
    """The task, which disposes of what is as old as this; and what it reported."""

    def automatic_(days=200, **steps):
        reported = []
        task = AutomaticDisposal(
            disposing=Disposing(store=log.store, **steps),
            files=set,
            days=days,
            origin=log.signer.name,
            clock=log.clock,
            report=lambda event, detail, *, is_problem: reported.append((event, detail, is_problem)),
        )
        return task, reported

    return automatic_


async def test_old_entries_go_once_their_entry_is_signed(log, automatic):
    task, reported = automatic()

    async def pause(_seconds):
        if log.store.latest_checkpoint().size < log.store.head().size:
            assert len(log.store.leaves(0, 768)) == 768
            log.sign()

    await task.round(pause)
    assert len(log.store.leaves(0, 768)) == 2
    assert reported == [("audit_disposed", "the first 768 entries", False)]
    await task.round(pause)  # nothing is left to do
    assert len(reported) == 1


async def test_a_failed_round_is_reported_and_completed_by_the_next(log, automatic):
    task, reported = automatic()

    async def never_signed(_seconds):
        """No gateway signs."""

    await task.round(never_signed)
    assert reported[0][0] == "audit_not_disposed"
    assert "no checkpoint covers" in reported[0][1]
    assert len(log.store.leaves(0, 768)) == 768
    log.sign()
    await task.round(never_signed)
    assert len(log.store.leaves(0, 768)) == 2
    recorded = [leaf for leaf in log.store.leaves(768, 2000) if leaf.type == EntryType.AUDIT_DISPOSED]
    assert len(recorded) == 1


async def test_nothing_goes_without_an_old_clock_of_every_witness(log, automatic):
    task, reported = automatic(witnesses=["w"])
    size = log.store.head().size

    async def pause(_seconds):
        """Let time pass."""

    await task.round(pause)
    assert (reported, log.store.head().size) == ([], size)


async def test_it_runs_once_a_day(automatic, log):
    task, _ = automatic(days=100_000)
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise EndedError

    with pytest.raises(EndedError):
        await task.run(pause)
    assert pauses == [FIRST_SECONDS, ROUND_SECONDS, ROUND_SECONDS]
