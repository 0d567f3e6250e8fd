"""Connections to a real PostgreSQL over TLS: whom `sslmode` believes."""

import os
import shutil

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from appliance.infra.database import Database
from tests.certificates import LOOPBACK, Authority
from tests.postgres import OWNER, private_postgres

SITE, ANOTHER = Authority("the site"), Authority("another")


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    """A server with a certificate of the site for `localhost`, which accepts TLS alone."""
    with private_postgres() as server:
        files = SITE.issue(tmp_path_factory.mktemp("tls"), "server", LOOPBACK[0])
        data = server.directory / "data"
        for source, name in ((files.certificate, "server.crt"), (files.key, "server.key")):
            shutil.copy(source, data / name)
            os.chown(data / name, data.stat().st_uid, data.stat().st_gid)
            (data / name).chmod(0o600)
        (data / "pg_hba.conf").write_text("local all all trust\nhostssl all all 127.0.0.1/32 trust\n")
        server.execute("ALTER SYSTEM SET ssl = on")
        server.execute("SELECT pg_reload_conf()")
        yield server


@pytest.fixture
def authorities(tmp_path):
    """Files with the certificate of each authority."""
    for name, authority in (("site", SITE), ("another", ANOTHER)):
        (tmp_path / name).write_text(authority.pem)
    return tmp_path


def is_encrypted(url: str) -> bool:
    database = Database(url)
    try:
        with database.engine(5.0).connect() as connection:
            query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            return bool(connection.execute(text(query)).scalar_one())
    finally:
        database.close()


def url_of(postgres, options: str, host: str = "localhost") -> str:
    return f"postgresql://{OWNER}@{host}:{postgres.port}/postgres?{options}"


@pytest.mark.parametrize("mode", ["verify-full", "verify-ca"])
def test_the_authority_of_the_site_is_believed(postgres, authorities, mode):
    assert is_encrypted(url_of(postgres, f"sslmode={mode}&sslrootcert={authorities / 'site'}"))


@pytest.mark.parametrize("mode", ["verify-full", "verify-ca"])
def test_a_server_of_another_authority_is_refused(postgres, authorities, mode):
    with pytest.raises(DBAPIError, match="certificate verify failed"):
        is_encrypted(url_of(postgres, f"sslmode={mode}&sslrootcert={authorities / 'another'}"))


def test_a_server_of_another_name_is_refused(postgres, authorities):
    """Its address is not in the certificate; `verify-ca` does not compare names."""
    root = f"sslrootcert={authorities / 'site'}"
    with pytest.raises(DBAPIError, match=r"certificate verify failed: .*not valid for '127\.0\.0\.1'"):
        is_encrypted(url_of(postgres, f"sslmode=verify-full&{root}", host="127.0.0.1"))
    assert is_encrypted(url_of(postgres, f"sslmode=verify-ca&{root}", host="127.0.0.1"))


def test_a_connection_without_tls_is_refused_by_the_server(postgres):
    assert is_encrypted(url_of(postgres, "sslmode=require"))
    with pytest.raises(DBAPIError, match=r"no pg_hba\.conf entry"):
        is_encrypted(url_of(postgres, "sslmode=disable"))
