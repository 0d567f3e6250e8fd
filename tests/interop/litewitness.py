"""
litewitness, a witness no one here wrote, as a child process with a new key.

Its own tool to add a log is not needed: the tables are filled as it makes them (torchwood v0.9.0).
"""

import re
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.serving.supervise import free_port
from tests.foreign import INTEROP, LITEWITNESS

NAME = "lite.test/witness"
EMPTY_ROOT = "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
TABLES = """
CREATE TABLE log (origin TEXT PRIMARY KEY, tree_size INTEGER NOT NULL, tree_hash TEXT NOT NULL);
CREATE TABLE key (origin TEXT NOT NULL, key TEXT NOT NULL, FOREIGN KEY(origin) REFERENCES log(origin));
"""
START_SECONDS = 60.0


@dataclass(frozen=True)
class ForeignWitness:
    url: str
    key: str
    """Its verifier key."""


@contextmanager
def litewitness(directory: Path, origin: str, log_key: str) -> Iterator[ForeignWitness]:
    """One that knows a single log, by its Ed25519 key, and has cosigned nothing of it."""
    with closing(sqlite3.connect(directory / "lite.db")) as database:
        database.executescript(TABLES)
        database.execute("INSERT INTO log VALUES (?, 0, ?)", (origin, EMPTY_ROOT))
        database.execute("INSERT INTO key VALUES (?, ?)", (origin, log_key))
        database.commit()
    agent_socket, port = directory / "agent", free_port("127.0.0.1")
    with _running(INTEROP, "agent", agent_socket) as agent:
        fingerprint = agent.stdout.readline().strip()
        options = [f"-name={NAME}", f"-db={directory / 'lite.db'}", f"-ssh-agent={agent_socket}"]
        with _running(LITEWITNESS, *options, f"-key={fingerprint}", f"-listen=127.0.0.1:{port}") as witness:
            lines = []
            for line in witness.stdout:
                lines.append(line)
                if "msg=listening" in line:
                    break
            found = re.search(r'vkey="?([^"\s]+)', "".join(lines))
            assert found, lines
            _await_listener(port)
            yield ForeignWitness(url=f"http://127.0.0.1:{port}", key=found[1])


@contextmanager
def _running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _await_listener(port: int) -> None:
    """It says that it listens a moment before it does."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            return
