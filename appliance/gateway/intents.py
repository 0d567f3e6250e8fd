"""
Records the intent of a request, before a worker is called, and the refusal of one that none will be.

The gateway sends no byte of an answer before the intent is durable.
"""

from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Receipt
from appliance.audit.sink import AuditSink, submit_best_effort
from appliance.errors import ApplianceError, code_of, spec_of
from appliance.gateway.attribution import Attribution
from appliance.gateway.call import Call
from appliance.gateway.capture import ContentCaptures
from appliance.gateway.exchange import Exchange
from appliance.infra.logs import Logger


class IntentRecorder:
    def __init__(
        self, *, audit: AuditSink, attribution: Attribution, captures: ContentCaptures, logger: Logger
    ) -> None:
        self._audit = audit
        self._attribution = attribution
        self._captures = captures
        self._logger = logger

    async def begin(self, call: Call, started: float) -> Exchange:
        """Submit the intent; content that it names is durable before."""
        capture = self._captures.begin(call.caller.tenant, call.request_id)
        content = await capture.keep_request(call.text) if capture.is_on else {}
        return Exchange(
            call=call,
            started=started,
            template=self._attribution.template_of(call.route, call.members),
            intent=self._audit.submit(EntryType.REQUEST_INTENT, **call.intent_fields(), **content),
            capture=capture,
        )

    async def confirm(self, exchange: Exchange) -> Receipt:
        return await self._audit.confirm(exchange.intent)

    def deny(self, call: Call, error: ApplianceError) -> None:
        """Record that a call was refused before anything was sent."""
        submit_best_effort(
            self._audit,
            self._logger,
            EntryType.REQUEST_DENIED,
            request_id=call.request_id,
            tenant=call.caller.tenant.name,
            key_id=call.caller.key.key_id,
            route=call.route,
            reason=code_of(error),
            status=int(spec_of(error).status),
        )
