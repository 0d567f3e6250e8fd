"""When a worker is restarted without its draft, and when with it again."""

from dataclasses import replace

from appliance.control.hard_off import (
    UNCONTROLLABLE_SECONDS,
    HardOffPolicy,
    Restart,
    RestartHistory,
    due,
    forget,
    note_collapses,
    note_refusal,
    note_restart,
)
from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.values import NO_DRAFTS, Decision, Reason, SpeculationMode

ONE, TWO = WorkerId("w1"), WorkerId("w2")
POLICY = HardOffPolicy(after_seconds=3600.0, retry_seconds=20000.0)
OFF = Restart(worker_id=ONE, with_draft=False, reason=Reason.COLLAPSED)


def snapshot(
    worker_id: WorkerId = ONE,
    *,
    verdict: Reason | None = Reason.COLLAPSED,
    basis: Reason = Reason.BELOW_BREAK_EVEN,
    speculates: bool = True,
) -> WorkerSnapshot:
    """A healthy worker with this decision."""
    metrics = WorkerMetrics(
        running=0,
        waiting=0,
        kv_cache_usage=0.0,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        preemptions_total=0,
        finished_requests_total={},
        speculation=NO_DRAFTS if speculates else None,
    )
    return WorkerSnapshot(
        worker=Worker(worker_id=worker_id, url="http://w"),
        healthy=True,
        models=(ServedModel(name="demo", max_model_len=None, created=0),),
        metrics=metrics,
        decision=Decision(mode=SpeculationMode.TARGET_ONLY, verdict=verdict, basis=basis),
    )


def noted(*polls: tuple[float, WorkerSnapshot], history: RestartHistory | None = None) -> RestartHistory:
    """The history after these polls."""
    history = history or RestartHistory()
    for now, seen in polls:
        history = note_collapses(history, [seen], now)
    return history


def test_a_collapsed_draft_is_removed_after_the_threshold_not_before():
    """The time counts from the first poll that found it collapsed, whatever the reason is meanwhile."""
    history = noted((10.0, snapshot()), (2000.0, snapshot()))
    assert due(history, [snapshot()], POLICY, 3609.0) == ()
    assert due(history, [snapshot()], POLICY, 3610.0) == (OFF,)


def test_a_draft_that_paid_in_between_counts_from_zero():
    """One good poll ends the count."""
    history = noted((0.0, snapshot()), (3000.0, snapshot(verdict=None)), (3001.0, snapshot()))
    assert due(history, [snapshot()], POLICY, 3700.0) == ()


def test_a_draft_below_break_even_causes_no_restart():
    """Below break-even is normal: only a collapse counts."""
    history = noted((0.0, snapshot(verdict=Reason.BELOW_BREAK_EVEN)))
    assert due(history, [snapshot()], POLICY, 10**6) == ()


def test_a_worker_that_cannot_be_controlled_waits_one_minute():
    """It wastes steps meanwhile."""
    seen = snapshot(basis=Reason.NOT_CONTROLLABLE)
    history = noted((0.0, seen))
    assert due(history, [seen], POLICY, UNCONTROLLABLE_SECONDS - 1) == ()
    assert due(history, [seen], POLICY, UNCONTROLLABLE_SECONDS) == (OFF,)


def test_without_a_threshold_no_restart_is_due():
    never = HardOffPolicy(after_seconds=None, retry_seconds=1.0)
    assert due(noted((0.0, snapshot())), [snapshot()], never, 10**9) == ()


def test_the_draft_is_tried_again_later():
    """After the retry time."""
    without = snapshot(speculates=False, verdict=None)
    history = noted((4000.0, without), history=note_restart(noted((0.0, snapshot())), OFF, 3600.0))
    assert due(history, [without], POLICY, 23599.0) == ()
    back = Restart(worker_id=ONE, with_draft=True, reason=Reason.TOO_FEW_DRAFTS)
    assert due(history, [without], POLICY, 23600.0) == (back,)
    assert due(note_restart(history, back, 23600.0), [without], POLICY, 10**6) == ()


def test_a_worker_that_drafts_again_needs_no_restart():
    """Whatever restarted it; one that is still restarting does."""
    history = note_restart(RestartHistory(), OFF, 0.0)
    draining = replace(snapshot(verdict=None), admission=Admission.DRAINING)
    assert noted((1.0, draining), history=history).without_draft == {ONE: 0.0}
    assert noted((2.0, snapshot(verdict=None)), history=history).without_draft == {}


def test_the_longest_due_restart_comes_first():
    polls = [snapshot(ONE), snapshot(TWO)]
    history = note_collapses(note_collapses(RestartHistory(), [polls[1]], 0.0), polls, 5.0)
    assert [restart.worker_id for restart in due(history, polls, POLICY, 10**4)] == [TWO, ONE]


def test_a_refused_restart_is_retried_after_the_retry_time():
    seen = snapshot(basis=Reason.NOT_CONTROLLABLE)
    history = noted((100.0, seen), history=note_refusal(noted((0.0, seen)), ONE, 60.0))
    assert due(history, [seen], POLICY, 60.0 + POLICY.retry_seconds - 1) == ()
    assert due(history, [seen], POLICY, 60.0 + POLICY.retry_seconds) == (OFF,)


def test_an_operators_restart_resets_the_count():
    history = forget(note_refusal(note_restart(noted((0.0, snapshot())), OFF, 1.0), ONE, 2.0), ONE)
    assert history == RestartHistory()
