"""Where values come from, and that nothing is ignored."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from appliance.errors import ConfigurationError
from appliance.infra.settings import PREFIX, REMOVED, Section, Settings, load_settings

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


def test_everything_has_a_default():
    """The appliance starts with no file, no variable and no argument."""
    assert load() == Settings()


def test_it_listens_on_loopback_unless_told_otherwise():
    """A first start opens nothing to the network."""
    assert load().api.host == load().worker.host == "127.0.0.1"


def test_the_environment_is_stronger_than_the_file(write):
    """A variable wins over the file, and leaves the file's other fields of that section alone."""
    file = write("api: {port: 1111, drain_seconds: 5}")
    settings = load(file, {"APPLIANCE_API__PORT": "2222"})
    assert (settings.api.port, settings.api.drain_seconds) == (2222, 5)


def test_the_command_line_is_stronger_than_the_environment(write):
    """An override wins over both."""
    file = write("api: {port: 1111, host: 127.0.0.2}")
    settings = load(file, {"APPLIANCE_API__PORT": "2222"}, api={"port": 3333})
    assert (settings.api.port, settings.api.host) == (3333, "127.0.0.2")


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch):
    """`APPLIANCE_*` variables of the process count."""
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
def test_a_variable_means_what_it_says(variable: str, text: str, section: str, field: str, expected: object):
    """The field's type decides how a variable is read, so a name made of digits stays a name."""
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
def test_an_unknown_variable_is_refused(name: str):
    """A typing error must not silently leave a default in force."""
    with pytest.raises(ConfigurationError, match="no setting"):
        load(environment={name: "1"})


def test_variables_of_others_are_left_alone():
    """Only names that start with `APPLIANCE_` are ours."""
    assert load(environment={"PATH": "x", "APPLIANCES": "x", "MY_APPLIANCE_API__PORT": "x"}) == Settings()


@pytest.mark.parametrize("text", ["apy: {port: 1}", "api: {prot: 1}", "8080: {}", "api: {1: 2}"])
def test_an_unknown_section_or_field_is_refused(write, text: str):
    """So is one in the file."""
    with pytest.raises(ConfigurationError):
        load(write(text))


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_refused_with_what_replaces_it(write, name: str):
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
def test_a_broken_file_is_a_configuration_error_of_one_line(write, text: str):
    """The operator reads one line that names the file, and no traceback."""
    file = write(text)
    with pytest.raises(ConfigurationError) as caught:
        load(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_a_configuration_error(tmp_path: Path):
    """A path given by mistake is not the same as no path."""
    with pytest.raises(ConfigurationError, match=r"missing\.yaml"):
        load(tmp_path / "missing.yaml")


def test_a_file_that_is_not_text_is_a_configuration_error(tmp_path: Path):
    """Bytes that are no UTF-8 are named as such."""
    file = tmp_path / "appliance.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError):
        load(file)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_changes_nothing(write, text: str):
    """A file of comments is a file."""
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
def test_a_value_out_of_range_names_its_setting(section: str, field: str, value: object):
    """One line: which setting, and what is wrong with it."""
    with pytest.raises(ConfigurationError, match=rf"^{section}\.{field}: ") as caught:
        load(**{section: {field: value}})
    assert "\n" not in str(caught.value)


def test_a_verdict_must_be_possible():
    """More drafts needed for a verdict than the window holds would mean none, ever."""
    with pytest.raises(ConfigurationError, match=r"monitor\.min_drafts"):
        load(monitor={"min_drafts": 101, "window_drafts": 100})
    assert load(monitor={"min_drafts": 100, "window_drafts": 100}).monitor.min_drafts == 100


def test_settings_cannot_be_changed_once_read():
    """What was read at the start is in force until the end."""
    settings = load()
    with pytest.raises(ValidationError, match="frozen"):
        settings.api = settings.api
    with pytest.raises(ValidationError, match="frozen"):
        settings.api.port = 1


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=str)
def test_every_setting_is_described(section: str, field: str):
    """The reference page is made of these descriptions."""
    description = Settings.model_fields[section].annotation.model_fields[field].description
    assert description
    assert description.rstrip().endswith((".", ")"))


@pytest.mark.parametrize("section", Settings.model_fields)
def test_every_section_is_described_and_closed(section: str):
    """A section says what it is for and refuses fields it does not know."""
    kind = Settings.model_fields[section].annotation
    assert issubclass(kind, Section)
    assert kind.__doc__
    assert kind.model_config["extra"] == "forbid"


def test_no_setting_holds_a_secret():
    """Secrets are paths of files: no field of text is named like a secret."""
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
def test_no_variable_can_crash_the_start(name: tuple[str, str], text: str):
    """Whatever stands in a variable, it is taken or refused with our own error."""
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
        ("oidc", {"algorithms": ["HS256"]}, "algorithms"),
        ("oidc", {"algorithms": ["none"]}, "algorithms"),
        ("oidc", {"algorithms": []}, "algorithms"),
    ],
)  # fmt: skip
def test_settings_of_callers_that_would_not_hold_are_refused(section, fields, words):
    """A start says so, rather than let in more, or fewer, than was meant."""
    with pytest.raises(ConfigurationError, match=words):
        load(**{section: fields})


def test_tenants_of_groups_can_be_set_by_the_environment():
    """As YAML in one variable."""
    settings = load(environment={"APPLIANCE_OIDC__TENANTS": "{ward-7: hospital}"})
    assert settings.oidc.tenants == {"ward-7": "hospital"}


def test_a_strict_egress_check_has_something_to_try():
    """Or no gateway would ever be ready, and nobody would know why."""
    nothing = dict.fromkeys(("tcp_targets", "udp_targets", "metadata_targets"), ())
    with pytest.raises(ConfigurationError, match="strict needs targets"):
        load(egress={"mode": "strict", **nothing})
    assert load(egress={"mode": "strict", "tcp_targets": ()}).egress.mode == "strict"
