"""Every entry that is shown is recorded as read."""

import asyncio
import json
import os
import pwd
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.cli import cli
from appliance.errors import AuditUnavailableError, ConfigurationError
from appliance.infra.os_account import account_name
from appliance.infra.settings import AuditSettings

NO_GATEWAY = "http://127.0.0.1:1"
"""No gateway answers here."""
ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of a gateway that has served one request and stopped."""
    directory = tmp_path / "data"
    directory.mkdir()
    create_signing_key(directory / "audit.key")
    settings = AuditSettings()
    request = {"request_id": "r", "tenant": "t", "key_id": "k", "route": "/v1/completions", "model": "m"}

    async def serve(store: SqlAuditStore) -> None:
        async with AuditLog.open(
            store=store,
            signer=load_signing_key(directory / "audit.key", settings.origin),
            settings=settings,
            sealed_head_path=directory / "audit.head",
            clock=lambda: 1_800_000_000.0,
            version="test",
        ) as log:
            await log.append(
                EntryType.REQUEST_INTENT,
                **request,
                stream=False,
                client="loopback",
                body_bytes=1,
                content_mode="none",
            )
            await log.append(
                EntryType.REQUEST_OUTCOME, **request, outcome="completed", status=200, duration_ms=1
            )

    with closing(SqlAuditStore(f"sqlite:///{directory / 'audit.db'}")) as store:
        asyncio.run(serve(store))
    return directory


def run(data: Path, *words: str):
    """Run a command; an exception is in the result."""
    return CliRunner().invoke(cli, ["audit", *words, "--data", str(data)])


def entries(data: Path) -> list[dict]:
    """Every entry in the log, parsed."""
    with closing(SqlAuditStore(f"sqlite:///{data / 'audit.db'}")) as store:
        return [json.loads(leaf.leaf) for leaf in store.leaves(0, 1000)]


def break_writing(data: Path) -> None:
    """Make every append fail, as with a read-only database or a full disk."""
    with closing(sqlite3.connect(data / "audit.db")) as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON audit_leaves BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )


READS = [
    ("tail", ["tail"], 0, 3),
    ("tail", ["tail", "-n", "2"], 1, 3),
    ("show", ["show", "1"], 1, 2),
    ("receipt", ["receipt", "2"], 2, 3),
]


@pytest.mark.parametrize(("operation", "words", "start", "end"), READS)
def test_every_reading_is_recorded(data, operation, words, start, end):
    """The log has account, range and purpose; the entry itself is not shown."""
    before = entries(data)
    result = run(data, *words, "--purpose", "quarterly review")
    assert result.exit_code == 0, result.output
    assert "quarterly review" not in result.output
    (read,) = entries(data)[len(before) :]
    assert read["type"] == "audit.read"
    shown = {name: read[name] for name in ("actor", "operation", "start", "end", "purpose")}
    assert shown == {
        "actor": ME,
        "operation": operation,
        "start": start,
        "end": end,
        "purpose": "quarterly review",
    }
    assert "key_id" not in read


def test_an_export_is_recorded(data, tmp_path):
    """The entry has the exported range, and the export verifies by the verifier in it."""
    result = run(data, "export", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    read = entries(data)[-1]
    assert (read["operation"], read["start"], read["end"]) == ("export", 0, 3)
    assert "wrote 3 entries" in result.stdout
    verifier = [sys.executable, "-I", tmp_path / "out" / "verify.py"]
    subprocess.run([*verifier, tmp_path / "out", "--key", tmp_path / "out" / "vkey"], check=True)
    assert CliRunner().invoke(cli, ["audit", "verify", "--data", str(data)]).exit_code == 0


@pytest.mark.parametrize("words", [["tail"], ["show", "1"], ["receipt", "1"], ["export", "out"]])
def test_what_cannot_be_recorded_is_not_shown(data, tmp_path, monkeypatch, words):
    """The command fails in one line, prints no entry and leaves no file."""
    monkeypatch.chdir(tmp_path)
    break_writing(data)
    result = run(data, *words)
    assert isinstance(result.exception, AuditUnavailableError)
    assert "--unrecorded" in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert len(entries(data)) == 3


@pytest.mark.parametrize("words", [["tail"], ["show", "1"], ["receipt", "1"], ["export", "out"]])
def test_unrecorded_option_shows_entries_with_a_warning(data, tmp_path, monkeypatch, words):
    """`--unrecorded` shows the entries of a broken log and warns in one line that it is not recorded."""
    monkeypatch.chdir(tmp_path)
    break_writing(data)
    result = run(data, *words, "--unrecorded")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("appliance: the reading is not recorded: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout


def test_reading_is_recorded_locally_if_the_gateway_is_down(data):
    """The command then records it itself, and reports that."""
    result = run(data, "tail", "--url", NO_GATEWAY)
    assert result.exit_code == 0
    assert "this command records the reading instead" in result.stderr
    assert entries(data)[-1]["type"] == "audit.read"


def test_an_account_without_a_name_is_recorded_by_its_number():
    """A process in a container may run as a user id without a name."""
    assert account_name(lambda: 2**31 - 7) == f"uid-{2**31 - 7}"


def test_unrecorded_option_still_records_when_possible(data):
    """If the reading can be recorded, it is, also with `--unrecorded`."""
    assert run(data, "tail", "--unrecorded").exit_code == 0
    assert entries(data)[-1]["type"] == "audit.read"


@pytest.mark.parametrize("purpose", ["two\nlines", "x" * 201])
def test_a_purpose_is_one_line(data, purpose):
    """A purpose that does not fit an entry is refused before anything is read."""
    result = run(data, "tail", "--purpose", purpose)
    assert isinstance(result.exception, ConfigurationError)
    assert result.stdout == ""


def test_reading_of_a_missing_entry_is_not_recorded(data):
    """A request for a missing entry reads nothing."""
    assert isinstance(run(data, "show", "99").exception, ConfigurationError)
    assert len(entries(data)) == 3


def test_a_verification_is_remembered_in_a_state_file(data, tmp_path):
    """The second run reads only what is newer."""
    options = ["--data", str(data), "--state", str(tmp_path / "state"), "--json"]
    first, second = (
        json.loads(CliRunner().invoke(cli, ["audit", "verify", *options]).stdout) for _ in range(2)
    )
    assert (first["verified_before"], second["verified_before"]) == (0, first["size"])
    assert second["verdict"] == first["verdict"] == "valid"
