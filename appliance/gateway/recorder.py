"""
What the audit log, the metrics and the operator log are told of calls.

What a client waits for is confirmed before it gets on; what it does not is queued, since it also happens
while a task is being cancelled.  What a crash loses of the queue, the log's own recovery closes at the next
start.
"""

from collections.abc import Callable
from typing import Any

from appliance.audit.pending import Receipt
from appliance.audit.registry import EntryType
from appliance.audit.sink import AuditSink
from appliance.errors import AuditError
from appliance.gateway.attribution import Attribution
from appliance.gateway.call import Call
from appliance.gateway.capture import Captures
from appliance.gateway.cost.metering import NO_METERING, Metering
from appliance.gateway.exchange import Exchange, Outcome
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics


class Recorder:
    """Writes down what becomes of calls."""

    def __init__(
        self,
        *,
        audit: AuditSink,
        attribution: Attribution,
        captures: Captures,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        costs: Metering = NO_METERING,
    ) -> None:
        self._audit = audit
        self._attribution = attribution
        self._captures = captures
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._costs = costs

    async def begin(self, call: Call, started: float) -> Exchange:
        """Have the intent on its way, and what it names durable before it."""
        capture = self._captures.begin(call.caller.tenant, call.request_id)
        content = await capture.keep_request(call.text) if capture.is_on else {}
        return Exchange(
            request_id=call.request_id,
            caller=call.caller,
            route=call.route,
            model=call.model,
            started=started,
            template=self._attribution.template_of(call.route, call.members),
            forbidden_by=call.forbidden_by,
            intent=self._audit.submit(EntryType.REQUEST_INTENT, **call.intent_fields(), **content),
            capture=capture,
            verdicts=call.verdicts,
        )

    async def confirm_intent(self, exchange: Exchange) -> Receipt:
        """Wait until the intent is durable."""
        return await self._audit.confirm(exchange.intent)

    def deny(self, call: Call, reason: str, *, status: int) -> None:
        """Note that a call was refused before anything was sent."""
        self._queue(
            EntryType.REQUEST_DENIED,
            request_id=call.request_id,
            tenant=call.caller.tenant.name,
            key_id=call.caller.key.key_id,
            route=call.route,
            reason=reason,
            status=status,
        )

    async def record(self, exchange: Exchange) -> None:
        """Make the outcome durable; the final frame waits for this."""
        await self._audit.confirm(exchange.intent)
        if exchange.capture.is_on:
            exchange.content = await exchange.capture.keep_answer()
        entry = self._audit.submit(EntryType.REQUEST_OUTCOME, **exchange.fields(self._clock()))
        exchange.recorded = True
        await self._audit.confirm(entry)

    def finish(self, exchange: Exchange) -> None:
        """Count and log the request, and queue its outcome if it did not end the planned way."""
        now = self._clock()
        exchange.ends(Outcome.GATEWAY_FAILED)
        if not exchange.recorded and exchange.capture.is_on:
            self._captures.later(self._end_with_content(exchange, now))
        elif not exchange.recorded:
            self._queue_end(exchange, now)
        exchange.count(self._metrics, now)
        exchange.attribute(self._attribution, self._metrics)
        exchange.meter(self._costs)
        self._logger.info("request_finished", **exchange.log_fields(now))
        if exchange.trace is not None:
            exchange.trace.finish(exchange.fields(now), now)

    async def _end_with_content(self, exchange: Exchange, now: float) -> None:
        try:
            exchange.content = await exchange.capture.keep_answer()
        except AuditError as error:
            # The client has what it has; the entry must not name what is not there.
            exchange.content = {"payload_lost": True}
            self._logger.warning("audit_content_lost", request_id=exchange.request_id, error=str(error))
        self._queue_end(exchange, now)

    def _queue_end(self, exchange: Exchange, now: float) -> None:
        # Queued without waiting: this also runs while the task is being cancelled, where an await
        # may never come back.  The log writes its queue out before it closes.
        if not exchange.intent_failed:
            entry_type, fields = exchange.end_entry(now)
            self._queue(entry_type, **fields)

    def _queue(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401
        """Submit an entry nobody waits for: whoever it is about has gone or been refused already."""
        try:
            self._audit.submit(entry_type, **fields)
        except AuditError as error:
            # A request it leaves open is closed by the log's own recovery at the next start.
            self._logger.warning("audit_entry_refused", reason=str(entry_type), error=str(error))
