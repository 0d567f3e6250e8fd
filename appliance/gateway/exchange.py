"""
The state of one request while the gateway serves it, and the summary of how it ended.

An `Exchange` is owned by the task that serves the request; nothing else writes to it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from appliance.audit.entry import JSON
from appliance.audit.pending import Receipt
from appliance.errors import ApplianceError, Outcome, spec_of
from appliance.gateway.attribution import context_bucket
from appliance.gateway.call import Call
from appliance.gateway.capture import NO_CAPTURE, Capture
from appliance.gateway.suspect import Suspicion
from appliance.infra.metrics.gaps import Gaps
from appliance.serving.usage import Usage
from appliance.serving.worker import WorkerId, WorkerSnapshot

if TYPE_CHECKING:  # loaded only if tracing is on
    from appliance.gateway.tracing.tracer import Trace


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Times are readings of one monotonic clock, in seconds."""

    call: Call
    started: float
    intent: asyncio.Future[Receipt]
    template: str
    capture: Capture = NO_CAPTURE
    content: dict[str, JSON] = field(default_factory=dict)  # audit fields about the kept part of the answer
    trace: "Trace | None" = None
    worker: WorkerSnapshot | None = None  # asked last
    queued: float = 0.0  # seconds of waiting for a worker with room
    dispatched: float = 0.0
    answered: float = 0.0
    retries: int = 0
    head_sent: bool = False
    is_relayed: bool = False  # whether a worker's stream is relayed: no other worker may be tried
    last_frames: bytes = b""  # sent last
    gaps: Gaps = field(default_factory=Gaps)  # when pieces of content were sent
    usage: Usage | None = None
    is_counted: bool = False  # whether the worker counted `usage` after it was stopped
    finish_reason: str | None = None
    suspicion: Suspicion | None = None
    outcome: Outcome | None = None
    status: int = 0
    summary: "RequestSummary | None" = None  # of the outcome's entry, once that was submitted

    def end(self, outcome: Outcome, status: int) -> None:
        """Set how the request ended, unless that is set already."""
        if self.outcome is None:
            self.outcome, self.status = outcome, int(status)

    def fail(self, error: ApplianceError) -> None:
        """A failure of the gateway itself overrides whatever the worker did."""
        spec = spec_of(error)
        if spec.outcome is Outcome.GATEWAY_FAILED:
            self.outcome = None
        self.end(spec.outcome, spec.status)

    @property
    def recorded(self) -> bool:
        """Whether the outcome's entry was submitted."""
        return self.summary is not None

    @property
    def intent_failed(self) -> bool:
        """Whether the intent will never be in the log, so that its outcome must not be either."""
        return self.intent.done() and (self.intent.cancelled() or self.intent.exception() is not None)

    @property
    def is_cut_off(self) -> bool:
        """Whether a worker was stopped before it could report what it used."""
        return bool(self.dispatched) and self.outcome in {Outcome.CLIENT_GONE, Outcome.TIMED_OUT}

    @property
    def final_usage(self) -> Usage:
        """As the worker reported or counted it, else an estimate: the body's size and the pieces sent."""
        usage, pieces = self.usage or Usage(estimated=True), self.gaps.pieces
        # What a worker reports within a stream is of one answer, and of one moment.
        is_estimate = usage.estimated or (self.is_cut_off and not self.is_counted)
        if not is_estimate:
            return usage
        prompt = usage.prompt_tokens
        if not prompt and (pieces or (self.dispatched and self.outcome is Outcome.CLIENT_GONE)):
            prompt = self.call.parsed.size.prompt
        completion = max(usage.completion_tokens, pieces)
        return replace(usage, prompt_tokens=prompt, completion_tokens=completion, estimated=True)

    @property
    def charged_tokens(self) -> int:
        usage = self.final_usage
        return usage.prompt_tokens + usage.completion_tokens

    def overhead_seconds(self, now: float) -> float:
        """Without waiting in the queue or for the worker's answer."""
        return max(0.0, (now - self.started) - (self.answered - self.dispatched) - self.queued)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """What the audit log, the metrics, the operator log and the cost meter record of one request."""

    tenant: str
    model: str
    route: str
    template: str
    outcome: Outcome
    worker_id: WorkerId | None
    usage: Usage
    context: str | None  # the range of its prompt length; None unless the worker reported that
    seconds: float
    first_content_seconds: float | None  # from the start; None if none was sent
    gaps: Gaps
    content: Mapping[str, JSON]  # audit fields about the part of the answer that was kept
    fields: Mapping[str, Any]  # of `request.outcome`; the operator log and the trace take theirs from them


def summarise(exchange: Exchange, now: float) -> RequestSummary:
    """Of a request that has ended; `now` is a reading of the exchange's clock."""
    assert exchange.outcome is not None  # noqa: S101 - it has ended
    call, usage, worker, first = exchange.call, exchange.final_usage, exchange.worker, exchange.gaps.first
    context = None if usage.estimated else context_bucket(usage.prompt_tokens)
    seconds = now - exchange.started
    first_content_seconds = None if first is None else first - exchange.started
    fields: dict[str, Any] = {
        "request_id": call.request_id,
        "tenant": call.caller.tenant.name,
        "key_id": call.caller.key.key_id,
        "route": call.route,
        "model": call.model,
        "outcome": str(exchange.outcome),
        "status": exchange.status,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "tokens_estimated": usage.estimated,
        "duration_ms": _milliseconds(seconds),
        "retries": exchange.retries,
        "template": exchange.template,
        **exchange.content,
    }
    optional = {
        "verdicts": list(call.parsed.verdicts) or None,
        "context_bucket": context,
        "speculation_forbidden": call.forbidden_by and str(call.forbidden_by),
        "queued_ms": _milliseconds(exchange.queued) if exchange.queued else None,
        "ttft_ms": None if first_content_seconds is None else _milliseconds(first_content_seconds),
        "finish_reason": exchange.finish_reason or None,
        "answer_suspect": exchange.suspicion and str(exchange.suspicion),
        "acceptance_length": usage.acceptance_length and f"{usage.acceptance_length:.3f}",
    }
    if usage.drafts is not None:
        optional |= {
            "drafts": usage.drafts,
            "draft_tokens": usage.draft_tokens or 0,
            "accepted_tokens": usage.accepted_tokens or 0,
        }
    if worker is not None:
        optional |= {
            "worker": worker.worker.worker_id or None,
            "engine": worker.engine or None,
            "weights": worker.weights or None,
            "draft": worker.draft or None,
            "speculation_mode": str(worker.decision.mode),
            "speculation_reason": str(worker.decision.reason),
        }
    fields |= {name: value for name, value in optional.items() if value is not None}
    return RequestSummary(
        tenant=call.caller.tenant.name,
        model=call.model,
        route=call.route,
        template=exchange.template,
        outcome=exchange.outcome,
        worker_id=None if worker is None else worker.worker.worker_id,
        usage=usage,
        context=context,
        seconds=seconds,
        first_content_seconds=first_content_seconds,
        gaps=exchange.gaps,
        content=exchange.content,
        fields=fields,
    )


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))
