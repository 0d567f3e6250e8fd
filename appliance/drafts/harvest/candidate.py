"""Filters requests by their audit entries alone.  Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from appliance.drafts.harvest.conversation import Skipped
from appliance.gateway.attribution import context_bucket
from appliance.tenancy import ContentPolicy, Permission, Tenant

ROUTES = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/completions": "text",
        "/v1/messages": "messages",
        "/v1/responses": "responses",
    }
)
"""Routes whose answers can be trained on, and the parser of their bodies."""
POLICY = f"may {Permission.TRAIN_DRAFTS}, content {ContentPolicy.ENCRYPTED}"
"""Condition for harvesting a tenant; recorded in the log and the manifest."""
_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestCandidate:
    request_id: str
    tenant: str
    template: str
    context: str
    route: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def stratum(self) -> tuple[str, str]:
        return self.template, self.context

    @property
    def tokens(self) -> int:
        """As counted by the worker."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestFilter:
    models: Collection[str]
    """Names the target is served under."""
    weights: str
    """Digest of the target's weights."""
    any_weights: bool = False
    """Whether to include answers of other weights."""
    longest: int
    """Maximum tokens of one sample."""


def allows(tenant: Tenant) -> bool:
    return (
        Permission.TRAIN_DRAFTS in tenant.may
        and tenant.content is ContentPolicy.ENCRYPTED
        and not tenant.disabled
    )


def still_allows(tenant: Tenant) -> bool:
    """Whether existing samples of a tenant may still be trained on."""
    return Permission.TRAIN_DRAFTS in tenant.may


def classify(
    request_id: str, tenant: str, outcome: Mapping[str, Any], wanted: HarvestFilter
) -> HarvestCandidate | Skipped:
    """Decide on a request with kept content by the members of its `request.outcome`."""
    prompt, completion = (_count(outcome.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    weights = outcome.get("weights")
    checks = (
        (Skipped.ALTERED, outcome.get("tenant") != tenant),
        (Skipped.NOT_COMPLETED, (outcome.get("outcome"), outcome.get("status")) != ("completed", _OK)),
        (Skipped.OTHER_ROUTE, outcome.get("route") not in ROUTES),
        (Skipped.OTHER_MODEL, outcome.get("model") not in wanted.models),
        # A gateway that did not start the worker does not know its weights: the name decides.
        (Skipped.OTHER_WEIGHTS, not wanted.any_weights and weights not in {None, wanted.weights}),
        (Skipped.TRUNCATED, bool(outcome.get("payload_truncated"))),
        (Skipped.TOOL_CALL, outcome.get("finish_reason") in {"tool_calls", "tool_use", "function_call"}),
        (Skipped.UNCOUNTED, outcome.get("tokens_estimated") is not False or not prompt),
        (Skipped.NO_ANSWER, not completion),
        (Skipped.TOO_LONG, prompt + completion > wanted.longest),
    )
    for reason, applies in checks:
        if applies:
            return reason
    return HarvestCandidate(
        request_id=request_id,
        tenant=tenant,
        template=str(outcome.get("template", "none")),
        context=str(outcome.get("context_bucket") or context_bucket(prompt)),
        route=str(outcome["route"]),
        prompt_tokens=prompt,
        completion_tokens=completion,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
