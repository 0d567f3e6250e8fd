"""Promises of `appliance.tenancy`: keys open what they should, and the tenants file is read strictly."""

import random
import string
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigurationError, InvalidApiKeyError
from appliance.installation import add_key
from appliance.tenancy import (
    KEY_FORMAT,
    NAME_FORMAT,
    ApiKey,
    ContentPolicy,
    SpeculationPolicy,
    Tenant,
    TenantDirectory,
    digest_key,
    encode_tenants,
    make_key,
    parse_tenants,
)

KEY, STORED = make_key(random.Random(1).randbytes(37))
OTHER_KEY, OTHER_STORED = make_key(random.Random(2).randbytes(37))
DIRECTORY = TenantDirectory((Tenant(name="demo", keys=(STORED,)),))
KEYS = st.builds(
    lambda raw, admin: make_key(raw, admin=admin)[1], st.binary(min_size=37, max_size=37), st.booleans()
)
NAMES = st.from_regex(NAME_FORMAT, fullmatch=True).filter(lambda name: not name.endswith("\n"))
TENANTS = st.lists(
    st.builds(
        Tenant,
        name=NAMES,
        models=st.lists(st.text(), max_size=3).map(tuple),
        keys=st.lists(KEYS).map(tuple),
        speculation=st.sampled_from(SpeculationPolicy),
        content=st.sampled_from(ContentPolicy),
    ),
    unique_by=lambda tenant: tenant.name,
    max_size=4,
).filter(lambda tenants: _distinct([key.key_id for tenant in tenants for key in tenant.keys]))


def _distinct(ids: list[str]) -> bool:
    return len(ids) == len(set(ids))


@given(st.binary(min_size=37, max_size=37), st.booleans())
def test_a_made_key_has_the_documented_form_and_is_stored_as_a_digest_only(raw: bytes, admin: bool):
    """A key carries its id in clear; what is stored has the id, the digest and no secret."""
    key, stored = make_key(raw, admin=admin)
    match = KEY_FORMAT.fullmatch(key)
    assert match is not None
    assert (stored.key_id, stored.digest, stored.admin) == (match["key_id"], digest_key(key), admin)
    assert match["secret"] not in repr(stored)


def test_a_key_opens_its_own_tenant():
    """The caller of a valid key is the tenant that holds it, with that key."""
    caller = DIRECTORY.authenticate(KEY)
    assert (caller.tenant.name, caller.key) == ("demo", STORED)


def test_every_key_of_a_tenant_opens_it():
    """Rotation needs two keys valid at once."""
    directory = TenantDirectory((Tenant(name="demo", keys=(STORED, OTHER_STORED)),))
    assert {directory.authenticate(key).key.key_id for key in (KEY, OTHER_KEY)} == {
        STORED.key_id,
        OTHER_STORED.key_id,
    }


@pytest.mark.parametrize(
    "presented",
    [
        None, "", "sk-", "Bearer", KEY[:-1], KEY + "A", KEY.upper(), OTHER_KEY, KEY[:12] + OTHER_KEY[12:],
        KEY + "\n",
        "sk-é", "sk-aaaaaaaa-" + "é" * 43, " " + KEY, STORED.digest,
    ],
)  # fmt: skip
def test_whatever_is_wrong_with_a_key_the_words_are_the_same(presented: str | None):
    """Missing, malformed, unknown and wrong keys cannot be told apart."""
    with pytest.raises(InvalidApiKeyError) as caught:
        DIRECTORY.authenticate(presented)
    with pytest.raises(InvalidApiKeyError) as without:
        DIRECTORY.authenticate(None)
    assert str(caught.value) == str(without.value)


@given(st.text())
def test_any_text_as_a_key_is_refused_and_never_an_internal_error(presented: str):
    """A client controls the header: whatever is in it, the answer is a refusal."""
    with pytest.raises(InvalidApiKeyError):
        DIRECTORY.authenticate(presented.encode("utf-8", "replace").decode("latin-1"))


@pytest.mark.parametrize(
    ("models", "asked", "allowed"),
    [
        (("*",), "any", True),
        (("a", "b"), "b", True),
        (("a",), "b", False),
        ((), "a", False),
        (("a",), "*", False),
    ],
)
def test_a_tenant_may_use_the_models_it_is_scoped_to(models: tuple[str, ...], asked: str, allowed: bool):
    """Named models, or all with `*`; an empty list allows none."""
    assert Tenant(name="t", models=models).may_use(asked) is allowed


@given(TENANTS)
def test_the_tenants_file_reads_back_what_was_written(tenants: list[Tenant]):
    """`parse_tenants` undoes `encode_tenants`."""
    assert parse_tenants(encode_tenants(tuple(tenants))) == tuple(tenants)


def test_a_tenant_without_a_list_of_models_may_use_all():
    """`models` left out means every model."""
    (tenant,) = parse_tenants("tenants: {demo: {keys: []}}")
    assert tenant.may_use("anything")


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("models: ['*']", ContentPolicy.NONE),
        ("content: none", ContentPolicy.NONE),
        ("content: digest", ContentPolicy.DIGEST),
        ("content: encrypted", ContentPolicy.ENCRYPTED),
    ],
)
def test_no_content_is_kept_unless_a_tenant_asks_for_it(line: str, policy: ContentPolicy):
    """Nothing is the default."""
    (tenant,) = parse_tenants(f"tenants: {{demo: {{{line}}}}}")
    assert tenant.content is policy


@pytest.mark.parametrize("value", ["all", "None", "null", "true", "[]", "1"])
def test_a_content_policy_nobody_knows_is_refused(value: str):
    """A slip must not keep nothing where something was promised, nor the reverse."""
    with pytest.raises(ConfigurationError, match="content must be none, digest or encrypted"):
        parse_tenants(f"tenants: {{demo: {{content: {value}}}}}")


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("", SpeculationPolicy.AUTO),
        ("speculation: auto", SpeculationPolicy.AUTO),
        ("speculation: off", SpeculationPolicy.OFF),
        ("speculation: 'off'", SpeculationPolicy.OFF),
        ("speculation: false", SpeculationPolicy.OFF),
    ],
)
def test_speculation_is_left_to_the_appliance_unless_a_tenant_is_opted_out(
    line: str, policy: SpeculationPolicy
):
    """YAML reads a bare `off` as false; both mean off."""
    (tenant,) = parse_tenants(f"tenants: {{demo: {{{line}}}}}")
    assert tenant.speculation is policy


def test_a_new_key_leaves_the_policy_of_its_tenant_as_it_was():
    """Rotation must not opt anybody in."""
    before = Tenant(name="demo", models=("a",), keys=(STORED,), speculation=SpeculationPolicy.OFF)
    assert add_key((before,), "demo", OTHER_STORED) == (replace(before, keys=(STORED, OTHER_STORED)),)


@pytest.mark.parametrize("value", ["on", "true", "1", "0", "~", "OFF ", "never", "[off]", "{}"])
def test_a_speculation_policy_nobody_knows_is_refused(value: str):
    """A slip must not leave a tenant speculated that was to be opted out, nor the reverse."""
    quoted = f"'{value}'" if value == "OFF " else value
    with pytest.raises(ConfigurationError, match="speculation must be auto or off"):
        parse_tenants(f"tenants: {{demo: {{speculation: {quoted}}}}}")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "x", "tenants:", "tenants: []", "tenants: {demo: }", "tenants: {Demo: {}}",
        "tenants: {1: {}}",
        "tenants: {demo: {models: 3}}", "tenants: {demo: {keys: [x]}}",
        "tenants: {demo: {keys: [{key_id: a}]}}",
        "tenants: {demo: {keys: 3}}", "tenants: {", "\x00", "tenants: {demo: []}", "tenants: 2026-99-99",
        '{tenants: {"demo\\n": {}}}',
    ],
)  # fmt: skip
def test_a_malformed_tenants_file_is_a_configuration_error_of_one_line(text: str):
    """Whatever is wrong with the file, the operator reads one line and no traceback."""
    with pytest.raises(ConfigurationError) as caught:
        parse_tenants(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "models",
    ["demo", [1], {"demo": 1}, [["demo"]]],
)
def test_models_of_the_wrong_type_are_refused(models: object):
    """`models: demo` must not be read as four models of one letter each."""
    with pytest.raises(ConfigurationError, match="models"):
        parse_tenants(yaml.safe_dump({"tenants": {"demo": {"models": models}}}))


@pytest.mark.parametrize(
    ("key_id", "digest"),
    [
        (1234, STORED.digest), (STORED.key_id, 5), (STORED.key_id, ""), (STORED.key_id, KEY), (["a"],
        STORED.digest),
        (STORED.key_id, "é" * 64), (STORED.key_id, STORED.digest.upper()), ("", STORED.digest),
    ],
)  # fmt: skip
def test_a_key_that_could_never_match_is_refused_at_start(key_id: object, digest: object):
    """A digest that is no SHA-256, or an id that is no key id, fails the start and not a request."""
    with pytest.raises(ConfigurationError):
        parse_tenants(yaml.safe_dump({"tenants": {"demo": {"keys": [{"key_id": key_id, "digest": digest}]}}}))


def test_a_key_id_of_digits_needs_no_quotes():
    """YAML reads `23456723` as a number; it is a key id all the same."""
    (tenant,) = parse_tenants(f"tenants: {{demo: {{keys: [{{key_id: 23456723, digest: {STORED.digest}}}]}}}}")
    assert tenant.keys[0].key_id == "23456723"


def test_one_key_cannot_belong_to_two_tenants():
    """The same key id twice would make the tenant of a request a matter of luck."""
    text = encode_tenants((Tenant(name="a", keys=(STORED,)), Tenant(name="b", keys=(STORED,))))
    with pytest.raises(ConfigurationError, match="twice"):
        parse_tenants(text)


def test_the_words_of_a_refusal_hold_no_part_of_the_key():
    """A key that was mistyped by one letter must not end up in a log by way of its error."""
    with pytest.raises(InvalidApiKeyError) as caught:
        DIRECTORY.authenticate(KEY[:-1] + ("A" if KEY[-1] != "A" else "B"))
    assert KEY[12:20] not in str(caught.value)
    assert STORED.key_id not in str(caught.value)


def test_key_ids_hold_only_letters_and_digits_that_are_safe_in_a_file_name():
    """Base 32 in lower case."""
    assert set(STORED.key_id) <= set(string.ascii_lowercase + "234567")
    assert isinstance(STORED, ApiKey)
