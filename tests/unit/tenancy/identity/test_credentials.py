"""One credential in a request, however it was sent."""

import pytest

from appliance.tenancy.identity.credentials import is_token, presented
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError

KEY = "sk-aaaaaaaa-" + "x" * 43


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {KEY}")],
        [("authorization", f"bearer  {KEY} ")],
        [("x-api-key", KEY)],
        [("api-key", KEY)],
        [("x-api-key", KEY), ("content-type", "application/json"), ("authorization", f"Bearer {KEY}")],
        [("api-key", KEY), ("x-api-key", KEY), ("x-api-key", f" {KEY}")],
    ],
)
def test_a_key_is_read_from_the_header_each_client_sends_it_in(headers):
    """OpenAI's, Anthropic's and Azure's; more than one may say the same."""
    assert presented([(name.encode(), value.encode()) for name, value in headers]) == KEY


@pytest.mark.parametrize(
    "headers", [[], [("x-api-key", "")], [("authorization", "Bearer ")], [("cookie", KEY)]]
)
def test_headers_without_credential_have_none(headers):
    assert presented([(name.encode(), value.encode()) for name, value in headers]) is None


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY + "y")],
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")],
        [("api-key", ""), ("x-api-key", KEY)],
    ],
)
def test_headers_that_disagree_are_refused(headers):
    """Neither is chosen: a proxy and the gateway might choose differently."""
    with pytest.raises(RefusedCallerError) as refusal:
        presented([(name.encode(), value.encode()) for name, value in headers])
    assert refusal.value.reason is RefusalReason.CREDENTIALS_DISAGREE


@pytest.mark.parametrize("value", [f"Basic {KEY}", KEY, "Digest x", "", "Bearer\xa0x"])
def test_another_scheme_is_refused(value):
    """Only `Bearer` is ours."""
    with pytest.raises(RefusedCallerError):
        presented([(b"authorization", value.encode("latin-1"))])


def test_non_text_credential_is_an_unknown_key():
    assert presented([(b"x-api-key", b"\xff\xfe")]) == "\xff\xfe"


def test_tokens_and_keys_differ_by_form():
    assert is_token("eyJhbGciOiJFUzI1NiJ9.e30.c2ln")
    for other in (KEY, "eyJhbGciOiJFUzI1NiJ9", "eyJh.e30", "eyJh.a.b.c.d", "abc.def.ghi", ""):
        assert not is_token(other)
