"""Sources of settings and their precedence; unknown names are refused."""

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from appliance.errors import ConfigurationError
from appliance.infra.settings import PREFIX, REMOVED, Section, Settings, load_settings
from docs.docstrings import field_docstrings

FIELDS = [
    (section, field)
    for section, information in Settings.model_fields.items()
    for field in information.annotation.model_fields
]


@pytest.fixture
def write(tmp_path: Path):
    """Write a settings file and return its path."""

    def _write(text: str) -> Path:
        path = tmp_path / "appliance.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def load(file: Path | None = None, environment: dict | None = None, **overrides: dict) -> Settings:
    """Load without reading this process's own environment."""
    return load_settings(file, environment=environment or {}, overrides=overrides)


def test_every_setting_has_a_default():
    assert load() == Settings()


def test_servers_listen_on_loopback_by_default():
    assert load().api.host == load().worker.host == "127.0.0.1"


def test_environment_overrides_file(write):
    """A variable replaces its field and leaves the section's other fields."""
    file = write("api: {port: 1111, drain_seconds: 5}")
    settings = load(file, {"APPLIANCE_API__PORT": "2222"})
    assert (settings.api.port, settings.api.drain_seconds) == (2222, 5)


def test_command_line_overrides_environment_and_file(write):
    file = write("api: {port: 1111, host: 127.0.0.2}")
    settings = load(file, {"APPLIANCE_API__PORT": "2222"}, api={"port": 3333})
    assert (settings.api.port, settings.api.host) == (3333, "127.0.0.2")


def test_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("APPLIANCE_LOG__LEVEL", "debug")
    assert load_settings().log.level == "debug"


@pytest.mark.parametrize(
    ("variable", "text", "section", "field", "expected"),
    [
        ("APPLIANCE_API__PORT", "8081", "api", "port", 8081),
        ("APPLIANCE_API__KEEP_ALIVE_SECONDS", "2.5", "api", "keep_alive_seconds", 2.5),
        ("APPLIANCE_WORKER__DRAFT", "null", "worker", "draft", None),
        ("APPLIANCE_WORKER__EAGER", "true", "worker", "eager", True),
        ("APPLIANCE_WORKER__MAX_MODEL_LEN", "2048", "worker", "max_model_len", 2048),
        ("APPLIANCE_WORKER__SERVED_NAME", "70", "worker", "served_name", "70"),
        ("APPLIANCE_WORKER__SERVED_NAME", "007", "worker", "served_name", "007"),
        ("APPLIANCE_WORKER__SERVED_NAME", "on", "worker", "served_name", "on"),
        ("APPLIANCE_WORKER__SERVED_NAME", "2026-11-20", "worker", "served_name", "2026-11-20"),
        ("APPLIANCE_WORKER__SERVED_NAME", "2026-99-99", "worker", "served_name", "2026-99-99"),
        ("APPLIANCE_WORKER__SERVED_NAME", "a: b", "worker", "served_name", "a: b"),
        ("APPLIANCE_DATA__DIRECTORY", "2026-11-20", "data", "directory", Path("2026-11-20")),
        ("APPLIANCE_AUDIT__DATABASE_URL", "postgresql://a@b/c", "audit", "database_url", "postgresql://a@b/c"),
        ("APPLIANCE_POOL__URLS", "[http://a:1, http://b:2]", "pool", "urls", ("http://a:1", "http://b:2")),
        ("APPLIANCE_WORKER__DRAFT_TOKEN_SCHEDULE", "[[1, 8, 3]]", "worker", "draft_token_schedule", ((1,
        8, 3),)),
        ("appliance_api__port".upper(), "8081", "api", "port", 8081),
    ],
)  # fmt: skip
def test_field_type_decides_how_a_variable_is_parsed(
    variable: str, text: str, section: str, field: str, expected: object
):
    """A name of digits stays a name."""
    assert getattr(getattr(load(environment={variable: text}), section), field) == expected


@pytest.mark.parametrize(
    "name",
    [
        "APPLIANCE_PORT",
        "APPLIANCE_API_PORT",
        "APPLIANCE_",
        "APPLIANCE_APU__PORT",
        "APPLIANCE___PORT",
        "APPLIANCE_API__PROT",
    ],
)
def test_unknown_variable_is_refused(name: str):
    """A typing error must not leave a default in force."""
    with pytest.raises(ConfigurationError, match="not a setting"):
        load(environment={name: "1"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("api: {prot: 1}", "api.prot is not a setting; did you mean api.port?"),
        ("apy: {port: 1}", "apy is not a setting; did you mean api?"),
        ("api: {level: debug}", "api.level is not a setting; did you mean log.level?"),
        ("port: {}", "port is not a setting; did you mean api.port?"),
        (
            "audit: {forward: {destination: '10.0.0.5:514', fromat: cef}}",
            "audit.forward.fromat is not a setting; did you mean audit.forward.format?",
        ),
        ("api: {zzzzzz: 1}", "api.zzzzzz is not a setting; `appliance config` lists all of them"),
    ],
)
def test_setting_spelt_like_another_names_that_one(write, text: str, expected: str):
    with pytest.raises(ConfigurationError) as caught:
        load(write(text))
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["APPLIANCE_API_PORT", "APPLIANCE_APU__PORT"])
def test_variable_spelt_like_another_names_that_one(name: str):
    with pytest.raises(
        ConfigurationError, match=f"^{name} is not a setting; did you mean APPLIANCE_API__PORT"
    ):
        load(environment={name: "1"})


def test_all_problems_are_reported_at_once(write):
    """One line each, whatever is wrong: a variable, a name, a removed setting, a value."""
    file = write(
        "api: {prot: 1, port: 70000}\nmonitor: {margin: 0.1, collapsed_below: 0}\nlog: {level: loud}"
    )
    with pytest.raises(ConfigurationError) as caught:
        load(file, {"APPLIANCE_API_PORT": "1", "APPLIANCE_TLS__CERTIFICATE_FILE": "/c.pem"})
    problems = str(caught.value).splitlines()
    names = [problem.split(" ")[0].rstrip(":") for problem in problems]
    assert set(names) == {
        *("APPLIANCE_API_PORT", "tls", "api.prot", "api.port"),
        *("monitor.margin", "monitor.collapsed_below", "log.level"),
    }


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=str)
def test_value_of_a_wrong_type_is_one_problem(section: str, field: str):
    with pytest.raises(ConfigurationError) as caught:
        load(**{section: {field: object()}})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("section", "field", "value", "expected"),
    [
        ("pool", "urls", 5, "pool.urls: should be a list"),
        ("audit", "forward", "siem:514", "audit.forward: should be a section with named values"),
        ("api", "port", "web", "api.port: should be a whole number"),
        ("api", "port", 80.5, "api.port: should be a whole number"),
        ("api", "port", 70_000, "api.port: should be less than or equal to 65535"),
        ("api", "host", ["a"], "api.host: should be text"),
        ("console", "enabled", "perhaps", "console.enabled: should be true or false"),
        ("monitor", "interval_seconds", "soon", "monitor.interval_seconds: should be a number"),
        ("log", "level", "loud", "log.level: should be 'debug', 'info', 'warning' or 'error'"),
        ("worker", "model", 5, "worker.model: should be a path"),
    ],
)
def test_wrong_value_is_told_what_it_should_be(section: str, field: str, value: object, expected: str):
    with pytest.raises(ConfigurationError) as caught:
        load(**{section: {field: value}})
    assert str(caught.value) == expected


@pytest.mark.parametrize("section", list(Settings.model_fields))
def test_no_message_has_the_words_of_the_validator(section: str):
    """Tuples, models and input are words of the program."""
    for field in Settings.model_fields[section].annotation.model_fields:
        for value in (object(), "", 1.5, [[]], {"x": None}, None):
            try:
                load(**{section: {field: value}})
            except ConfigurationError as error:
                for line in str(error).splitlines():
                    assert not re.search(r"Input|tuple|instance|unpackable|valid dictionary|NoneType", line)


def test_variables_without_our_prefix_are_ignored():
    assert load(environment={"PATH": "x", "APPLIANCES": "x", "MY_APPLIANCE_API__PORT": "x"}) == Settings()


@pytest.mark.parametrize("text", ["apy: {port: 1}", "api: {prot: 1}", "8080: {}", "api: {1: 2}"])
def test_unknown_section_or_field_in_the_file_is_refused(write, text: str):
    with pytest.raises(ConfigurationError):
        load(write(text))


@pytest.mark.parametrize("name", REMOVED)
def test_removed_setting_is_refused_with_its_replacement(write, name: str):
    section, field = name.split(".")
    assert (section, field) not in FIELDS
    for source in (
        {"file": write(f"{section}: {{{field}: 1}}")},
        {"environment": {f"{PREFIX}{section}__{field}".upper(): "1"}},
    ):
        with pytest.raises(ConfigurationError, match=rf"^{name} is no longer a setting: ") as caught:
            load(**source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "api: {",
        "[]",
        "api",
        "api: 3",
        "api:\n  - port",
        "api: 2026-99-99",
        "a: &x [*x",
        "\x00",
        "? [a]\n: b",
        "api: {[]: 1}",
    ],
)
def test_broken_file_is_a_configuration_error_of_one_line(write, text: str):
    """The line names the file."""
    file = write(text)
    with pytest.raises(ConfigurationError) as caught:
        load(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_missing_file_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"missing\.yaml"):
        load(tmp_path / "missing.yaml")


def test_file_that_is_not_utf8_is_a_configuration_error(tmp_path: Path):
    file = tmp_path / "appliance.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError):
        load(file)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_empty_file_changes_nothing(write, text: str):
    assert load(write(text)) == Settings()


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("api", "port", 70000), ("api", "port", "http"), ("api", "max_body_bytes", 10), ("api",
        "keep_alive_seconds", 0),
        ("worker", "draft_tokens", 0), ("worker", "draft_tokens", 17), ("worker", "gpu_memory_fraction", 1.5),
        ("worker", "method", "medusa"), ("worker", "dtype", "int4"), ("log", "level", "LOUD"), ("audit",
        "queue_entries", 0),
        ("monitor", "collapsed_below", 0.5), ("pool", "urls", 3),
    ],
)  # fmt: skip
def test_value_out_of_range_names_its_setting(section: str, field: str, value: object):
    """One line: the setting and the error."""
    with pytest.raises(ConfigurationError, match=rf"^{section}\.{field}: ") as caught:
        load(**{section: {field: value}})
    assert "\n" not in str(caught.value)


def test_settings_are_frozen():
    settings = load()
    with pytest.raises(ValidationError, match="frozen"):
        settings.api = settings.api
    with pytest.raises(ValidationError, match="frozen"):
        settings.api.port = 1


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=str)
def test_every_setting_has_a_description(section: str, field: str):
    """The reference page is generated from descriptions."""
    description = field_docstrings(Settings.model_fields[section].annotation)[field]
    assert description.rstrip().endswith((".", ")"))


@pytest.mark.parametrize("section", Settings.model_fields)
def test_every_section_has_a_docstring_and_forbids_unknown_fields(section: str):
    kind = Settings.model_fields[section].annotation
    assert issubclass(kind, Section)
    assert kind.__doc__
    assert kind.model_config["extra"] == "forbid"


def test_secrets_are_paths_of_files():
    for section, field in FIELDS:
        kind = Settings.model_fields[section].annotation.model_fields[field].annotation
        secret = any(word in field for word in ("secret", "password", "token_file", "key"))
        assert not secret or Path in {kind, *get_args(kind)} or field == "keep_alive_seconds"


@given(
    st.sampled_from(FIELDS),
    st.text(max_size=8)
    | st.sampled_from(["[", "{a: ", "!!python/object:x", "2026-99-99", "&a *a", "*", "1:60"]),
)
@example(("egress", "control"), "\n")
def test_any_variable_is_parsed_or_refused_with_a_configuration_error(name: tuple[str, str], text: str):
    section, field = name
    try:
        settings = load(environment={f"{PREFIX}{section}__{field}".upper(): text})
    except ConfigurationError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both ways are fine
    else:
        assert isinstance(settings, BaseModel)


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("tls", {"certificate_file": "c.pem"}, "come together"),
        ("tls", {"key_file": "c.key"}, "come together"),
        ("tls", {"command_key_file": "c.key"}, "come together"),
        ("tls", {"client_ca_file": "ca.pem"}, "needs TLS"),
        ("tls", {"require_client_certificate": "true"}, "client_ca_file"),
        ("tls", {"client_tenants": {"cn:a": "a"}}, "client_ca_file"),
        (
            "tls",
            {
                "certificate_file": "c.pem", "key_file": "c.key", "client_ca_file": "ca.pem",
                "client_tenants": {"billing": "a"},
            },
            "starts with",
        ),
        ("oidc", {"jwks_file": "k.json", "issuer": "i"}, "issuer and audience"),
        ("oidc", {"jwks_file": "k.json", "audience": "a"}, "issuer and audience"),
        ("oidc", {"admin_claim": "roles"}, "come together"),
        ("oidc", {"admin_values": ["x"]}, "come together"),
        ("oidc", {"manage_values": ["x"]}, "come together"),
        ("oidc", {"manage_claim": "groups"}, "come together"),
        (
            "oidc",
            {"admin_claim": "roles", "admin_values": ["x"], "admin_scopes": {"y": ["read"]}},
            "y is not one of admin_values",
        ),
        ("oidc", {"admin_scopes": {"x": ["all"]}}, "'read', 'tenants'"),
        ("oidc", {"algorithms": ["HS256"]}, "algorithms"),
        ("oidc", {"algorithms": ["none"]}, "algorithms"),
        ("oidc", {"algorithms": []}, "algorithms"),
    ],
)  # fmt: skip
def test_contradicting_authentication_settings_are_refused(section, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        load(**{section: fields})


def test_mapping_is_set_by_the_environment_as_yaml():
    settings = load(environment={"APPLIANCE_OIDC__TENANTS": "{ward-7: hospital}"})
    assert settings.oidc.tenants == {"ward-7": "hospital"}


def test_strict_egress_check_needs_targets():
    """Without targets no gateway would become ready."""
    nothing = dict.fromkeys(("tcp_targets", "udp_targets", "metadata_targets"), ())
    with pytest.raises(ConfigurationError, match="strict needs targets"):
        load(egress={"mode": "strict", **nothing})
    assert load(egress={"mode": "strict", "tcp_targets": ()}).egress.mode == "strict"
