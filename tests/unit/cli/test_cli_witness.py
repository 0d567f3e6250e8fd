"""The commands of witnesses and of the witnessed log report problems in one line."""

import json
import time

import pytest
from typer.testing import CliRunner

from appliance.audit.checkpoint import parse_verifier_keys
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.publisher import Publisher
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import Head, Leaf, SqlAuditStore
from appliance.cli import cli
from appliance.errors import (
    AuditKeyError,
    AuditVerificationError,
    ConfigurationError,
    MalformedCheckpointError,
)
from appliance.infra.settings import AuditSettings

ORIGIN = "appliance.local/audit"
NAME = "w.test/1"


def run(*arguments):
    """Run a command that succeeds and return what it printed."""
    result = CliRunner().invoke(cli, ["audit", *map(str, arguments)])
    assert result.exception is None, result.exception
    return result.stdout


def refused(kind, *arguments):
    """Run a command that fails and return the error."""
    result = CliRunner().invoke(cli, ["audit", *map(str, arguments)])
    assert isinstance(result.exception, kind), result
    message = str(result.exception)
    assert "\n" not in message
    return message


class Data:
    """A data directory with a log that grows and signs on demand."""

    def __init__(self, path):
        self.path = path
        path.mkdir(mode=0o700)
        create_signing_key(path / "audit.key")
        self.tree = CompactRange()
        self.vkey = load_signing_key(path / "audit.key", ORIGIN).vkey
        self.store = SqlAuditStore(f"sqlite:///{path}/audit.db")

    def grow(self, count):
        before, leaves = self.tree.copy(), []
        for _ in range(count):
            leaf = f"leaf {self.tree.size}".encode()
            leaves.append(
                Leaf(
                    index=self.tree.size,
                    leaf=leaf,
                    leaf_hash=hash_leaf(leaf),
                    type="audit.read",
                    request_id=None,
                )
            )
            self.tree.append(hash_leaf(leaf))
        self.store.append(leaves, expected=Head.of(before), new=Head.of(self.tree))
        Publisher(
            store=self.store,
            signer=load_signing_key(self.path / "audit.key", ORIGIN),
            sealed=SealedHead(self.path / "audit.head"),
            settings=AuditSettings(),
            clock=lambda: 1_800_000_000.0,
            signed_size=0,
            now=0.0,
        ).publish(Head.of(self.tree))


@pytest.fixture
def data(tmp_path):
    made = Data(tmp_path / "data")
    yield made
    made.store.close()


@pytest.fixture
def settings(tmp_path):
    """Write a settings file that names these witnesses."""

    def settings_(*witnesses):
        path = tmp_path / "settings.yaml"
        entries = [{"name": name, "key": key} for name, key in witnesses]
        path.write_text(json.dumps({"audit": {"witnesses": entries}}))
        return path

    return settings_


def test_witness_is_created_and_prints_its_keys(tmp_path, data):
    """Both algorithms with the option; a second witness in the same directory is refused."""
    home = tmp_path / "w"
    made = run("witness", "init", home, "--name", NAME, "--log", data.vkey, "--post-quantum")
    assert [key.kind for key in parse_verifier_keys(made)] == [0x04, 0x06]
    assert run("witness", "key", home) == made
    again = ("witness", "init", home, "--name", NAME, "--log", data.vkey)
    assert "never replaced" in refused(AuditKeyError, *again)
    assert "witness init" in refused(ConfigurationError, "witness", "key", tmp_path)
    assert "cannot name" in refused(
        AuditKeyError, "witness", "init", tmp_path / "x", "--name", "a b", "--log", data.vkey
    )


def test_head_is_cosigned_by_file_exchange(tmp_path, data, settings):
    """Export, cosign, import; a witness at another size reports it."""
    home, file = tmp_path / "w", tmp_path / "head.txt"
    key = run("witness", "init", home, "--name", NAME, "--log", data.vkey).strip()
    here = ("--config", settings((NAME, key)), "--data", data.path)
    data.grow(5)
    run("witness", "export-head", file, *here)
    run("witness", "cosign", home, file)
    assert "cosigned 5 entries" in run("witness", "import", file, *here)
    data.grow(3)
    assert "WITNESSED (1 of 1, " in run("witness", "status", *here)
    shown = json.loads(run("witness", "status", "--json", *here))
    assert (shown["cosigned"], shown["known"], len(shown["witnesses"])) == (1, 1, 1)
    assert "5 of 8 entries" in run("witness", "status", *here)
    run("witness", "export-head", file, "--from", 2, *here)
    assert "--from 5" in refused(AuditVerificationError, "witness", "cosign", home, file)
    run("witness", "export-head", file, *here)
    assert file.read_text().startswith("old 5\n")
    run("witness", "cosign", home, file)
    assert "`old SIZE`" in refused(MalformedCheckpointError, "witness", "cosign", home, file)
    run("witness", "import", file, *here)
    assert "8 of 8 entries" in run("witness", "status", *here)


def test_missing_parts_are_reported_in_one_line(tmp_path, data, settings):
    """No log, no head, no file, several witnesses without a choice."""
    file = tmp_path / "head.txt"
    home = tmp_path / "w"
    key = run("witness", "init", home, "--name", NAME, "--log", data.vkey).strip()
    assert "UNWITNESSED (0 of 0)" in run("witness", "status", "--data", data.path)
    assert "no audit log" in refused(ConfigurationError, "witness", "status", "--data", tmp_path / "none")
    assert "nothing was signed" in refused(
        AuditVerificationError, "witness", "export-head", file, "--data", data.path
    )
    assert "cannot read" in refused(ConfigurationError, "witness", "cosign", home, file)
    data.grow(2)
    two = settings((NAME, key), ("w.test/2", key))
    assert "--witness" in refused(
        ConfigurationError, "witness", "export-head", file, "--config", two, "--data", data.path
    )
    assert "bear that name" in refused(
        AuditKeyError, "witness", "status", "--config", two, "--data", data.path
    )
    assert "cannot write" in refused(
        ConfigurationError, "witness", "export-head", tmp_path / "no" / "file", "--data", data.path
    )
    run("witness", "export-head", file, "--data", data.path)
    (home / "logs").write_text(f"{data.vkey.replace('local', 'test')}\n")
    assert "does not match" in refused(AuditKeyError, "witness", "cosign", home, file)


def test_key_is_not_rotated_while_another_gateway_is_alive(data):
    """It would continue to sign with the key in its memory."""
    data.grow(2)
    data.store.beat("elsewhere", time.time())  # noqa: TID251 - the command reads the real clock
    assert "the gateway elsewhere was alive" in refused(ConfigurationError, "rotate-key", "--data", data.path)
    assert load_signing_key(data.path / "audit.key", ORIGIN).vkey == data.vkey
    data.store.beat("elsewhere", 1_000_000_000.0)
    assert data.vkey not in run("rotate-key", "--data", data.path)
    assert load_signing_key(data.path / "audit.key", ORIGIN).vkey != data.vkey
