"""
One request on its way to a worker, parsed as far as the gateway reads it.
"""

import json
from dataclasses import dataclass
from typing import Any

from appliance.members import Member, replace_member
from appliance.tenancy import Caller


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
            "content_mode": "none",
        }
        if self.client_request_id:
            fields["client_request_id"] = self.client_request_id
        return fields
