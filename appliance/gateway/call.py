"""One request for a model, parsed as far as the gateway reads it."""

from dataclasses import dataclass
from typing import Any

from appliance.errors import InvalidRequestError, NeedsTargetOnlyWorkerError
from appliance.gateway.body import Body, ParsedBody
from appliance.serving.affinity import LENGTHS
from appliance.serving.dialects.routes import ROUTES, Route
from appliance.serving.target_only import ForbiddenBy
from appliance.tenancy import Caller, PriorityClass, SpeculationPolicy
from appliance.tenancy.limits.limiting import UNLIMITED, Reservation

SPECULATION_HEADER = "X-Appliance-Speculation"
PRIORITY_HEADER = "X-Appliance-Priority"
PREFIX_BYTES = 4 * LENGTHS[-1]  # hold the longest prefix, whatever its script


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    request_id: str
    client_request_id: str | None  # its `x-request-id`, echoed to it
    caller: Caller
    route: str  # one of `ROUTES`
    body: Body  # unchanged
    parsed: ParsedBody
    client: str  # the class of its address, never the address
    speculation: SpeculationPolicy = SpeculationPolicy.AUTO  # of `SPECULATION_HEADER`
    priority: PriorityClass = PriorityClass.STANDARD
    wants_metrics: bool = False  # whether the client requested the worker's own `metrics`
    traceparent: str | None = None  # the client's header; None unless requests are traced
    batch_line: tuple[str, int] | None = None  # batch id and line number
    entry: Reservation = UNLIMITED  # held from before the body was read

    @property
    def model(self) -> str:
        return self.parsed.model

    @property
    def endpoint(self) -> Route:
        return ROUTES[self.route]

    def check_policy(self) -> None:
        """Raises InvalidRequestError with the name of a member that policy refuses, and the reason."""
        if self.parsed.refusal is not None:
            message, param, code = self.parsed.refusal
            raise InvalidRequestError(message, param=param, code=code)

    @property
    def forbidden_by(self) -> ForbiddenBy | None:
        """Why workers with a draft must not serve it; of several reasons the one hardest to change."""
        if not self.endpoint.dialect.generates:
            return None
        if self.caller.tenant.speculation is SpeculationPolicy.OFF:
            return ForbiddenBy.TENANT
        if self.speculation is SpeculationPolicy.OFF:
            return ForbiddenBy.HEADER
        return ForbiddenBy.PARAMETER if self.parsed.drafts_refuse else None

    def refusal(self) -> NeedsTargetOnlyWorkerError:
        """The error if the request must not be speculated and every worker of its model speculates."""
        param, remedy = None, "Ask"
        if self.forbidden_by is ForbiddenBy.TENANT:
            why = "Your tenant's policy is `speculation: off`"
        elif self.forbidden_by is ForbiddenBy.HEADER:
            param, remedy = SPECULATION_HEADER, "Leave the header out, or ask"
            why = f"The header `{SPECULATION_HEADER}: off` was sent"
        else:
            param, remedy = self.parsed.drafts_refuse, "Leave it out, or ask"
            why = f"`{param}` does not work with speculative decoding"
        return NeedsTargetOnlyWorkerError(
            f"{why}, and every worker of `{self.model}` speculates. "
            f"{remedy} the operator for a target-only worker.",
            param=param,
        )

    def prefix_text(self) -> str:
        """How the conversation begins, as the client sent it: a worker may have kept its KV cache."""
        start, end = self.parsed.conversation
        return self.body[start : min(end, start + PREFIX_BYTES)].decode(errors="ignore")

    def intent_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.caller.tenant.name,
            "key_id": self.caller.key.key_id,
            "route": self.route,
            "model": self.model,
            "stream": self.parsed.is_stream,
            "client": self.client,
            "body_bytes": len(self.body),
            "content_mode": str(self.caller.tenant.content),
        }
        if self.client_request_id:
            fields["client_request_id"] = self.client_request_id
        if self.batch_line is not None:
            fields["batch"], fields["batch_line"] = self.batch_line
        return fields
