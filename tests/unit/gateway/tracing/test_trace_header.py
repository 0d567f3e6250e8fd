"""The API reads a client's `traceparent` if requests are traced."""

import pytest
from starlette.requests import Request

from appliance.api.openai import make_call
from appliance.gateway.body import BodyTerms, read_body
from appliance.tenancy import ApiKey, Caller, Tenant

CALLER = Caller(tenant=Tenant(name="acme"), key=ApiKey(key_id="aaaaaaaa", digest="0" * 64))
THEIRS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("traced", "sent", "expected"),
    [
        (True, [THEIRS], THEIRS),
        (True, [], None),
        (True, [THEIRS, THEIRS], None),
        (False, [THEIRS], None),
    ],
)
def test_a_traceparent_is_read_if_requests_are_traced(traced, sent, expected):
    """Sent twice it is ignored, as the standard demands."""
    request = Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"traceparent", each.encode()) for each in sent],
            "client": ("127.0.0.1", 1234),
            "state": {"request_id": "ours", "client_request_id": None},
        }
    )
    body, route = b'{"model":"demo","messages":[]}', "/v1/chat/completions"
    terms = BodyTerms(route=route, tenant="acme", may=frozenset(), salted=True, label_key=bytes(16))
    call = make_call(request, CALLER, body, read_body(body, terms), route, traced=traced)
    assert call.traceparent == expected
