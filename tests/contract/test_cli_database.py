"""`appliance audit upgrade-database | grants | migrate`, as an operator runs them."""

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.gateway_name import GatewayName
from tests.audit_log import ORIGIN, intent, outcome, prepare
from tests.command import run_command
from tests.writer_process import open_gateway


@pytest.fixture
def appliance(tmp_path, monkeypatch):
    """Run the command; return its exit status, what it printed, and what it complained of."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        done = run_command(*words, APPLIANCE_AUDIT__ORIGIN=ORIGIN)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
async def directory(tmp_path, open_store):
    """A data directory with a log that was closed in order."""
    directory = tmp_path / "appliance"
    prepare(directory)
    async with open_gateway(directory, open_store(f"sqlite:///{directory / 'audit.db'}"), "one") as log:
        await log.append(EntryType.REQUEST_INTENT, **intent("r1"))
        await log.append(EntryType.REQUEST_OUTCOME, **outcome("r1"))
    return directory


async def test_a_log_moves_to_postgresql_by_the_commands_of_the_manual(
    appliance, directory, postgres, open_store
):
    """Make the tables as owner, print the rights, copy as the gateway: the copy verifies."""
    url = postgres.new_database()
    code, _, complaint = appliance("audit", "migrate", "--data", directory, "--to", url)
    assert code == 1
    assert complaint.startswith("appliance: ")
    assert "run `appliance audit upgrade-database` as the role that owns it" in complaint
    assert appliance("audit", "upgrade-database", "--url", url)[0] == 0
    code, rights, _ = appliance("audit", "grants", "--role", "newcomer")
    assert code == 0
    database = url.rpartition("/")[2]
    postgres.execute(f"CREATE ROLE newcomer LOGIN; {rights}", database=database)
    narrow = postgres.url_of(database, role="newcomer")
    code, said, _ = appliance("audit", "migrate", "--data", directory, "--to", narrow)
    assert code == 0
    assert "copied 3 entries" in said
    assert open_store(narrow).head() == open_store(f"sqlite:///{directory / 'audit.db'}").head()
    code, said, complaint = appliance("audit", "migrate", "--data", directory, "--to", narrow)
    assert (code, "empty database" in complaint) == (1, True)


async def test_a_log_in_use_is_not_copied(appliance, directory, tmp_path):
    """While the gateway runs, the copy would be old before it is finished."""
    held = GatewayName.hold(directory / "gateway.id")
    target = f"sqlite:///{tmp_path / 'copy.db'}"
    code, _, complaint = appliance("audit", "migrate", "--data", directory, "--to", target)
    held.release()
    assert code == 1
    assert "another gateway runs" in complaint
    assert not (tmp_path / "copy.db").exists()
    assert appliance("audit", "migrate", "--data", directory, "--to", target)[0] == 0


def test_directory_without_a_log_is_reported(appliance, tmp_path):
    """A wrong --data is not taken for an empty log."""
    code, _, complaint = appliance("audit", "migrate", "--data", tmp_path, "--to", "sqlite:///copy.db")
    assert (code, "there is no audit log" in complaint) == (1, True)


async def test_tables_and_rights_are_made_in_one_step(appliance, directory, postgres):
    """As a container does that has no psql: the role can then append to the log, and not change it."""
    url = postgres.new_database()
    database = url.rpartition("/")[2]
    postgres.execute("CREATE ROLE granted LOGIN", database=database)
    assert appliance("audit", "upgrade-database", "--url", url, "--grant-to", "granted")[0] == 0
    assert appliance("audit", "upgrade-database", "--url", url, "--grant-to", "granted")[0] == 0
    narrow = postgres.url_of(database, role="granted")
    assert appliance("audit", "migrate", "--data", directory, "--to", narrow)[0] == 0
    with pytest.raises(Exception, match="permission denied"):
        postgres.execute("SET ROLE granted; DELETE FROM audit_leaves", database=database)


def test_a_file_has_no_roles(appliance, tmp_path):
    """A database without roles refuses rights before it creates anything."""
    url = f"sqlite:///{tmp_path / 'log.db'}"
    code, _, complaint = appliance("audit", "upgrade-database", "--url", url, "--grant-to", "gateway")
    assert (code, "leave --grant-to out" in complaint) == (1, True)
    assert not (tmp_path / "log.db").exists()
