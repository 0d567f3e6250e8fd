"""The metrics of one worker and its speculation, as of the latest poll."""

from appliance.infra.metrics import Metrics
from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.values import Capability, Reason, SpeculationMode, missing_of


def publish_worker(metrics: Metrics, after: WorkerSnapshot) -> None:
    worker, decision, figures = after.worker.worker_id, after.decision, after.figures
    metrics.worker_up.labels(worker).set(after.healthy)
    metrics.worker_tokens_per_second.labels(worker).set(after.tokens_per_second)
    if after.metrics is not None:
        metrics.worker_running.labels(worker).set(after.metrics.running)
        metrics.worker_waiting.labels(worker).set(after.metrics.waiting)
        metrics.worker_kv_cache_usage.labels(worker).set(after.metrics.kv_cache_usage)
    for mode in SpeculationMode:
        metrics.speculation_mode.labels(worker, mode).set(decision.mode is mode)
    for reason in Reason:
        metrics.speculation_reason.labels(worker, reason).set(decision.reason is reason)
    metrics.speculation_collapsed.labels(worker).set(decision.verdict is Reason.COLLAPSED)
    missing = missing_of(after.reading)
    for capability in Capability:
        metrics.worker_capability.labels(worker, capability).set(capability not in missing)
    metrics.speculation_exploration_share.labels(worker).set(figures.exploration_share)
    metrics.speculation_probed_steps.labels(worker).set(figures.probed_steps)
    for bucket, draft_tokens in figures.draft_tokens.items():
        metrics.speculation_draft_tokens.labels(worker, str(bucket)).set(draft_tokens)
        break_even = figures.costs.break_evens(bucket).get(max(figures.choices))
        if break_even is not None:
            metrics.break_even_length.labels(worker, str(bucket)).set(break_even)
    window = figures.window
    metrics.window_drafts.labels(worker).set(window.drafts)
    if window.drafts:
        metrics.acceptance_length.labels(worker).set(window.acceptance_length)
        metrics.acceptance_rate.labels(worker).set(window.acceptance_rate)
        for position, rate in enumerate(window.acceptance_rate_per_position):
            metrics.acceptance_rate_per_position.labels(worker, str(position)).set(rate)


def publish_steps(metrics: Metrics, before: WorkerSnapshot, after: WorkerSnapshot) -> None:
    """
    Export seconds and tokens of each kind of decode step, as the worker counts them.

    A restarted engine begins with its own counts; those of a worker that did not answer stay.
    """
    worker, earlier, reading = after.worker.worker_id, before.reading, after.reading
    if reading is None:
        return
    known = earlier.steps if earlier is not None and earlier.epoch == reading.epoch else None
    if known is None:
        metrics.forget_steps(worker)
    for kind, cell in reading.steps.items():
        # Few kinds of steps happen between two polls; the others stay as they are.
        if known is None or known.get(kind) != cell:
            batch, draft_tokens = map(str, kind)
            metrics.worker_step_tokens.labels(worker, draft_tokens, batch).copy(cell.tokens)
            metrics.worker_step_seconds.labels(worker, draft_tokens, batch).copy(cell.seconds)
