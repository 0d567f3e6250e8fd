"""Which members and headers of a request are read, and which are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from appliance.api.auth import address_class
from appliance.api.openai import make_call
from appliance.errors import InvalidRequestError
from appliance.gateway.body import BodyTerms, read_body
from appliance.gateway.call import Call
from appliance.serving.target_only import ForbiddenBy
from appliance.tenancy import ApiKey, Caller, PriorityClass, SpeculationPolicy, Tenant

CALLER = Caller(tenant=Tenant(name="acme"), key=ApiKey(key_id="aaaaaaaa", digest="0" * 64))
OPTED_OUT = Caller(tenant=Tenant(name="careful", speculation=SpeculationPolicy.OFF), key=CALLER.key)
PLAIN = {"model": "demo", "messages": []}
SPECULATION = "X-Appliance-Speculation"
METRICS = "X-Appliance-Metrics"
Headers = tuple[tuple[str, str], ...]


def request(host: str | None = "127.0.0.1", *headers: tuple[str, str]) -> Request:
    """A request as the middleware passes it on."""
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
            "server": ("127.0.0.1", 8080),
            "scheme": "http",
            "client": (host, 1234) if host else None,
            "state": {"request_id": "ours", "client_request_id": "theirs"},
        }
    )


def parsed(
    body: bytes | dict,
    headers: Headers = (),
    caller: Caller = CALLER,
    path: str = "/v1/chat/completions",
) -> Call:
    """Parse a body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return called(request("127.0.0.1", *headers), caller, data, path)


def called(of: Request, caller: Caller, body: bytes, path: str = "/v1/chat/completions") -> Call:
    tenant = caller.tenant
    terms = BodyTerms(route=path, tenant=tenant.name, may=tenant.may, salted=True, label_key=bytes(16))
    return make_call(of, caller, body, read_body(body, terms), path)


def test_the_members_that_the_gateway_uses_are_read():
    """Ids, caller, route, model, stream and whether usage was requested."""
    call = parsed(b'{"model":"demo","messages":[],"stream":true,"stream_options":{"include_usage":true}}')
    assert (call.request_id, call.client_request_id, call.caller) == ("ours", "theirs", CALLER)
    assert (call.route, call.model, call.client) == ("/v1/chat/completions", "demo", "loopback")
    assert (call.parsed.is_stream, call.parsed.wants_usage) == (True, True)


@given(
    st.dictionaries(
        st.text(max_size=8), st.recursive(st.none() | st.text() | st.integers(), st.lists), max_size=5
    )
)
def test_the_body_is_kept_byte_for_byte(extra: dict):
    """Members the gateway does not know are neither read nor changed."""
    body = json.dumps({**extra, "model": "demo", "messages": [], "stream": False, "stream_options": None})
    assert parsed(body.encode()).body == body.encode()


@pytest.mark.parametrize(
    ("more", "is_stream", "wants_usage"),
    [
        ({}, False, False),
        ({"stream": None}, False, False),
        ({"stream": False}, False, False),
        ({"stream": True}, True, False),
        ({"stream": True, "stream_options": None}, True, False),
        ({"stream": True, "stream_options": {}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, True),
    ],
)
def test_an_answer_streams_only_if_requested(more: dict, is_stream: bool, wants_usage: bool):
    """Absent, null and false mean the same."""
    call = parsed({"model": "demo", "messages": [], **more})
    assert (call.parsed.is_stream, call.parsed.wants_usage) == (is_stream, wants_usage)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"\xff", None, "invalid_json"),
        (b"{}", "model", "missing_model"),
        (b'{"model":3,"messages":[]}', "model", "missing_model"),
        (b'{"model":"demo"}', "messages", "missing_required_parameter"),
        (b'{"model":"demo","messages":[],"stream":"true"}', "stream", None),
        (b'{"model":"demo","messages":[],"stream_options":true}', "stream_options", None),
    ],
)
def test_an_invalid_request_names_parameter_and_code(body: bytes, param: str | None, code: str | None):
    with pytest.raises(InvalidRequestError) as caught:
        parsed(body).check_policy()
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("path", "body", "missing"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"messages": []}, None),
        ("/v1/rerank", {"query": "x"}, "documents"),
        ("/v1/score", {"queries": "x", "text_2": "y"}, "documents"),
        ("/v1/score", {"text_1": "x", "text_2": "y"}, None),
        ("/tokenize", {"messages": []}, None),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_a_route_may_have_alternative_members(path: str, body: dict, missing: str | None):
    """One alternative must be complete; the error names what the first one lacks."""
    if missing is None:
        assert parsed({"model": "demo", **body}, path=path).route == path
        return
    with pytest.raises(InvalidRequestError, match=f"`{missing}`"):
        parsed({"model": "demo", **body}, path=path)


def test_a_route_without_streams_ignores_stream():
    """The worker does too."""
    call = parsed({"model": "demo", "input": "x", "stream": True}, path="/v1/embeddings")
    worker_body = b"".join(call.parsed.edit(call.body))
    assert (call.parsed.is_stream, b"stream_options" in worker_body) == (False, False)


@given(st.binary(max_size=60) | st.text('{}[]":,\\model smg', max_size=40).map(str.encode))
def test_any_bytes_are_a_call_or_an_invalid_request(body: bytes):
    try:
        call = parsed(body)
    except InvalidRequestError:
        return
    assert json.loads(call.body)["model"] == call.model


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "loopback"), ("127.8.8.8", "loopback"), ("::1", "loopback"), ("::ffff:127.0.0.1",
        "loopback"),
        ("10.1.2.3", "private"), ("192.168.0.1", "private"), ("172.16.0.1", "private"), ("fd00::1",
        "private"),
        ("fe80::1%eth0", "private"), ("169.254.0.1", "private"), ("::ffff:10.0.0.1", "private"),
        ("9.9.9.9", "public"), ("2620:fe::fe", "public"), ("::ffff:9.9.9.9", "public"),
        ("", "unknown"), ("localhost", "unknown"), ("1.2.3", "unknown"), ("/run/socket", "unknown"),
    ],
)  # fmt: skip
def test_an_address_is_recorded_by_class(host: str, expected: str):
    """One of four values, never the address; an IPv4-mapped address counts as IPv4."""
    assert address_class(host) == expected


def test_a_request_without_an_address_has_class_unknown():
    """A Unix socket has none."""
    body = b'{"model":"m","messages":[]}'
    assert called(request(None), CALLER, body).client == "unknown"


@pytest.mark.parametrize(
    ("headers", "more", "caller", "expected", "param"),
    [
        ((), {}, CALLER, None, None),
        (((SPECULATION, "auto"),), {}, CALLER, None, None),
        (((SPECULATION, "off"),), {}, CALLER, ForbiddenBy.HEADER, SPECULATION),
        (((SPECULATION, " OFF "),), {}, CALLER, ForbiddenBy.HEADER, SPECULATION),
        (((SPECULATION, "off"), (SPECULATION, "off")), {}, CALLER, ForbiddenBy.HEADER, SPECULATION),
        ((), {"min_p": 0.1}, CALLER, ForbiddenBy.PARAMETER, "min_p"),
        (((SPECULATION, "auto"),), {"logit_bias": {"1": 2}}, CALLER, ForbiddenBy.PARAMETER, "logit_bias"),
        (((SPECULATION, "off"),), {"min_p": 0.1}, CALLER, ForbiddenBy.HEADER, SPECULATION),
        ((), {}, OPTED_OUT, ForbiddenBy.TENANT, None),
        (((SPECULATION, "auto"),), {}, OPTED_OUT, ForbiddenBy.TENANT, None),
        (((SPECULATION, "off"),), {"min_p": 0.1}, OPTED_OUT, ForbiddenBy.TENANT, None),
    ],
)
def test_tenant_header_and_parameters_can_forbid_to_speculate(
    headers: Headers, more: dict, caller: Caller, expected: ForbiddenBy | None, param: str | None
):
    """Of several the one that is hardest to change is named; no header overrules a tenant's policy."""
    call = parsed({**PLAIN, **more}, headers=headers, caller=caller)
    assert call.forbidden_by == expected
    if expected is not None:
        assert call.refusal().param == param


@pytest.mark.parametrize(
    ("caller", "headers", "more", "words"),
    [
        (OPTED_OUT, (), {}, ("policy", "`demo`", "Ask the operator")),
        (CALLER, ((SPECULATION, "off"),), {}, (f"`{SPECULATION}: off`", "`demo`", "Leave the header out")),
        (CALLER, (), {"min_p": 0.1}, ("`min_p`", "`demo`", "Leave it out")),
    ],
)
def test_a_refusal_names_the_reason_and_the_remedy(
    caller: Caller, headers: Headers, more: dict, words: tuple[str, ...]
):
    """One line that a client can act on."""
    message = str(parsed({**PLAIN, **more}, headers=headers, caller=caller).refusal())
    assert all(word in message for word in words)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("headers", "expected"),
    [((), False), (((METRICS, "off"),), False), (((METRICS, "on"),), True), (((METRICS, "On"),), True)],
)
def test_metrics_are_kept_if_requested(headers: Headers, expected: bool):
    assert parsed(PLAIN, headers=headers).wants_metrics is expected


@pytest.mark.parametrize("name", [SPECULATION, METRICS])
@pytest.mark.parametrize("values", [("",), ("yes",), ("off, off",), ("off", "auto"), ("on", "off")])
def test_an_unknown_value_of_our_headers_is_refused(name: str, values: tuple[str, ...]):
    """A typo must not change the behaviour silently."""
    with pytest.raises(InvalidRequestError) as caught:
        parsed(PLAIN, headers=tuple((name, value) for value in values))
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize("own", PriorityClass)
@pytest.mark.parametrize("asked", [None, *PriorityClass])
def test_a_request_may_lower_its_priority_but_not_raise_it(own, asked):
    """`X-Appliance-Priority`; without it, the tenant's class."""
    caller = Caller(tenant=Tenant(name="acme", priority=own), key=CALLER.key)
    headers = (("X-Appliance-Priority", asked.upper()),) if asked else ()
    order = list(PriorityClass)
    expected = own if asked is None else order[max(order.index(own), order.index(asked))]
    assert parsed(PLAIN, headers=headers, caller=caller).priority is expected


@pytest.mark.parametrize("values", [("urgent",), ("",), ("batch", "interactive")])
def test_an_unknown_priority_is_refused(values):
    """A typo must not change how long a request waits."""
    with pytest.raises(InvalidRequestError, match="`interactive`") as caught:
        parsed(PLAIN, headers=tuple(("X-Appliance-Priority", value) for value in values))
    assert caught.value.param == "X-Appliance-Priority"


@pytest.mark.parametrize(
    ("body", "path", "expected"),
    [
        (
            b'{"model":"demo","messages":[{"role":"user"}],"seed":1}',
            "/v1/chat/completions",
            '[{"role":"user"}]',
        ),
        (b'{"prompt":"once","model":"demo"}', "/v1/completions", '"once"'),
        (
            b'{"model":"demo","query":"x","documents":["y"]}',
            "/v1/rerank",
            '{"model":"demo","query":"x","documents":["y"]}',
        ),
    ],
)
def test_the_prefix_text_is_the_conversation(body, path, expected):
    """Byte for byte, without the other members, which differ from turn to turn."""
    assert parsed(body, path=path).prefix_text() == expected
