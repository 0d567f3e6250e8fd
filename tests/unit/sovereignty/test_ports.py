"""Which ports a gateway's configuration implies."""

import pytest

from appliance.infra.settings import Settings
from appliance.sovereignty.ports import gateway_ports, picker_ports, pool_ports, spell

WITNESS = {"name": "w", "key": "w+00000000+AAAA"}


def ports(**sections) -> set[int]:
    return set(gateway_ports(Settings.model_validate(sections)))


def test_the_defaults_need_none():
    """A gateway on a SQLite file, with the worker of its own process, opens no other connections."""
    assert ports() == set()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.5:8000", {8000, 8001}),
        ("http://10.0.0.5", {80, 81}),
        ("https://10.0.0.5/", {443, 444}),
        ("http://[::1]:8000", {8000, 8001}),
        ("http://localhost:8000", {8000, 8001}),
        ("http://workers.llm.svc:8000", {8000, 8001, 53}),
    ],
)
def test_workers(url, expected):
    """The port of each, the next one, where it is controlled, and DNS by TCP where the host is a name."""
    assert ports(pool={"urls": [url]}) == expected
    assert ports(pool={"discover": url}) == expected


def test_control_ports_of_the_settings():
    pool = {"urls": ["http://10.0.0.5:8000", "http://10.0.0.6:9000"], "control_port": 7000}
    assert ports(pool=pool) == {8000, 9000, 7000}


@pytest.mark.parametrize(
    ("destination", "expected"), [("10.0.0.7:6514", {6514}), ("siem.bank:10514", {10514, 53})]
)
def test_the_siem(destination, expected):
    """And no port without one."""
    assert ports(audit={"forward": {"destination": destination}}) == expected
    assert ports(audit={"forward": None}) == set()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:////var/lib/appliance/audit.db", set()),
        ("postgresql+pg8000://a:b@10.0.0.9/audit", {5432}),
        ("postgresql://a:p%2Fw@10.0.0.9:6432/audit", {6432}),
        ("postgresql://a@db.bank/audit?sslmode=verify-full", {5432, 53}),
        ("postgresql://a@/audit", {5432}),
        ("postgresql://a@/audit?unix_sock=/run/postgresql/.s.PGSQL.5432", set()),
    ],
)
def test_the_database(url, expected):
    """PostgreSQL's port, unless it is reached by a file."""
    assert ports(audit={"database_url": url}) == expected


def test_witnesses():
    """Those that are asked over HTTP; one whose cosignatures are carried by file needs no port."""
    asked, carried = {**WITNESS, "url": "http://10.0.0.9:8090"}, {**WITNESS, "name": "v"}
    assert ports(audit={"witnesses": [asked, carried]}) == {8090}


def test_time_stamp_authority():
    """If it is asked over HTTP."""
    trusted = {"timestamp_certificate_file": "tsa.pem"}
    assert ports(audit={**trusted, "timestamp_url": "https://tsa.bank/tsr"}) == {443, 53}
    assert ports(audit={**trusted, "timestamp_url": "http://10.0.0.7:3161/"}) == {3161}
    assert ports(audit=trusted) == set()


def test_further_ports():
    """What the operator names."""
    further = {"connect_ports": [4317]}
    assert ports(sovereignty=further, pool={"urls": ["http://10.0.0.5:8000"]}) == {8000, 8001, 4317}


@pytest.mark.parametrize("url", ["http://[", "http://a:notaport", "nonsense"])
def test_invalid_setting_is_left_to_its_owner(url):
    """It is refused there, in that setting's name."""
    assert ports(pool={"urls": [url]}) <= {80, 81, 53}


def test_invalid_database_url_is_ignored():
    """The same for the database."""
    assert ports(audit={"database_url": "nonsense"}) == set()


def test_the_ports_of_a_pool():
    """What a reload may bring in."""
    settings = Settings.model_validate(
        {"pool": {"urls": ["http://a:1", "http://b:2"], "discover": "http://c:3"}}
    )
    assert pool_ports(settings.pool) == {1, 2, 3, 4}


def test_a_picker_needs_workers_and_resolver_only():
    settings = Settings.model_validate(
        {
            "pool": {"discover": "http://vllm.llm.svc:8000"},
            "audit": {"database_url": "postgresql://g@10.0.0.7/audit"},
            "sovereignty": {"connect_ports": [9]},
        }
    )
    assert picker_ports(settings) == {8000, 8001, 53, 9}


def test_ports_are_spelled_as_ranges():
    """Ranges in one piece, in order."""
    assert spell([8000, 53, *range(32768, 61000), 61001]) == "53, 8000, 32768-60999, 61001"
