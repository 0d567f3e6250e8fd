"""On a real PostgreSQL, as its owner and as a gateway's role."""

import time
from contextlib import closing

import pytest

from appliance.audit.store import SqlAuditStore
from appliance.cli.preflight.audit_database import check_database
from appliance.cli.preflight.check import CheckResult, Inquiry
from appliance.infra.schema import grants
from appliance.infra.settings import load_settings


def asked(url, directory, clock=time.time):  # noqa: TID251 - a root of its own
    overrides = {"audit": {"database_url": url}, "data": {"directory": str(directory)}}
    settings = load_settings(environment={}, overrides=overrides)
    inquiry = Inquiry(settings=settings, settings_file=None, clock=clock)
    return {check.id: check for check in check_database(inquiry)}


@pytest.fixture
def gateway_url(postgres, postgres_url):
    """The same database as a role that has what `appliance audit grants` gives."""
    name = postgres_url.rpartition("/")[2]
    role = f"gateway_{name}"
    postgres.execute(f"CREATE ROLE {role} LOGIN; {grants(role)}", database=name)
    return postgres.url_of(name, role)


def test_a_gateways_role_on_tables_that_are_up_to_date(gateway_url, tmp_path):
    """Everything is well, and nothing is written."""
    checks = asked(gateway_url, tmp_path)
    assert {check.result for check in checks.values()} == {CheckResult.OK}, checks
    assert checks["database.reachable"].seen.startswith("PostgreSQL ")
    with closing(SqlAuditStore(gateway_url)) as store:
        assert store.head().size == 0


def test_the_owner_has_too_many_rights(postgres_url, tmp_path):
    """The owner of the tables can drop their protection."""
    check = asked(postgres_url, tmp_path)["database.writable"]
    assert check.result is CheckResult.WARN
    assert "DELETE on audit_leaves" in check.seen


def test_a_role_without_rights_is_a_failure(postgres, postgres_url, tmp_path):
    """It can read how the tables are, and append nothing."""
    name = postgres_url.rpartition("/")[2]
    role = f"reader_{name}"
    tables = "audit_schema, audit_migrations"
    postgres.execute(f"CREATE ROLE {role} LOGIN; GRANT SELECT ON {tables} TO {role}", database=name)
    check = asked(postgres.url_of(name, role), tmp_path)["database.writable"]
    assert check.result is CheckResult.FAIL
    assert "INSERT on audit_leaves" in check.seen


def test_an_empty_database_is_for_its_owner_to_fill(postgres, tmp_path):
    """A gateway makes no tables there, and neither does this."""
    url = postgres.new_database()
    check = asked(url, tmp_path)["database.schema"]
    assert check.result is CheckResult.FAIL
    assert "upgrade-database" in check.todo
    assert (
        postgres.execute(
            "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'", database=url.rpartition("/")[2]
        )
        == "0"
    )


def test_clocks_that_disagree_are_a_failure(postgres_url, tmp_path):
    """Ours is an hour behind."""
    check = asked(postgres_url, tmp_path, clock=lambda: time.time() - 3600)["database.clock"]  # noqa: TID251
    assert check.result is CheckResult.FAIL
    assert "ahead" in check.seen


def test_a_database_of_another_encoding_is_a_failure(postgres, tmp_path):
    """No gateway would start on it; what has to be done is named, and the rest is not asked."""
    postgres.execute("CREATE DATABASE plain ENCODING 'SQL_ASCII' TEMPLATE template0")
    checks = asked(postgres.url_of("plain"), tmp_path)
    assert checks["database.reachable"].result is CheckResult.FAIL
    assert "has the encoding SQL_ASCII" in checks["database.reachable"].seen
    assert "ENCODING 'UTF8'" in checks["database.reachable"].seen
    assert {check.result for name, check in checks.items() if name != "database.reachable"} == {
        CheckResult.SKIPPED
    }
