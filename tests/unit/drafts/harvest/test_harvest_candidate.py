"""Permission and audit entries decide which requests are candidates."""

from dataclasses import replace

import pytest

from appliance.drafts.harvest.candidate import HarvestCandidate, HarvestFilter, allows, classify, still_allows
from appliance.drafts.harvest.conversation import Skipped
from appliance.tenancy import ContentPolicy, Permission, Tenant
from tests.unit.drafts.harvest.harvest_site import MODEL, WEIGHTS, allowing

WANTED = HarvestFilter(models={MODEL}, weights=WEIGHTS, longest=100)
OUTCOME = {
    "tenant": "acme",
    "route": "/v1/chat/completions",
    "model": MODEL,
    "outcome": "completed",
    "status": 200,
    "prompt_tokens": 60,
    "completion_tokens": 40,
    "tokens_estimated": False,
    "template": "chat-1",
    "context_bucket": "0-1k",
    "weights": WEIGHTS,
    "finish_reason": "stop",
}


def judged(wanted=WANTED, **outcome):
    given = {name: value for name, value in (OUTCOME | outcome).items() if value is not None}
    return classify("r", "acme", given, wanted)


def test_only_permitted_tenants_with_kept_content_are_harvested():
    tenant = allowing("acme")
    assert allows(tenant)
    assert not allows(replace(tenant, may=frozenset(set(Permission) - {Permission.TRAIN_DRAFTS})))
    assert not allows(replace(tenant, content=ContentPolicy.DIGEST))
    assert not allows(replace(tenant, disabled=True))
    assert not allows(Tenant(name="new"))


def test_samples_are_trained_on_only_while_the_tenant_permits_it():
    tenant = replace(allowing("acme"), content=ContentPolicy.NONE)
    assert still_allows(tenant)
    assert not still_allows(replace(tenant, may=frozenset()))


def test_matching_request_becomes_a_candidate_with_its_logged_members():
    assert judged() == HarvestCandidate(
        request_id="r",
        tenant="acme",
        template="chat-1",
        context="0-1k",
        route="/v1/chat/completions",
        prompt_tokens=60,
        completion_tokens=40,
    )
    assert judged(context_bucket=None).context == "0-1k"
    wanted = HarvestFilter(models={MODEL}, weights=WEIGHTS, longest=9000)
    assert judged(wanted, prompt_tokens=3000).tokens == 3040


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ({"tenant": "other"}, Skipped.ALTERED),
        ({"outcome": "client_gone"}, Skipped.NOT_COMPLETED),
        ({"status": 500}, Skipped.NOT_COMPLETED),
        ({"route": "/v1/embeddings"}, Skipped.OTHER_ROUTE),
        ({"model": "demo-lora"}, Skipped.OTHER_MODEL),
        ({"weights": f"sha256:{'8' * 64}"}, Skipped.OTHER_WEIGHTS),
        ({"payload_truncated": True}, Skipped.TRUNCATED),
        ({"finish_reason": "tool_calls"}, Skipped.TOOL_CALL),
        ({"finish_reason": "tool_use"}, Skipped.TOOL_CALL),
        ({"tokens_estimated": True}, Skipped.UNCOUNTED),
        ({"tokens_estimated": None}, Skipped.UNCOUNTED),
        ({"prompt_tokens": 0}, Skipped.UNCOUNTED),
        ({"completion_tokens": 0}, Skipped.NO_ANSWER),
        ({"completion_tokens": 41}, Skipped.TOO_LONG),
    ],
)
def test_other_request_has_one_skip_reason(outcome, why):
    assert judged(**outcome) is why


def test_unrecorded_weights_are_accepted():
    """Gateways know only the weights of workers they started; for others the model name decides."""
    assert isinstance(judged(weights=None), HarvestCandidate)
    other = {"weights": f"sha256:{'8' * 64}"}
    assert isinstance(judged(replace(WANTED, any_weights=True), **other), HarvestCandidate)
