"""One request for a model, parsed as far as the gateway reads it."""

from dataclasses import dataclass, field
from typing import Any

from appliance.errors import InvalidRequestError, NeedsTargetOnlyWorkerError
from appliance.infra.json_members import Member
from appliance.serving.dialects.dialect import edit_members
from appliance.serving.dialects.policy import policy_edits, policy_verdicts, refuse_forbidden
from appliance.serving.dialects.routes import ROUTES, Route
from appliance.serving.target_only import ForbiddenBy, refused_under_speculation
from appliance.tenancy import Caller, PriorityClass, SpeculationPolicy

SPECULATION_HEADER = "X-Appliance-Speculation"
PRIORITY_HEADER = "X-Appliance-Priority"
CONVERSATION_MEMBERS = ("messages", "prompt", "input")  # by family of routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    request_id: str
    client_request_id: str | None  # its `x-request-id`, echoed to it
    caller: Caller
    route: str  # one of `ROUTES`
    model: str
    text: str  # the body, unchanged
    members: dict[str, Member]
    is_stream: bool
    wants_usage: bool  # whether the client requested the usage frame of a stream
    client: str  # the class of its address, never the address
    speculation: SpeculationPolicy = SpeculationPolicy.AUTO  # of `SPECULATION_HEADER`
    priority: PriorityClass = PriorityClass.STANDARD
    wants_metrics: bool = False  # whether the client requested the worker's own `metrics`
    salted: bool = True  # whether workers separate the prefix cache by tenant (`cache_salt`)
    traceparent: str | None = None  # the client's header; None unless requests are traced
    batch_line: tuple[str, int] | None = None  # batch id and line number
    sequences: int = field(init=False)  # what the worker computes for it: inputs times answers

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequences", self.endpoint.sequences(self.members))

    @property
    def endpoint(self) -> Route:
        return ROUTES[self.route]

    @property
    def verdicts(self) -> list[str]:
        """The changes that policy makes to the request."""
        return policy_verdicts(self.members, self.caller.tenant.may)

    def check_policy(self) -> None:
        """Raises InvalidRequestError with the name of a member that policy refuses, and the reason."""
        route = self.endpoint
        route.dialect.check(self.members)
        refuse_forbidden(self.members, self.caller.tenant.may, carriers=route.carriers)
        if self.sequences > route.max_sequences:
            message = (
                f"This request has {self.sequences} sequences (inputs times answers), and the maximum is "
                f"{route.max_sequences}. Send several requests."
            )
            raise InvalidRequestError(message, param=next(iter(route.inputs), "n"), code="too_many_sequences")

    @property
    def forbidden_by(self) -> ForbiddenBy | None:
        """Why workers with a draft must not serve it; of several reasons the one hardest to change."""
        if not self.endpoint.dialect.generates:
            return None
        if self.caller.tenant.speculation is SpeculationPolicy.OFF:
            return ForbiddenBy.TENANT
        if self.speculation is SpeculationPolicy.OFF:
            return ForbiddenBy.HEADER
        return ForbiddenBy.PARAMETER if refused_under_speculation(self.members) else None

    def refusal(self) -> NeedsTargetOnlyWorkerError:
        """The error if the request must not be speculated and every worker of its model speculates."""
        param, remedy = None, "Ask"
        if self.forbidden_by is ForbiddenBy.TENANT:
            why = "Your tenant's policy is `speculation: off`"
        elif self.forbidden_by is ForbiddenBy.HEADER:
            param, remedy = SPECULATION_HEADER, "Leave the header out, or ask"
            why = f"The header `{SPECULATION_HEADER}: off` was sent"
        else:
            param, remedy = refused_under_speculation(self.members), "Leave it out, or ask"
            why = f"`{param}` does not work with speculative decoding"
        return NeedsTargetOnlyWorkerError(
            f"{why}, and every worker of `{self.model}` speculates. "
            f"{remedy} the operator for a target-only worker.",
            param=param,
        )

    def prefix_text(self) -> str:
        """The conversation as the client sent it: the text whose KV cache a worker may have kept."""
        found = next((self.members[name] for name in CONVERSATION_MEMBERS if name in self.members), None)
        return self.text if found is None else self.text[found.value_start : found.end]

    def worker_body(self) -> str:
        """The client's body with the edits that metering and policy need."""
        route, tenant = self.endpoint, self.caller.tenant
        edits = policy_edits(
            self.members, tenant.may, tenant=tenant.name, salted=self.salted and route.caches
        )
        edits.update(route.dialect.edits(self.members, is_stream=self.is_stream))
        return edit_members(self.text, self.members, edits) if edits else self.text

    def intent_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.caller.tenant.name,
            "key_id": self.caller.key.key_id,
            "route": self.route,
            "model": self.model,
            "stream": self.is_stream,
            "client": self.client,
            "body_bytes": len(self.text.encode()),
            "content_mode": str(self.caller.tenant.content),
        }
        if self.client_request_id:
            fields["client_request_id"] = self.client_request_id
        if self.batch_line is not None:
            fields["batch"], fields["batch_line"] = self.batch_line
        return fields
