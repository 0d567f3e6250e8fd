"""
The record of one request: what audit log, metrics and operator log are told when it ends.

Owned by the task that relays the request; nothing else writes to it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from appliance.audit.entry import JSON
from appliance.audit.pending import Receipt
from appliance.audit.registry import EntryType
from appliance.gateway.attribution import Attribution, context_bucket
from appliance.gateway.capture import NO_CAPTURE, Capture
from appliance.gateway.cost.metering import Metering
from appliance.gateway.tracing.trace import Trace
from appliance.infra.json_members import Member
from appliance.infra.metrics import Metrics
from appliance.infra.metrics.gaps import Gaps
from appliance.serving.target_only import ForbiddenBy
from appliance.serving.usage import Usage
from appliance.serving.worker import WorkerSnapshot
from appliance.tenancy import Caller
from appliance.tenancy.limits.estimate import estimate_tokens


class Outcome(StrEnum):
    """How a request ended; also the metric label, the log field and the audit field."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    WORKER_FAILED = "worker_failed"
    WORKER_REFUSED = "worker_refused"
    TIMED_OUT = "timed_out"
    NOT_ADMITTED = "not_admitted"
    """It found no worker with room in time, or no place to wait for one."""
    GATEWAY_STOPPED = "gateway_stopped"
    """Logged as `request.aborted`, like `gateway_failed`: the gateway cannot vouch for the rest."""
    GATEWAY_FAILED = "gateway_failed"


USUAL_STATUS = {
    Outcome.COMPLETED: 200,
    Outcome.CLIENT_GONE: 499,
    Outcome.WORKER_FAILED: 502,
    Outcome.WORKER_REFUSED: 400,
    Outcome.TIMED_OUT: 504,
    Outcome.NOT_ADMITTED: 429,
    Outcome.GATEWAY_STOPPED: 499,
    Outcome.GATEWAY_FAILED: 500,
}
"""HTTP status the client was given, or would have been, where nobody says otherwise."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request on its way; times are readings of one monotonic clock, in seconds."""

    request_id: str
    caller: Caller
    route: str
    model: str
    started: float
    intent: asyncio.Future[Receipt]
    template: str
    """Label of the prompt template."""
    forbidden_by: ForbiddenBy | None = None
    """What kept the request from workers with a draft."""
    worker: WorkerSnapshot | None = None
    dispatched: float = 0.0
    answered: float = 0.0
    gaps: Gaps = field(default_factory=Gaps)
    """When pieces of content were sent on."""
    usage: Usage | None = None
    finish_reason: str | None = None
    outcome: Outcome | None = None
    status: int = 0
    retries: int = 0
    queued: float = 0.0
    """Time spent waiting for a worker with room, in seconds."""
    head_sent: bool = False
    is_relayed: bool = False
    """Whether a worker's stream is being passed on, so that no other worker may be tried."""
    recorded: bool = False
    capture: Capture = NO_CAPTURE
    """What is kept of its content while it is under way."""
    content: dict[str, JSON] = field(default_factory=dict)
    """What its end says about the answer that was kept."""
    verdicts: list[str] = field(default_factory=list)
    """What policy changed in it."""
    trace: Trace | None = None
    """Its trace, where requests are traced."""
    last_frames: bytes = b""
    """What was sent last of a stream."""

    def ends(self, outcome: Outcome, *, status: int | None = None) -> None:
        """Fix how the request ended; the first word counts."""
        if self.outcome is None:
            self.outcome, self.status = outcome, status or USUAL_STATUS[outcome]

    def fails(self, *, status: int) -> None:
        """Note that the gateway could not keep its own promise, whatever the worker did."""
        self.outcome, self.status = Outcome.GATEWAY_FAILED, status

    @property
    def intent_failed(self) -> bool:
        """Whether the intent will never be in the log, so that its outcome must not be either."""
        return self.intent.done() and (self.intent.cancelled() or self.intent.exception() is not None)

    @property
    def first_content(self) -> float | None:
        """When the first piece of content was sent on; None before it was."""
        return self.gaps.first

    @property
    def frames(self) -> int:
        """Pieces of content sent on."""
        return self.gaps.pieces

    @property
    def final_usage(self) -> Usage:
        """What the worker said it cost, else the frames counted, marked as an estimate."""
        usage = self.usage
        if usage is None:
            return Usage(completion_tokens=self.frames, estimated=True)
        if usage.estimated and not usage.completion_tokens:
            return replace(usage, completion_tokens=self.frames)
        return usage

    def used_tokens(self, text: str, members: Mapping[str, Member]) -> int:
        """
        What it is charged for: what the worker said, else a guess at what it had begun with.

        Args:
            text: the request's body.
            members: the body's members.
        """
        if self.usage is not None:
            usage = self.final_usage
            return usage.prompt_tokens + usage.completion_tokens
        if not self.frames and (self.outcome is not Outcome.CLIENT_GONE or not self.dispatched):
            return 0
        return estimate_tokens(text, members, guess=0).prompt + self.frames

    @property
    def context(self) -> str | None:
        """The range its prompt's length falls into, once the worker said that length."""
        if self.usage is None or self.usage.estimated:
            return None
        return context_bucket(self.usage.prompt_tokens)

    def overhead_seconds(self, now: float) -> float:
        """Time since the start that was not spent waiting for a worker, in the queue or for its answer."""
        return max(0.0, (now - self.started) - (self.answered - self.dispatched) - self.queued)

    def fields(self, now: float) -> dict[str, Any]:
        """The fields of the `request.outcome` entry."""
        usage, worker = self.final_usage, self.worker
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.caller.tenant.name,
            "key_id": self.caller.key.key_id,
            "route": self.route,
            "model": self.model,
            "outcome": str(self.outcome),
            "status": self.status,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "tokens_estimated": usage.estimated,
            "duration_ms": _milliseconds(now - self.started),
            "retries": self.retries,
            "template": self.template,
            **self.content,
        }
        if self.verdicts:
            fields["verdicts"] = self.verdicts
        if self.context is not None:
            fields["context_bucket"] = self.context
        if self.forbidden_by is not None:
            fields["speculation_forbidden"] = str(self.forbidden_by)
        if self.queued:
            fields["queued_ms"] = _milliseconds(self.queued)
        if self.first_content is not None:
            fields["ttft_ms"] = _milliseconds(self.first_content - self.started)
        if self.finish_reason:
            fields["finish_reason"] = self.finish_reason
        if usage.drafts is not None:
            fields |= {
                "drafts": usage.drafts,
                "draft_tokens": usage.draft_tokens or 0,
                "accepted_tokens": usage.accepted_tokens or 0,
            }
        if usage.acceptance_length is not None:
            fields["acceptance_length"] = f"{usage.acceptance_length:.3f}"
        if worker is not None:
            known = {
                "worker": worker.worker.worker_id,
                "engine": worker.engine,
                "weights": worker.weights,
                "draft": worker.draft,
                "speculation_mode": str(worker.watch.mode),
                "speculation_reason": str(worker.watch.reason),
            }
            fields |= {name: value for name, value in known.items() if value}
        return fields

    def end_entry(self, now: float) -> tuple[EntryType, dict[str, Any]]:
        """Type and fields of the entry that ends it, where the gateway may not vouch for the rest."""
        if self.outcome in {Outcome.GATEWAY_STOPPED, Outcome.GATEWAY_FAILED}:
            reason = {"request_id": self.request_id, "reason": str(self.outcome)}
            return EntryType.REQUEST_ABORTED, {**reason, **self.content}
        return EntryType.REQUEST_OUTCOME, self.fields(now)

    def log_fields(self, now: float) -> dict[str, Any]:
        """The operator log's share of `fields`."""
        kept = (
            "request_id", "tenant", "key_id", "model", "route", "outcome", "status", "worker", "retries",
            "prompt_tokens", "completion_tokens", "ttft_ms", "duration_ms", "acceptance_length",
        )  # fmt: skip
        fields = self.fields(now)
        logged = {name: fields[name] for name in kept if name in fields}
        if self.trace is not None and self.trace.sampled_id:
            logged["trace_id"] = self.trace.sampled_id
        return logged

    def count(self, metrics: Metrics, now: float) -> None:
        """Add the request to the metrics."""
        tenant, usage = self.caller.tenant.name, self.final_usage
        meters = metrics.meters(tenant, self.model, self.route, str(self.outcome))
        meters.requests.inc()
        exemplar = None if self.trace is None else self.trace.exemplar
        meters.seconds.observe(now - self.started, exemplar)
        if self.first_content is not None:
            meters.first_byte_seconds.observe(self.first_content - self.started, exemplar)
            metrics.inter_token_seconds.labels(self.model).add(self.gaps)
        meters.prompt_tokens.inc(usage.prompt_tokens)
        meters.completion_tokens.inc(usage.completion_tokens)
        if usage.drafts:
            metrics.drafts.labels(tenant, self.model).inc(usage.drafts)
            metrics.draft_tokens.labels(tenant, self.model).inc(usage.draft_tokens or 0)
            metrics.accepted_tokens.labels(tenant, self.model).inc(usage.accepted_tokens or 0)

    def attribute(self, attribution: Attribution, metrics: Metrics) -> None:
        """Add what drafting for the request came to, if there was any and the worker said so."""
        usage, context = self.usage, self.context
        if usage is None or context is None or not usage.drafts:
            return
        attribution.record(
            tenant=self.caller.tenant.name,
            model=self.model,
            template=self.template,
            context=context,
            drafts=usage.drafts,
            draft_tokens=usage.draft_tokens or 0,
            accepted_tokens=usage.accepted_tokens or 0,
            completion_tokens=usage.completion_tokens,
        )
        metrics.saw_drafts(
            model=self.model,
            template=self.template,
            context=context,
            drafts=usage.drafts,
            draft_tokens=usage.draft_tokens or 0,
            accepted_tokens=usage.accepted_tokens or 0,
        )

    def meter(self, costs: Metering) -> None:
        """Add its tokens to what its worker was paid for, if one was asked."""
        if self.worker is not None:
            worker_id = self.worker.worker.worker_id
            costs.count(worker_id, self.caller.tenant.name, self.model, self.final_usage)


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))
