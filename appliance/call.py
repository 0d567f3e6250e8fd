"""
One request on its way to a worker, parsed as far as the gateway reads it.
"""

import json
from dataclasses import dataclass
from typing import Any

from appliance.errors import NeedsTargetOnlyWorkerError
from appliance.members import Member, replace_member
from appliance.serving.target_only import ForbiddenBy, refused_under_speculation
from appliance.tenancy import Caller, SpeculationPolicy

SPECULATION_HEADER = "X-Appliance-Speculation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, parsed as far as the gateway reads it."""

    request_id: str
    client_request_id: str | None
    """What the client sent as `x-request-id`, echoed to it."""
    caller: Caller
    route: str
    """Path, the same here and on the worker."""
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
    wants_metrics: bool = False
    """Whether the client asked for the worker's own `metrics`."""

    @property
    def forbidden_by(self) -> ForbiddenBy | None:
        """What keeps this request from workers with a draft; of several, the one hardest to change."""
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

    def worker_body(self) -> str:
        """The client's own body, with usage asked for on streams: metering needs it."""
        if not self.is_stream or self.wants_usage:
            return self.text
        given = self.members["stream_options"].value if "stream_options" in self.members else None
        wanted = json.dumps({**(given or {}), "include_usage": True})
        return replace_member(self.text, self.members, "stream_options", wanted)

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
        return fields
