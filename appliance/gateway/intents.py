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
from appliance.tenancy import Caller


class IntentRecorder:
    def __init__(
        self, *, audit: AuditSink, attribution: Attribution, captures: ContentCaptures, logger: Logger
    ) -> None:
        self._audit = audit
        self.label_key = attribution.label_key
        self._captures = captures
        self._logger = logger

    async def begin(self, call: Call, started: float) -> Exchange:
        """Submit the intent; content that it names is durable before."""
        capture = self._captures.begin(call.caller.tenant, call.request_id)
        content = await capture.keep_request(call.body) if capture.is_on else {}
        return Exchange(
            call=call,
            started=started,
            template=call.parsed.template,
            intent=self._audit.submit(EntryType.REQUEST_INTENT, **call.intent_fields(), **content),
            capture=capture,
        )

    async def confirm(self, exchange: Exchange) -> Receipt:
        return await self._audit.confirm(exchange.intent)

    def deny(self, request_id: str, caller: Caller, route: str, error: ApplianceError) -> None:
        """Record that a request was refused before anything was sent; its body may be unread."""
        submit_best_effort(
            self._audit,
            self._logger,
            EntryType.REQUEST_DENIED,
            request_id=request_id,
            tenant=caller.tenant.name,
            key_id=caller.key.key_id,
            route=route,
            reason=code_of(error),
            status=int(spec_of(error).status),
        )
