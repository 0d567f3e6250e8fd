"""The connection to PostgreSQL: bounded in time, whole again after an outage, and clear about errors."""

import os
import signal
import subprocess
import sys
import time

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.errors import AuditUnavailableError, ConfigurationError
from appliance.infra.database import first_line, open_database
from appliance.infra.schema import upgrade_database
from tests.grower import Grower
from tests.postgres import private_postgres

READ = EntryType.AUDIT_READ
BUSY_SECONDS = 0.5


@pytest.fixture
def engine(postgres_url):
    opened = open_database(postgres_url, busy_seconds=BUSY_SECONDS)
    yield opened
    opened.dispose()


def _failure(engine, statement):
    with pytest.raises(SQLAlchemyError) as caught, engine.begin() as connection:
        connection.execute(text(statement))
    return first_line(caught.value)


def test_a_statement_that_takes_too_long_is_an_error_in_words(engine):
    """The server ends the statement with a reason; the connection stays usable."""
    assert "statement timeout" in _failure(engine, "SELECT pg_sleep(30)")
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT 1")) == 1


def test_a_lock_that_is_not_given_is_an_error(engine, postgres_url):
    """Another client's long transaction refuses entries instead of blocking them forever."""
    other = open_database(postgres_url, busy_seconds=60)
    with other.begin() as connection:
        connection.execute(text("LOCK TABLE audit_head"))
        assert "timeout" in _failure(engine, "SELECT * FROM audit_head")
    other.dispose()


def test_silent_server_is_an_error_and_its_late_answer_is_discarded(engine):
    """The late answer of a stopped process is not read as that of another statement."""
    with engine.connect() as connection:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(SQLAlchemyError) as caught:
                connection.execute(text("SELECT 'an answer that comes late'"))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert "network error" in first_line(caught.value)
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT 2")) == 2
        assert connection.scalar(text("SELECT pg_backend_pid()")) != pid


def test_client_cut_off_in_a_transaction_does_not_block_others(engine, postgres_url):
    """A crashed gateway holds its lock no longer than a statement may take."""
    gone = engine.connect()
    gone.execute(text("SELECT pg_advisory_xact_lock(6962)"))
    other = open_database(postgres_url, busy_seconds=30)
    with other.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(6962)"))
    other.dispose()
    with pytest.raises(SQLAlchemyError):
        gone.execute(text("SELECT 1"))
    gone.close()


def test_server_restart_does_not_affect_idle_clients(open_store):
    """The next entry finds a new connection by itself; what was there is there."""
    with private_postgres() as postgres:
        upgrade_database(postgres.url)
        store = open_store(postgres.url)
        grower = Grower(store)
        grower.append((READ, None))
        postgres.kill()
        with pytest.raises(AuditUnavailableError) as caught:
            store.head()
        assert "\n" not in str(caught.value)
        postgres.start()
        grower.append((READ, None))
        assert [leaf.index for leaf in store.leaves(0, 10)] == [0, 1]


def test_server_with_fsync_off_is_refused(postgres, postgres_url, open_store):
    """With fsync off every promise of ours would be empty."""
    postgres.execute("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf(); SELECT pg_sleep(0.2)")
    try:
        with pytest.raises(AuditUnavailableError, match="fsync off"):
            open_store(postgres_url)
    finally:
        postgres.execute("ALTER SYSTEM RESET fsync; SELECT pg_reload_conf(); SELECT pg_sleep(0.2)")
    open_store(postgres_url)


def test_wrong_password_is_reported_in_words(postgres, postgres_url, tmp_path):
    """Name and password are checked by SCRAM; the password may come from a file, and is never shown."""
    postgres.execute("CREATE ROLE careful LOGIN PASSWORD 'correct horse'")
    rules = postgres.directory / "data" / "pg_hba.conf"
    trusting = rules.read_text()
    rules.write_text("host all careful 127.0.0.1/32 scram-sha-256\n" + trusting)
    postgres.execute("SELECT pg_reload_conf()")
    try:
        url = postgres_url.replace("//appliance@", "//careful@")
        file = tmp_path / "password"
        file.write_text("correct horse\n")
        deadline = time.monotonic() + 30
        while not (said := _refusal_or_none(url)):
            assert time.monotonic() < deadline, "the rule did not come into force"
        assert "password" in said
        assert _select_one(f"{url}?password_file={file}") == 1
        assert "password authentication failed" in _refusal(url.replace("careful@", "careful:wrong@"))
        assert "wrong" not in _refusal(url.replace("careful@", "careful:wrong@"))
    finally:
        rules.write_text(trusting)
        postgres.execute("SELECT pg_reload_conf()")


def test_a_unix_socket_will_do(postgres, postgres_url):
    """On one machine no port need be open."""
    socket = postgres.directory / f".s.PGSQL.{postgres.port}"
    assert _select_one(f"{postgres_url}?unix_sock={socket}") == 1


def test_a_server_without_tls_is_refused_where_tls_is_asked_for(postgres_url):
    """`require` and stricter do not fall back to clear text; `prefer`, the default, does."""
    assert "SSL" in _refusal(f"{postgres_url}?sslmode=require")
    assert _select_one(f"{postgres_url}?sslmode=disable") == 1


@pytest.fixture(params=["SQL_ASCII", "LATIN1"])
def other_encoding(request, postgres):
    """A database that cannot keep every text; the encoding, and its URL."""
    name = f"other_{request.param.lower()}"
    postgres.execute(f"DROP DATABASE IF EXISTS {name}")
    postgres.execute(f"CREATE DATABASE {name} ENCODING '{request.param}' TEMPLATE template0")
    return request.param, postgres.url_of(name)


def test_a_database_of_another_encoding_is_refused_in_words(other_encoding):
    """Before anything is written to it; the error names the command."""
    encoding, url = other_encoding
    for use in (_select_one, upgrade_database, SqlAuditStore):
        with pytest.raises(ConfigurationError) as caught:
            use(url)
        assert f"has the encoding {encoding}" in str(caught.value)
        assert "recreate it with ENCODING 'UTF8'" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_gateway_ends_with_one_line_on_a_database_of_another_encoding(other_encoding, tmp_path):
    """Not with a traceback at the first name that is not ASCII."""
    encoding, url = other_encoding
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "appliance",
            "gateway",
            "--data",
            str(tmp_path / "data"),
            "--port",
            "0",
            "--admin-port",
            "0",
        ],
        env={"APPLIANCE_AUDIT__DATABASE_URL": url, "APPLIANCE_POOL__URLS": '["http://127.0.0.1:9"]'},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "encoding" in line]
    assert line.startswith("appliance: ")
    assert encoding in line


def test_a_database_that_was_exchanged_for_one_of_another_encoding_is_an_outage(postgres):
    """A gateway that runs refuses to record, as without any, and resumes once the right one is back."""
    url = postgres.new_database()
    name = url.rpartition("/")[2]
    engine = open_database(url, busy_seconds=BUSY_SECONDS)
    with engine.begin() as connection:
        connection.execute(text("SELECT 1"))
    engine.dispose()
    postgres.execute(f"ALTER DATABASE {name} RENAME TO {name}_right")
    postgres.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0")
    assert "has the encoding SQL_ASCII" in _failure(engine, "SELECT 1")
    postgres.execute(f"DROP DATABASE {name}")
    postgres.execute(f"ALTER DATABASE {name}_right RENAME TO {name}")
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT 3")) == 3
    engine.dispose()


def _select_one(url):
    engine = open_database(url, busy_seconds=5)
    try:
        with engine.begin() as connection:
            return connection.scalar(text("SELECT 1"))
    finally:
        engine.dispose()


def _refusal_or_none(url):
    try:
        _select_one(url)
    except SQLAlchemyError as error:
        return first_line(error)
    return None


def _refusal(url):
    with pytest.raises(SQLAlchemyError) as caught:
        _select_one(url)
    return first_line(caught.value)


def test_a_statement_with_parameters_waits_for_the_server_once(engine, monkeypatch):
    """Rows, counts and errors as before; one that cannot be sent leaves nothing for the next statement."""
    query = text("SELECT CAST(:one AS text) AS found UNION ALL SELECT CAST(:two AS text)")
    with engine.begin() as connection:
        driver = connection.connection.dbapi_connection
        waits, wait = [], driver.handle_messages
        monkeypatch.setattr(driver, "handle_messages", lambda context: waits.append(1) or wait(context))
        connection.execute(text("SELECT 1"))
        waits.clear()
        assert connection.execute(query, {"one": "a", "two": None}).scalars().all() == ["a", None]
        assert len(waits) == 1
        with pytest.raises(UnicodeEncodeError), connection.begin_nested():
            connection.execute(query, {"one": "b", "two": "\ud800"})
        with pytest.raises(SQLAlchemyError, match="division by zero"), connection.begin_nested():
            connection.execute(text("SELECT 1 / CAST(:none AS integer)"), {"none": 0})
        with pytest.raises(SQLAlchemyError, match="syntax"), connection.begin_nested():
            connection.execute(text("SELECT :none FROM"), {"none": 0})
        connection.execute(text("CREATE TEMPORARY TABLE kept (value integer)"))
        added = text("INSERT INTO kept SELECT * FROM generate_series(1, CAST(:last AS integer))")
        assert connection.execute(added, {"last": 3}).rowcount == 3
