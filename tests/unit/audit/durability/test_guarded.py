"""Every disk the log depends on is monitored, each once."""

from pathlib import Path

from appliance.audit.durability.guarded import LogFiles, _disks
from appliance.infra.settings import AuditSettings

DATA = Path("/var/lib/appliance")
SQLITE = f"sqlite:///{DATA / 'audit.db'}"
POSTGRESQL = "postgresql+pg8000://gateway@db/audit"


def disks(database_url: str, durability: str) -> dict[str, Path]:
    files = LogFiles(database_url=database_url, sealed_head=DATA / "audit.head", spool=Path("/spool"))
    return _disks(files, AuditSettings(durability=durability))


def test_sqlite_lies_in_the_data_directory():
    """One disk, under one name."""
    assert disks(SQLITE, "strict") == {"database": DATA}


def test_with_a_database_server_the_data_directory_is_monitored_by_itself():
    """Heads and keys are there, and gateways cannot continue without room for them."""
    assert disks(POSTGRESQL, "strict") == {"data": DATA}


def test_a_database_elsewhere_does_not_hide_the_data_directory():
    """Each of the three disks is named."""
    assert disks("sqlite:////fast/audit.db", "spool") == {
        "database": Path("/fast"),
        "spool": Path("/spool"),
        "data": DATA,
    }
