"""
The postgres profile of `deploy/compose.yaml`, with Debian's PostgreSQL in place of the official image.
"""

from collections.abc import Iterator

import pytest

from tests.deploy.compose_project import START_SECONDS, ComposeProject, compose_project
from tests.deploy.conftest import POSTGRES, build_postgres

URL = "postgresql://gateway@postgres/audit?password_file=/run/secrets/database-gateway-password"


@pytest.fixture(scope="module")
def project(images, build_cache) -> Iterator[ComposeProject]:
    """Gateway and database, as the manual says to bring them up; no worker is needed for that."""
    build_postgres(build_cache, images.engine)
    with compose_project(
        images, "postgres", {"POSTGRES_IMAGE": POSTGRES, "APPLIANCE_DATABASE_URL": URL}
    ) as project:
        project.compose("run", "--rm", "database", seconds=START_SECONDS)
        project.compose("up", "--detach", seconds=START_SECONDS)
        yield project.with_key()


def test_the_log_is_in_the_database(project):
    """The gateway writes it as a role without rights to change it, and the verifier finds it whole."""
    assert project.ask("/v1/models") == (200, {"object": "list", "data": []})
    assert "valid and complete" in project.appliance("gateway", "audit", "verify").stdout
    query = "SELECT count(*) > 0 FROM audit_leaves"
    psql = ("psql", "-U", "audit_owner", "-d", "audit", "-Atc", query)
    assert project.engine.docker("exec", project.name("postgres"), *psql) == "t"


def test_the_database_asks_for_the_password(project):
    """Every network client needs one, and the gateway's role cannot change an entry."""
    connect = (
        "import sys; from sqlalchemy import text; from appliance.infra.database import open_database\n"
        "with open_database(sys.argv[1], busy_seconds=10).begin() as connection:\n"
        "    connection.execute(text('DELETE FROM audit_leaves'))"
    )
    run = ("docker", "exec", project.name("gateway"), "/opt/appliance/bin/python", "-c", connect)
    refused = project.engine.run(*run, URL.partition("?")[0], check=False)
    assert refused.returncode != 0
    assert "password" in refused.stderr
    denied = project.engine.run(*run, URL, check=False)
    assert "permission denied" in denied.stderr
