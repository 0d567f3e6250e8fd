"""
One request on its way to a worker, parsed as far as the gateway reads it.
"""

from dataclasses import dataclass
from typing import Any

from appliance.errors import NeedsTargetOnlyWorkerError
from appliance.infra.json_members import Member
from appliance.serving.dialects.edits import edit_members
from appliance.serving.dialects.policy import policy_edits, policy_verdicts, refuse_forbidden
from appliance.serving.dialects.routes import ROUTES, Route
from appliance.serving.target_only import ForbiddenBy, refused_under_speculation
from appliance.tenancy import Caller, PriorityClass, SpeculationPolicy

SPECULATION_HEADER = "X-Appliance-Speculation"
PRIORITY_HEADER = "X-Appliance-Priority"
SAID = ("messages", "prompt", "input")
"""The member that holds the conversation, by family of routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, parsed as far as the gateway reads it."""

    request_id: str
    client_request_id: str | None
    """What the client sent as `x-request-id`, echoed to it."""
    caller: Caller
    route: str
    """Path that was called; one of `ROUTES`."""
    model: str
    text: str
    """The body as it came."""
    members: dict[str, Member]
    is_stream: bool
    wants_usage: bool
    """Whether the client itself asked for the usage frame of a stream."""
    client: str
    """Address class of the client, never the address."""
    speculation: SpeculationPolicy = SpeculationPolicy.AUTO
    """What the client asked for in `SPECULATION_HEADER`."""
    priority: PriorityClass = PriorityClass.STANDARD
    """Who goes first where there is not room for all."""
    wants_metrics: bool = False
    """Whether the client asked for the worker's own `metrics`."""
    salted: bool = True
    """Whether a worker keeps apart what it caches of this tenant's prompts."""
    traceparent: str | None = None
    """What the client says of its own trace, as it sent it; not read where requests are not traced."""
    batch_line: tuple[str, int] | None = None
    """The batch and the line of its input that it is, if it is one: work that can wait."""

    @property
    def endpoint(self) -> Route:
        """What was called, and what it becomes at a worker."""
        return ROUTES[self.route]

    @property
    def verdicts(self) -> list[str]:
        """What policy changes in the request."""
        return policy_verdicts(self.members, self.caller.tenant.may)

    def check_policy(self) -> None:
        """
        Refuse what no worker is asked for.

        Raises:
            InvalidRequestError: with the member's name and why.
        """
        route = self.endpoint
        route.dialect.check(self.members)
        refuse_forbidden(self.members, self.caller.tenant.may, carriers=route.carriers)

    @property
    def forbidden_by(self) -> ForbiddenBy | None:
        """What keeps this request from workers with a draft; of several, the one hardest to change."""
        if not self.endpoint.dialect.generates:
            return None
        if self.caller.tenant.speculation is SpeculationPolicy.OFF:
            return ForbiddenBy.TENANT
        if self.speculation is SpeculationPolicy.OFF:
            return ForbiddenBy.HEADER
        return ForbiddenBy.PARAMETER if refused_under_speculation(self.members) else None

    def refusal(self) -> NeedsTargetOnlyWorkerError:
        """The error for a request that must not be speculated where every worker of its model does."""
        param, way_out = None, "Ask"
        if self.forbidden_by is ForbiddenBy.TENANT:
            why = "Your tenant's policy is `speculation: off`"
        elif self.forbidden_by is ForbiddenBy.HEADER:
            param, way_out = SPECULATION_HEADER, "Leave the header out, or ask"
            why = f"The header `{SPECULATION_HEADER}: off` was sent"
        else:
            param, way_out = refused_under_speculation(self.members), "Leave it out, or ask"
            why = f"`{param}` does not work with speculative decoding"
        return NeedsTargetOnlyWorkerError(
            f"{why}, and every worker of `{self.model}` speculates. "
            f"{way_out} the operator for a target-only worker.",
            param=param,
        )

    def beginning(self) -> str:
        """The text whose KV cache a worker may have kept: what is said in the request, as it was sent."""
        said = next((self.members[name] for name in SAID if name in self.members), None)
        return self.text if said is None else self.text[said.value_start : said.end]

    def worker_body(self) -> str:
        """The client's own body, with what metering needs and policy demands."""
        route, tenant = self.endpoint, self.caller.tenant
        edits = policy_edits(
            self.members, tenant.may, tenant=tenant.name, salted=self.salted and route.caches
        )
        edits.update(route.dialect.edits(self.members, is_stream=self.is_stream))
        return edit_members(self.text, self.members, edits) if edits else self.text

    def intent_fields(self) -> dict[str, Any]:
        """The fields of the `request.intent` entry."""
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
