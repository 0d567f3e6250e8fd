"""
Records the outcome of a request: audit log, metrics, operator log, cost meter and trace.

The gateway waits for the entry before it sends the last frame.  If a request ends in another way, the entry
is queued, because that also happens while a task is being cancelled.  A crash loses what is queued and not
durable yet; at the next start the log's recovery closes those requests.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from appliance.audit.entry_types import EntryType
from appliance.audit.sink import AuditSink, submit_best_effort
from appliance.errors import AuditError, Outcome
from appliance.gateway.attribution import Attribution
from appliance.gateway.capture import ContentCaptures
from appliance.gateway.cost.metering import NO_METERING, Metering
from appliance.gateway.exchange import Exchange, RequestSummary, summarise
from appliance.gateway.suspect import SuspectAnswers, Suspicion
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.serving.usage import Usage
from appliance.serving.worker import Worker
from appliance.tenancy.limits.limiting import Reservation

# The fields of the `request.outcome` entry that are in the operator log too.
LOGGED = (
    "request_id", "tenant", "key_id", "model", "route", "outcome", "status", "worker", "retries",
    "prompt_tokens", "completion_tokens", "ttft_ms", "duration_ms", "acceptance_length",
)  # fmt: skip

TokenCounter = Callable[[Worker, str], Awaitable[Usage | None]]
"""Ask a worker what a request has used whose connection was closed; None if it cannot tell.  Never raises."""


async def count_nothing(_worker: Worker, _request_id: str) -> Usage | None:
    return None


class OutcomeRecorder:
    def __init__(
        self,
        *,
        audit: AuditSink,
        attribution: Attribution,
        captures: ContentCaptures,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        costs: Metering = NO_METERING,
        count: TokenCounter = count_nothing,
    ) -> None:
        self._audit = audit
        self._attribution = attribution
        self._captures = captures
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._costs = costs
        self._count = count
        self._suspects = SuspectAnswers()

    async def record(self, exchange: Exchange) -> None:
        """Make the outcome durable; the final frame waits for this."""
        # Submitted before, the outcome could become durable although the client is told of a failed intent.
        await self._audit.confirm(exchange.intent)
        if exchange.capture.is_on:
            exchange.content = await exchange.capture.keep_answer()
        self._judge(exchange)
        summary = summarise(exchange, self._clock())
        entry = self._audit.submit(EntryType.REQUEST_OUTCOME, **summary.fields)
        exchange.summary = summary
        await self._audit.confirm(entry)

    def finish(self, exchange: Exchange, reservation: Reservation) -> None:
        """
        Settle, count and log the request, and queue its outcome if `record` did not submit it.

        Never waits, because the task may be being cancelled: what has to wait follows in a task of its own.
        """
        now = self._clock()
        exchange.end(Outcome.GATEWAY_FAILED, HTTPStatus.INTERNAL_SERVER_ERROR)
        if exchange.is_cut_off and not exchange.recorded:
            self._captures.run_later(self._finish_cut_off(exchange, reservation, now))
        else:
            self._finish(exchange, reservation, now)

    async def _finish_cut_off(self, exchange: Exchange, reservation: Reservation, now: float) -> None:
        """Ask the worker first what it used; until it answers, the request holds its reservation."""
        try:
            assert exchange.worker is not None  # noqa: S101 - it was dispatched
            usage = await self._count(exchange.worker.worker, exchange.call.request_id)
            if usage is not None:
                exchange.usage, exchange.is_counted = usage, True
        finally:
            self._finish(exchange, reservation, now)

    def _finish(self, exchange: Exchange, reservation: Reservation, now: float) -> None:
        reservation.settle(exchange.charged_tokens)
        if not exchange.recorded:
            self._judge(exchange)
        summary, trace = exchange.summary, exchange.trace
        if summary is None or summary.outcome is not exchange.outcome:
            summary = summarise(exchange, now)
        else:  # as the log has it
            summary = replace(summary, seconds=now - exchange.started)
        if not exchange.recorded and exchange.capture.is_on:
            self._captures.run_later(self._end_with_content(exchange, now))
        elif not exchange.recorded:
            self._queue_end(exchange, summary)
        count_request(summary, self._metrics, None if trace is None else trace.exemplar)
        attribute_drafts(summary, self._attribution, self._metrics)
        if summary.worker_id is not None:
            self._costs.count(summary.worker_id, summary.tenant, summary.model, summary.usage)
        logged = {name: summary.fields[name] for name in LOGGED if name in summary.fields}
        if trace is not None and trace.sampled_id:
            logged["trace_id"] = trace.sampled_id
        self._logger.info("request_finished", **logged)
        if trace is not None:
            trace.finish(summary.fields, now)

    def _judge(self, exchange: Exchange) -> None:
        usage, worker = exchange.final_usage, exchange.worker
        if usage.drafts is None or usage.rejected_drafts is None or worker is None:
            return
        worker_id, model = worker.worker.worker_id, exchange.call.model
        exchange.suspicion = self._suspects.judge(
            tenant=exchange.call.caller.tenant.name,
            model=model,
            template=exchange.template,
            worker=worker_id,
            drafts=usage.drafts,
            rejected=usage.rejected_drafts,
        )
        for suspicion in Suspicion:
            # An increase from no series at all would not be seen.
            counter = self._metrics.suspect_answers.labels(model, worker_id, suspicion)
            counter.inc(exchange.suspicion is suspicion)

    async def _end_with_content(self, exchange: Exchange, now: float) -> None:
        try:
            exchange.content = await exchange.capture.keep_answer()
        except AuditError as error:
            # The answer was sent already; the entry must not name content that was not kept.
            exchange.content = {"payload_lost": True}
            self._logger.warning("audit_content_lost", request_id=exchange.call.request_id, error=str(error))
        self._queue_end(exchange, summarise(exchange, now))

    def _queue_end(self, exchange: Exchange, summary: RequestSummary) -> None:
        # Queued without waiting: this also runs while the task is being cancelled, where an await
        # may never return.  The log writes its queue before it closes.
        if not exchange.intent_failed:
            # If this is refused, the request stays open, and the log's recovery closes it at the next start.
            entry_type, fields = end_entry(summary)
            submit_best_effort(self._audit, self._logger, entry_type, **fields)


def end_entry(summary: RequestSummary) -> tuple[EntryType, dict[str, Any]]:
    """A gateway that stopped or failed vouches only for the reason."""
    if summary.outcome in {Outcome.GATEWAY_STOPPED, Outcome.GATEWAY_FAILED}:
        reason = {"request_id": summary.fields["request_id"], "reason": str(summary.outcome)}
        return EntryType.REQUEST_ABORTED, {**reason, **summary.content}
    return EntryType.REQUEST_OUTCOME, dict(summary.fields)


def count_request(summary: RequestSummary, metrics: Metrics, exemplar: dict[str, str] | None = None) -> None:
    tenant, model, usage = summary.tenant, summary.model, summary.usage
    meters = metrics.meters(tenant, model, summary.route, str(summary.outcome))
    meters.requests.inc()
    meters.seconds.observe(summary.seconds, exemplar)
    if summary.first_content_seconds is not None:
        meters.first_byte_seconds.observe(summary.first_content_seconds, exemplar)
        metrics.inter_token_seconds.labels(model).add(summary.gaps)
    meters.prompt_tokens.inc(usage.prompt_tokens)
    meters.completion_tokens.inc(usage.completion_tokens)
    if usage.drafts:
        metrics.drafts.labels(tenant, model).inc(usage.drafts)
        metrics.draft_tokens.labels(tenant, model).inc(usage.draft_tokens or 0)
        metrics.accepted_tokens.labels(tenant, model).inc(usage.accepted_tokens or 0)


def attribute_drafts(summary: RequestSummary, attribution: Attribution, metrics: Metrics) -> None:
    usage = summary.usage
    if summary.context is None or not usage.drafts:
        return
    counts: dict[str, Any] = {
        "model": summary.model,
        "template": summary.template,
        "context": summary.context,
        "drafts": usage.drafts,
        "draft_tokens": usage.draft_tokens or 0,
        "accepted_tokens": usage.accepted_tokens or 0,
    }
    attribution.record(tenant=summary.tenant, completion_tokens=usage.completion_tokens, **counts)
    metrics.record_drafts(**counts)
