"""The real loop on real sockets, in front of the real plugin."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.control.override import EVERY_WORKER, Override
from appliance.control.recycle import RecycleResult
from appliance.errors import ControlRefusedError, WorkerFailedError
from appliance.serving.plugin_client import SpeculationCommand
from appliance.serving.supervise import free_port
from appliance.serving.worker import Worker
from appliance.speculation.values import Reason, SpeculationMode
from tests.controlled import EVERYWHERE, LARGEST, LOOKUP, NOWHERE, W1, W2, Controlled, EngineWorker
from tests.fakes import SPECULATIVE_METRICS, FakeWorker, until


@pytest.fixture
async def controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Controlled]:
    """A control loop that has not started."""
    async with AsyncExitStack() as stack:
        yield Controlled(stack, tmp_path, monkeypatch)


async def test_decision_is_sent_to_a_worker_once(controlled):
    """At the first poll; the worker then has it, and gets no more."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.tick(5)
    (told,) = worker.puts
    assert (told["table"], told["mode"], told["probe"]) == (EVERYWHERE, "speculative", [])
    seen = controlled.seen()
    assert (seen.healthy, seen.avoided, seen.reading.mode) == (True, False, SpeculationMode.SPECULATIVE)
    assert controlled.loop.events(0) == ()
    assert controlled.sample("control_acting") == 1
    assert controlled.sample("worker_capability", worker="w1", capability="control") == 1


async def test_collapse_has_one_reason_in_log_metrics_and_audit(controlled):
    """Worker, audit log, metric, operator log and event: the same reason, in the same word."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.collapse()
    assert (worker.puts[-1]["table"], worker.puts[-1]["mode"]) == (NOWHERE, "target_only")
    assert set(worker.scheduler.dynamic_sd_lookup[1:]) == {0}
    change = controlled.last
    assert (change.worker, change.mode, change.table) == ("w1", SpeculationMode.TARGET_ONLY, ("1-4: 0",))
    assert change.acceptance_length is not None
    entry = (await controlled.entries(len(controlled.loop.events(0))))[-1]
    assert (entry["mode"], entry["model"], tuple(entry["table"])) == ("target_only", "demo", change.table)
    line = controlled.logged("speculation_changed")[-1]
    counted = controlled.sample(
        "speculation_changes_total", worker="w1", mode="target_only", reason="collapsed"
    )
    reasons = (worker.puts[-1]["reason"], change.reason, entry["reason"], line["reason"])
    assert (reasons, counted) == (("collapsed",) * 4, 1)
    assert controlled.sample("speculation_collapsed", worker="w1") == 1
    assert controlled.sample("speculation_mode", worker="w1", mode="target_only") == 1
    assert controlled.sample("speculation_reason", worker="w1", reason="collapsed") == 1


async def test_drafting_resumes_once_it_pays_again(controlled):
    """Exploration detects it; the table is restored everywhere, and the change is recorded."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.collapse()
    for _ in range(60):
        await controlled.tick(accepted=2)
        if controlled.seen().decision.mode is SpeculationMode.SPECULATIVE:
            break
    await controlled.tick(accepted=2)
    assert controlled.seen().reading.table == ((1, LARGEST, 3),)
    modes = [change.mode for change in controlled.loop.events(0)]
    assert modes[-2:] == [SpeculationMode.TARGET_ONLY, SpeculationMode.SPECULATIVE]
    assert controlled.last.reason is Reason.RECOVERED
    assert any(told["mode"] == "target_only" and told["probe"] for told in worker.puts)


@pytest.mark.parametrize("status", [400, 500])
async def test_decision_is_sent_again_if_not_applied(controlled, status):
    """At every poll until it is applied; other workers are not affected."""
    worker = EngineWorker(put_status=status)
    await controlled.start(worker)
    await controlled.tick(3)
    assert len(worker.puts) == 3
    assert controlled.seen().healthy
    assert len(controlled.logged("decision_not_applied")) == 3
    worker.put_status = 200
    await controlled.tick(3)
    assert len(worker.puts) == 4
    assert controlled.seen().reading.table == ((1, LARGEST, 3),)


async def test_lost_stop_is_sent_again(controlled):
    """The decision is unchanged, and recorded once."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.tick(8, accepted=2)
    worker.put_status = 500
    for _ in range(10):
        await controlled.tick(accepted=0)
        if controlled.seen().decision.mode is SpeculationMode.TARGET_ONLY:
            break
    await controlled.tick(2, accepted=0)
    assert [told["table"] for told in worker.puts[-3:]] == [NOWHERE] * 3
    assert worker.scheduler.dynamic_sd_lookup[1] == 3
    worker.put_status = 200
    await controlled.tick(accepted=0)
    assert worker.scheduler.dynamic_sd_lookup[1] == 0
    stops = [change for change in controlled.loop.events(0) if change.mode is SpeculationMode.TARGET_ONLY]
    assert len(stops) == 1


def page(drafts: int, accepted: int) -> str:
    """The metrics page of a worker that has drafted so much, three tokens at a time."""
    counts = {
        "drafts_total{": drafts,
        "draft_tokens_total{": 3 * drafts,
        "accepted_tokens_total{": accepted,
        'position="0"': accepted,
        'position="1"': 0,
        'position="2"': 0,
    }
    lines = []
    for line in SPECULATIVE_METRICS.splitlines():
        count = [count for name, count in counts.items() if name in line and "spec_decode" in line]
        lines.append(f"{line.rpartition(' ')[0]} {float(count[0])}" if count else line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "the worker runs without the plugin, or was given no control token"),
        (
            {"plugin": {"controllable": True}, "plugin_token": "another"},
            "the worker does not accept this control token",
        ),
        (
            {"plugin": {"controllable": False, "problems": ["another vLLM"], "epoch": ""}},
            "another vLLM",
        ),
    ],
)
async def test_uncontrollable_worker_is_avoided_while_its_drafts_fail(controlled, more, problem):
    """Its metrics page is enough to detect that; it is sent nothing."""
    worker = FakeWorker(metrics=page(0, 0), **more)
    await controlled.start(worker)
    await controlled.tick()
    seen = controlled.seen()
    assert (seen.healthy, seen.avoided, seen.decision.reason) == (True, False, Reason.NOT_CONTROLLABLE)
    assert seen.reading.problems == (problem,)
    worker.metrics = page(300, 200)
    await controlled.tick()
    assert not controlled.seen().avoided
    worker.metrics = page(900, 200)
    await controlled.tick(2)
    assert controlled.seen().avoided
    assert (controlled.last.avoided, controlled.last.reason) == (True, Reason.NOT_CONTROLLABLE)
    (entry,) = await controlled.entries(1)
    assert (entry["avoided"], entry["reason"], entry["mode"]) == (True, "not_controllable", "speculative")
    assert controlled.sample("worker_capability", worker="w1", capability="control") == 0
    assert controlled.sample("speculation_collapsed", worker="w1") == 1
    assert worker.puts == []


async def test_plugin_without_hooks_is_reported_as_not_controllable(controlled):
    """Its reason is shown, and it is sent nothing more."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.tick(2, accepted=2)
    told = len(worker.puts)
    worker.scheduler.disobeys = True
    worker.scheduler.dynamic_sd_lookup[1] = 1
    worker.decode(1, accepted=0)
    await controlled.tick(2)
    seen = controlled.seen()
    assert seen.decision.reason is Reason.NOT_CONTROLLABLE
    assert seen.reading.problems == ("the scheduler does not follow its draft-token table",)
    assert len(worker.puts) == told


async def test_loop_without_the_lease_only_shows_the_workers_table(controlled):
    """Only the lease holder decides and records."""
    worker = EngineWorker()
    await controlled.start(worker)
    controlled.lease.is_held = False
    await controlled.tick(2, accepted=2)
    assert controlled.seen().decision.mode is SpeculationMode.SPECULATIVE
    assert controlled.sample("control_acting") == 0
    command = SpeculationCommand(
        table=((1, LARGEST, 0),), mode=SpeculationMode.TARGET_ONLY, reason=Reason.BELOW_BREAK_EVEN
    )
    worker.steering.command(json.dumps(command.body()), "by another")
    await controlled.tick(20, accepted=0)
    decision = controlled.seen().decision
    assert (decision.mode, decision.reason) == (SpeculationMode.TARGET_ONLY, Reason.BELOW_BREAK_EVEN)
    assert controlled.sample("speculation_mode", worker="w1", mode="target_only") == 1
    assert (worker.puts, controlled.loop.events(0)) == ([], ())


async def test_new_lease_holder_continues_from_the_workers_table(controlled):
    """A worker that was stopped stays stopped until a probe says otherwise; one that lost it is silent."""
    worker = EngineWorker()
    await controlled.start(worker)
    command = SpeculationCommand(
        table=((1, LARGEST, 0),), mode=SpeculationMode.TARGET_ONLY, reason=Reason.COLLAPSED
    )
    worker.steering.command(json.dumps(command.body()), "by another")
    controlled.lease.is_held = False
    await controlled.tick(3, accepted=0)
    controlled.lease.is_held = True
    await controlled.tick(10, accepted=0)
    assert controlled.loop.is_acting
    assert controlled.seen().decision.mode is not SpeculationMode.SPECULATIVE
    assert {json.dumps(told["table"]) for told in worker.puts} == {json.dumps(NOWHERE)}
    told = len(worker.puts)
    assert told
    controlled.lease.is_held = False
    await controlled.tick(10, accepted=2)
    assert len(worker.puts) == told


async def test_observe_mode_changes_no_worker(controlled):
    """It still measures, and never requests the lease."""
    worker = EngineWorker()
    await controlled.start(worker, control="observe")
    await controlled.tick(8, accepted=2)
    await controlled.tick(8, accepted=0)
    assert (worker.puts, controlled.loop.events(0), controlled.loop.is_acting) == ([], (), False)
    assert worker.scheduler.dynamic_sd_lookup == list(LOOKUP)
    assert controlled.sample("acceptance_length", worker="w1") == pytest.approx(1.0, abs=0.05)
    assert controlled.sample("control_acting") == 0


async def test_defect_in_one_poll_stops_neither_loop_nor_other_workers(controlled):
    """It is logged and counted, and the next poll may succeed."""
    await controlled.start(EngineWorker(), EngineWorker())
    controlled.client.broken = W1
    await controlled.tick(2)
    assert (controlled.seen(W1).healthy, controlled.seen(W2).healthy) == (False, True)
    assert len(controlled.workers[1].puts) == 1
    assert controlled.sample("control_failures_total") == 2
    line = controlled.logged("control_poll_failed")[0]
    assert (line["worker"], line["error"]) == ("w1", "LookupError")
    assert line["exception"].endswith("LookupError")
    controlled.client.broken = None
    await controlled.tick()
    assert controlled.seen(W1).healthy


async def test_a_slow_worker_delays_no_other(controlled):
    """All are polled concurrently."""
    slow, quick = EngineWorker(), EngineWorker()
    slow.may_answer.clear()
    await controlled.start(slow, quick, scrape_timeout_seconds=30.0)
    look = asyncio.create_task(controlled.tick())
    await until(lambda: controlled.seen(W2).healthy)
    assert not controlled.seen(W1).healthy
    slow.may_answer.set()
    await look
    assert controlled.seen(W1).healthy


def order(worker: str, mode: SpeculationMode, *, since: float, seconds: float) -> Override:
    """An override of an operator."""
    return Override(
        worker=worker,
        mode=mode,
        actor="operator/key",
        note="a drill",
        since=since,
        expires_at=since + seconds,
    )


async def test_override_applies_until_it_ends(controlled):
    """From the next poll on, with any measurements; then the monitor decides again."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.tick(2, accepted=2)
    now = controlled.wall()
    await controlled.overrides.put(order("w1", SpeculationMode.TARGET_ONLY, since=now, seconds=60))
    await controlled.tick(accepted=2)
    assert (worker.puts[-1]["table"], worker.puts[-1]["reason"]) == (NOWHERE, "operator_override")
    assert (controlled.last.mode, controlled.last.reason) == (
        SpeculationMode.TARGET_ONLY,
        Reason.OPERATOR_OVERRIDE,
    )
    told = len(worker.puts)
    await controlled.tick(5, accepted=2)
    assert len(worker.puts) == told
    controlled.wall.advance(60)
    await controlled.tick(2, accepted=2)
    assert (worker.puts[-1]["table"], worker.puts[-1]["mode"]) == (EVERYWHERE, "speculative")
    assert controlled.seen().decision.basis is not Reason.OPERATOR_OVERRIDE


async def test_an_override_keeps_a_failing_draft_drafting(controlled):
    """An override can also keep drafting on, and for all workers at once."""
    workers = EngineWorker(), EngineWorker()
    await controlled.start(*workers)
    now = controlled.wall()
    await controlled.overrides.put(order(EVERY_WORKER, SpeculationMode.SPECULATIVE, since=now, seconds=600))
    await controlled.tick(4, accepted=2)
    await controlled.tick(10, accepted=0)
    for worker in workers:
        assert worker.scheduler.dynamic_sd_lookup[1] == 3
        assert worker.puts[-1]["reason"] == "operator_override"


async def test_override_holds_while_its_store_cannot_be_read(controlled):
    """And the loop continues: a slow disk does not remove an override."""
    worker = EngineWorker()
    await controlled.start(worker)
    now = controlled.wall()
    await controlled.overrides.put(order("w1", SpeculationMode.TARGET_ONLY, since=now, seconds=600))
    await controlled.tick(2, accepted=2)
    controlled.overrides.is_broken = True
    await controlled.tick(3, accepted=2)
    assert worker.scheduler.dynamic_sd_lookup[1] == 0
    assert controlled.seen().decision.reason is Reason.OPERATOR_OVERRIDE


async def test_exploration_changes_neither_table_nor_mode(controlled):
    """It goes on however long drafts do not pay, in few steps, and is no change."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.collapse()
    changes, told = len(controlled.loop.events(0)), len(worker.puts)
    for _ in range(2):
        await controlled.tick(60, accepted=0)
        later, told = worker.puts[told:], len(worker.puts)
        assert {(each["mode"], each["reason"]) for each in later} == {("target_only", "collapsed")}
        assert all(each["table"] == NOWHERE and each["probe"] for each in later)
        # The other part of a probe is of steps without drafts, as in the table.
        assert 0 < sum(steps for each in later for k, steps in each["probe"] if k) < 0.05 * 60 * 200
    assert len(controlled.loop.events(0)) == changes


async def test_failed_poll_does_not_end_a_probe(controlled):
    """Sending the table again would end it."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.collapse()
    for _ in range(60):
        await controlled.tick(accepted=0)
        if worker.puts[-1]["probe"]:
            break
    told, metrics = len(worker.puts), worker.metrics
    worker.metrics = "cut off in the mid"
    await controlled.tick(2)
    worker.metrics = metrics
    await controlled.tick(2)
    assert controlled.seen().reading.is_probing
    assert len(worker.puts) == told
    await controlled.tick(accepted=0)
    assert not controlled.seen().reading.is_probing


async def test_gateway_without_the_lease_refuses_a_recycle(controlled):
    """With an error, instead of storing the request."""
    worker = EngineWorker()
    await controlled.start(worker)
    controlled.lease.is_held = False
    await controlled.tick()
    with pytest.raises(ControlRefusedError, match="does not hold the control lease"):
        controlled.loop.request_recycle(W1, with_draft=True, note="", actor="operator/key")
    controlled.lease.is_held = True
    await controlled.tick(5, accepted=2)
    assert controlled.restarts.begun == []
    assert [line["state"] for line in controlled.logged("control_lease_changed")] == ["held"]


async def test_requested_recycle_records_the_operators_note(controlled):
    """Or refused in the recycler's."""
    await controlled.start(EngineWorker())
    await controlled.tick()
    controlled.loop.request_recycle(W1, with_draft=False, note="too slow", actor="operator/key")
    (begun,) = controlled.restarts.begun
    assert begun == {
        "worker": "w1",
        "with_draft": False,
        "reason": Reason.OPERATOR_OVERRIDE,
        "actor": "operator/key",
        "note": "too slow",
    }
    controlled.restarts.why = "no other worker could serve meanwhile"
    with pytest.raises(ControlRefusedError, match="no other worker"):
        controlled.loop.request_recycle(W1, with_draft=False, note="", actor="operator/key")


async def test_worker_is_restarted_without_a_draft_that_does_not_pay(controlled):
    """Once, when it may be; until then the worker serves the target alone."""
    await controlled.start(EngineWorker(), hard_off_after_seconds=60.0)
    await controlled.collapse()
    controlled.restarts.why = "no other worker could serve meanwhile"
    controlled.clock.advance(61.0)
    await controlled.tick(accepted=0)
    assert controlled.restarts.begun == []
    controlled.restarts.why = None
    await controlled.tick(3, accepted=0)
    (begun,) = controlled.restarts.begun
    assert (begun["worker"], begun["with_draft"], begun["reason"]) == ("w1", False, Reason.COLLAPSED)
    controlled.restarts.ends.set_result(RecycleResult.NOT_RESTARTED)
    for _ in range(3):
        controlled.clock.advance(61.0)
        await controlled.tick(accepted=0)
    assert len(controlled.restarts.begun) == 1, "one that cannot be restarted is not drained again and again"


async def test_worker_replaced_during_a_poll_is_polled_next_time(controlled):
    """The result belongs to the former worker; its successor is sent nothing."""
    before, after = EngineWorker(), EngineWorker()
    before.may_answer.clear()
    await controlled.start(before, scrape_timeout_seconds=30.0)
    await controlled.stack.enter_async_context(after.serving())
    look = asyncio.create_task(controlled.tick())
    await until(lambda: before.polls)
    replaced = Worker(worker_id=W1, url=after.url)
    controlled.pool.add(replaced)
    before.may_answer.set()
    await look
    seen = controlled.seen()
    assert (seen.worker, seen.healthy, seen.reading) == (replaced, False, None)
    assert (before.puts, after.puts) == ([], [])
    await controlled.tick()
    assert controlled.seen().healthy
    assert len(after.puts) == 1


async def test_starting_worker_is_up_once_its_supervisor_says_so(controlled):
    """Though it answers before: a request it served until then would precede its start in the audit log."""
    worker = EngineWorker()
    await controlled.start(worker)
    controlled.pool.add(replace(controlled.seen().worker), starting=True)
    await controlled.tick(2, accepted=2)
    assert (worker.polls, controlled.seen().healthy) == (0, False)
    controlled.pool.report_started(W1)
    await controlled.tick(accepted=2)
    assert (worker.polls, controlled.seen().healthy) == (1, True)


async def test_restarted_worker_starts_with_empty_state(controlled):
    """Its engine has another epoch; it is sent the current table."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.tick(4, accepted=2)
    again = EngineWorker()
    worker.scheduler, worker.steering = again.scheduler, again.steering
    told = len(worker.puts)
    await controlled.tick()
    assert controlled.seen().decision.reason is Reason.COUNTER_RESET
    assert len(worker.puts) == told + 1
    assert controlled.seen().figures.window.drafts == 0


async def test_tokens_by_engine_second_are_exported_as_the_engine_counts_them(controlled):
    """By draft tokens and batch size, so that a query gives the goodput of each; from 0 after a restart."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.tick(4, accepted=2)
    kind = {"worker": "w1", "draft_tokens": "3", "batch": "1"}
    cell = controlled.seen().reading.steps[1, 3]
    assert controlled.sample("worker_step_tokens_total", **kind) == cell.tokens > 0
    assert controlled.sample("worker_step_seconds_total", **kind) == cell.seconds > 0
    worker.decode(accepted=1)
    await controlled.tick()
    later = controlled.seen().reading.steps[1, 3]
    assert controlled.sample("worker_step_tokens_total", **kind) == later.tokens > cell.tokens
    again = EngineWorker()
    worker.scheduler, worker.steering = again.scheduler, again.steering
    await controlled.tick()
    assert controlled.sample("worker_step_tokens_total", **kind) is None
    await controlled.tick(accepted=2)
    measured = controlled.seen().reading.steps[1, 3]
    assert controlled.sample("worker_step_tokens_total", **kind) == measured.tokens < cell.tokens


async def test_steps_of_a_worker_that_says_nothing_stay_as_they_were(controlled):
    """A poll without steps does not reset them; they are removed with the worker."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.tick(3, accepted=2)
    kind = {"worker": "w1", "draft_tokens": "3", "batch": "1"}
    told = controlled.sample("worker_step_tokens_total", **kind)
    worker.metrics = "cut off in the mid"
    await controlled.tick(3)
    assert controlled.sample("worker_step_tokens_total", **kind) == told > 0
    controlled.metrics.forget_worker(W1)
    assert controlled.sample("worker_step_tokens_total", **kind) is None


async def test_worker_that_cannot_be_scraped_keeps_its_table(controlled):
    """Three failed polls exclude it from routing; none changes its mode."""
    worker = EngineWorker()
    await controlled.start(worker)
    await controlled.collapse()
    told, changes = len(worker.puts), controlled.loop.events(0)
    worker.metrics = "cut off in the mid"
    health = []
    for _ in range(3):
        await controlled.tick(accepted=0)
        health.append(controlled.seen().healthy)
    decision = controlled.seen().decision
    assert health == [True, True, False]
    assert (decision.mode, decision.reason) == (SpeculationMode.TARGET_ONLY, Reason.SCRAPE_FAILED)
    assert controlled.loop.events(0) == changes
    assert {json.dumps(told["table"]) for told in worker.puts[told:]} <= {json.dumps(NOWHERE)}


async def test_a_plugin_that_answers_nonsense_takes_no_worker_out_of_routing(controlled):
    """Requests do not depend on it; only the monitor has no data."""
    worker = FakeWorker(metrics=SPECULATIVE_METRICS, plugin={"controllable": True, "epoch": "0f"})
    await controlled.start(worker)
    await controlled.tick(3)
    seen = controlled.seen()
    assert (seen.healthy, seen.reading, seen.decision.reason) == (True, None, Reason.SCRAPE_FAILED)
    assert controlled.sample("control_failures_total") == 0
    assert worker.puts == []


async def test_loop_polls_until_stopped_and_releases_the_lease(controlled):
    """So that another need not wait for it to expire."""
    await controlled.start(EngineWorker())
    running = asyncio.create_task(controlled.loop.run())
    await until(lambda: controlled.seen().healthy)
    controlled.client.broken = W1
    await until(lambda: controlled.sample("control_failures_total") >= 2)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (controlled.restarts.closed, controlled.lease.released) == (1, 1)


async def test_worker_without_a_draft_gets_no_table(controlled):
    """There is no drafting to control."""
    worker = FakeWorker(plugin={"controllable": False, "problems": ["no draft"], "epoch": ""})
    await controlled.start(worker)
    await controlled.tick(3)
    seen = controlled.seen()
    assert (seen.healthy, seen.speculates, seen.decision.mode) == (True, False, SpeculationMode.TARGET_ONLY)
    assert worker.puts == []


async def test_client_reads_and_controls_over_http(controlled):
    """The answer has the value that was sent; a different value is a failure."""
    worker = EngineWorker()
    await controlled.start(worker)
    known = controlled.seen().worker
    command = SpeculationCommand(
        table=((1, LARGEST, 0),), mode=SpeculationMode.TARGET_ONLY, reason=Reason.COLLAPSED
    )
    told = await controlled.speculation.apply(known, command, 1.0)
    assert (told.table, told.mode, told.reason) == (command.table, command.mode, command.reason)
    assert await controlled.speculation.read(known, 1.0) == told
    with pytest.raises(WorkerFailedError, match=r"answered 400: .*are not among"):
        await controlled.speculation.apply(known, replace(command, table=((1, LARGEST, 2),)), 1.0)
    with pytest.raises(WorkerFailedError, match="did not apply the draft-token table"):
        await controlled.speculation.apply(known, replace(command, table=((1, 2, 3),)), 1.0)


async def test_a_silent_control_listener_is_a_failure_and_a_missing_one_is_not(controlled):
    """A failure after no longer than was allowed; without a listener the worker cannot be controlled."""
    await controlled.start(EngineWorker())
    gone = Worker(worker_id=W2, url=f"http://127.0.0.1:{free_port('127.0.0.1')}")
    reading = await controlled.speculation.read(gone, 60.0)
    assert not reading.controllable
    assert "nothing listens on the worker's control port" in reading.problems[0]
    with pytest.raises(WorkerFailedError, match=r"could not be reached: .*Timeout"):
        await controlled.speculation.read(controlled.seen().worker, 0.000001)
