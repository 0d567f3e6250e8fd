"""A written file reads back unchanged, and mistakes are errors of one line."""

from types import MappingProxyType

import pytest
import yaml
from hypothesis import given

from appliance.errors import ConfigurationError
from appliance.tenancy import (
    ContentPolicy,
    Limits,
    Permission,
    PriorityClass,
    SpeculationPolicy,
    Tenant,
    encode_tenants,
    parse_tenants,
)
from appliance.tenancy.file import parse_policy
from appliance.tenancy.moments import format_moment, parse_moment
from tests.unit.tenancy.states import KEY, MOMENTS, STORED, TENANTS


def parse_one(text):
    (tenant,) = parse_tenants(f"tenants: {{demo: {{{text}}}}}")
    return tenant


@given(TENANTS)
def test_the_tenants_file_reads_back_what_was_written(tenants):
    """`parse_tenants` undoes `encode_tenants`: policy, limits, keys and what happened to them."""
    assert parse_tenants(encode_tenants(tenants)) == tenants


def test_tenant_without_members_has_defaults():
    """Every model, no stored content, no limits, no permissions."""
    assert parse_one("keys: []") == Tenant(name="demo")
    assert parse_one("").may_use("anything")


def test_tenant_of_the_manual_is_parsed():
    tenant = parse_one(
        "models: [demo], priority: interactive, may: [lora, priority], disabled: true, "
        "limits: {requests_per_minute: 60, tokens_per_day: null, by_model: {demo: {concurrent_requests: 2}}}"
    )
    assert tenant == Tenant(
        name="demo",
        models=("demo",),
        priority=PriorityClass.INTERACTIVE,
        may=frozenset({Permission.LORA, Permission.PRIORITY}),
        limits=Limits(
            requests_per_minute=60, by_model=MappingProxyType({"demo": Limits(concurrent_requests=2)})
        ),
        disabled=True,
    )


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("models: ['*']", ContentPolicy.NONE),
        ("content: none", ContentPolicy.NONE),
        ("content: digest", ContentPolicy.DIGEST),
        ("content: encrypted", ContentPolicy.ENCRYPTED),
    ],
)
def test_no_content_is_kept_unless_a_tenant_asks_for_it(line, policy):
    """Nothing is the default."""
    assert parse_one(line).content is policy


@pytest.mark.parametrize("value", ["all", "None", "null", "true", "[]", "1"])
def test_unknown_content_policy_is_refused(value):
    """A typing error must not change what is stored."""
    with pytest.raises(ConfigurationError, match="content must be none, digest or encrypted"):
        parse_one(f"content: {value}")


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
def test_speculation_policy_defaults_to_auto(line, policy):
    assert parse_one(line).speculation is policy


@pytest.mark.parametrize("value", ["on", "true", "1", "0", "~", "OFF ", "never", "[off]", "{}"])
def test_unknown_speculation_policy_is_refused(value):
    """A typing error must not enable or disable speculation for a tenant."""
    quoted = f"'{value}'" if value == "OFF " else value
    with pytest.raises(ConfigurationError, match="speculation must be auto or off"):
        parse_one(f"speculation: {quoted}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("priority: urgent", "priority must be interactive, standard or batch"),
        ("may: [everything]", "may must be priority, lora, remote_media or train_drafts"),
        ("may: lora", "may must be a list of priority, lora, remote_media or train_drafts"),
        ("disabled: 'no'", "disabled must be true or false"),
        ("limits: 60", "limits must be numbers by name"),
        ("limits: {requests_per_second: 1}", "requests_per_second is not a limit"),
        ("limits: {requests_per_minute: -1}", "requests_per_minute must be a whole number"),
        ("limits: {requests_per_minute: true}", "requests_per_minute must be a whole number"),
        ("limits: {requests_per_minute: 1.5}", "requests_per_minute must be a whole number"),
        ("limits: {tokens_per_day: '60'}", "tokens_per_day must be a whole number"),
        (f"limits: {{tokens_per_day: {2**53 + 1}}}", "tokens_per_day must be a whole number"),
        ("limits: {by_model: {demo: {by_model: {}}}}", "model demo: by_model is not a limit"),
        ("limits: {by_model: [demo]}", "by_model must hold limits by the name of a model"),
        ("limits: {by_model: {demo: 5}}", "model demo: limits must be numbers"),
        ('limits: {by_model: {"\\ud800": {}}}', "by_model must hold limits by the name of a model"),
        ("modles: [demo]", "modles is not a known member"),
        (f"models: [{', '.join(f'{n:0>200}m' for n in range(20))}]", "models may have 2048 bytes together"),
        (f"models: [{'m' * 257}]", "models must be a list of names"),
        ('models: ["a\\nb"]', "models must be a list of names"),
        ("models: ['']", "models must be a list of names"),
        (
            f"keys: [{{key_id: {STORED.key_id}, digest: {STORED.digest}, secret: x}}]",
            "secret is not a known member",
        ),
        (f"keys: [{{key_id: {STORED.key_id}, digest: {STORED.digest}, admin: 'no'}}]", "admin must be true"),
        (
            f"keys: [{{key_id: {STORED.key_id}, digest: {STORED.digest}, scopes: [read]}}]",
            "only an admin key has scopes",
        ),
        (
            f"keys: [{{key_id: {STORED.key_id}, digest: {STORED.digest}, admin: true, scopes: []}}]",
            "scopes must be a list of read, tenants, workers, retention or drafts",
        ),
        (
            f"keys: [{{key_id: {STORED.key_id}, digest: {STORED.digest}, admin: true, scopes: [write]}}]",
            "scopes must be read, tenants, workers, retention or drafts",
        ),
        (
            f"keys: [{{key_id: {STORED.key_id}, digest: {STORED.digest}, expires_at: soon}}]",
            "expires_at must be a time such as",
        ),
        (
            f"keys: [{{key_id: {STORED.key_id}, digest: {STORED.digest}, replaces: x}}]",
            "replaces must be the id",
        ),
    ],
)
def test_error_names_the_tenant_and_the_member(line, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        parse_one(line)
    assert str(caught.value).startswith("tenant demo")
    assert "\n" not in str(caught.value)


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
def test_a_malformed_tenants_file_is_a_configuration_error_of_one_line(text):
    """Whatever is wrong with the file, the operator reads one line and no traceback."""
    with pytest.raises(ConfigurationError) as caught:
        parse_tenants(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("models", ["demo", [1], {"demo": 1}, [["demo"]]])
def test_models_of_the_wrong_type_are_refused(models):
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
def test_a_key_that_could_never_match_is_refused_at_start(key_id, digest):
    """A digest that is no SHA-256, or an id that is no key id, fails the start and not a request."""
    with pytest.raises(ConfigurationError) as caught:
        parse_tenants(yaml.safe_dump({"tenants": {"demo": {"keys": [{"key_id": key_id, "digest": digest}]}}}))
    assert KEY[12:20] not in str(caught.value)


def test_a_key_id_of_digits_needs_no_quotes():
    """YAML reads `23456723` as a number; it is a key id all the same."""
    (key,) = parse_one(f"keys: [{{key_id: 23456723, digest: {STORED.digest}}}]").keys
    assert key.key_id == "23456723"


def test_one_key_cannot_belong_to_two_tenants():
    """The same key id twice would make the tenant of a request a matter of luck."""
    text = encode_tenants((Tenant(name="a", keys=(STORED,)), Tenant(name="b", keys=(STORED,))))
    with pytest.raises(ConfigurationError, match="twice"):
        parse_tenants(text)


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "-a", "a" * 64, "a\n", None, 5])
def test_a_tenant_has_a_name_that_is_safe_in_a_metric_and_a_path(name):
    """Lower-case letters, digits, dots, dashes."""
    with pytest.raises(ConfigurationError, match="tenant name"):
        parse_policy(name, {})


@given(MOMENTS.filter(lambda moment: moment is not None))
def test_a_moment_reads_back_what_was_written(moment):
    """`parse_moment` undoes `format_moment`."""
    assert parse_moment("it", format_moment(moment)) == moment


@pytest.mark.parametrize(
    "text",
    ["2027-01-15", "2027-01-15T00:00:00", "2027-01-15T00:00:00Z", "2027-01-15T01:00:00+01:00"],
)
def test_a_moment_is_in_utc_unless_it_says_otherwise(text):
    """Also as YAML itself reads it, without quotes."""
    assert parse_moment("it", text) == 1_799_971_200
    assert parse_moment("it", yaml.safe_load(text)) == 1_799_971_200


@pytest.mark.parametrize("value", ["", "tomorrow", 5, None, [], "1969-12-31", "2027-13-01", "99999-01-01"])
def test_invalid_moment_is_refused(value):
    """In particular a number: seconds and milliseconds look alike."""
    with pytest.raises(ConfigurationError, match="it must be a time such as"):
        parse_moment("it", value)
