"""
A private PostgreSQL for a test: a real server from the system's package, on loopback, in its own
directory, with fsync on as it is by default.

Where PostgreSQL is not installed the test is skipped, loudly: `deploy/debian-packages.txt` names
the package.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

from tests import leaks

OWNER = "appliance"
PATIENCE_SECONDS = 60
MISSING = (
    "POSTGRESQL IS NOT INSTALLED, SO NOTHING IS SHOWN ABOUT IT HERE: "
    "install the Debian package `postgresql` (`make setup-dev` as root does)"
)


def find_binaries() -> Path | None:
    """Return the directory that holds `initdb` and `postgres`, the newest version first, or None."""
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_version, reverse=True)
    on_path = shutil.which("initdb")
    found = [*packaged, *([Path(on_path).resolve()] if on_path else [])]
    return next((initdb.parent for initdb in found if (initdb.parent / "postgres").exists()), None)


def _version(initdb: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in initdb.parts[4].split(".") if part.isdigit())


class PrivatePostgres:
    """One server; `private_postgres` makes and removes it."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self._binaries, self.directory = binaries, directory
        # PostgreSQL refuses to run as root.
        self._account = _unprivileged() if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self.port = 0

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the database `postgres`, as the owner of everything."""
        return self.url_of("postgres")

    @property
    def log(self) -> str:
        """The output of the server."""
        return (self.directory / "server.log").read_text(errors="replace")

    def url_of(self, database: str, role: str = OWNER) -> str:
        """SQLAlchemy URL of a database, as some role; no password is asked for."""
        return f"postgresql+pg8000://{role}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        self._databases += 1
        name = f"log{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url_of(name)

    def execute(self, sql: str, *, database: str = "postgres", role: str = OWNER) -> str:
        """Run SQL with psql, each statement by itself; return what it printed, bare."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", role, "-d", database]
        done = subprocess.run(
            [self._binaries / "psql", "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", *where],
            input=sql,
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            message = f"psql: {done.stderr.strip()}"
            raise RuntimeError(message)
        return done.stdout.strip()

    def initialise(self) -> Self:
        """Make the data directory; the server's own writes are synced, making it need not be."""
        if self._account:
            os.chown(self.directory, self._account.pw_uid, self._account.pw_gid)
        command = ["initdb", "-D", "data", "-U", OWNER, "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        self._run(command).check_returncode()
        return self

    def start(self) -> Self:
        """Start the server, again if it was killed, and wait until it answers."""
        assert self._process is None, "it is running"
        self.port = self.port or _free_port()
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", "max_connections=50"]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", "data", "-k", self.directory]
                + [word for setting in settings for word in ("-c", setting)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._as_account(),
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._run(["pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                message = f"PostgreSQL did not start:\n{self.log[-2000:]}"
                raise RuntimeError(message)
            time.sleep(0.05)
        return self

    def kill(self) -> None:
        """End every process of the server at once, as a crash of the machine's kernel would."""
        assert self._process is not None, "it is not running"
        # Stopped first, so that it starts no other while we look for its children.
        self._process.send_signal(signal.SIGSTOP)
        children = _children(self._process.pid)
        for pid in (self._process.pid, *children):
            _kill(pid)
        self._process.wait()
        self._process = None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(map(_is_running, children)):
            assert time.monotonic() < deadline, "a killed process is still there"
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server in order; nothing happens if it is not running."""
        self._end(signal.SIGINT)  # a fast shutdown: sessions are ended, everything is written

    def abandon(self) -> None:
        """End the server without writing what is no longer needed."""
        self._end(signal.SIGQUIT)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[bytes]:
        program, *arguments = command
        return subprocess.run(
            [self._binaries / program, *arguments], capture_output=True, check=False, **self._as_account()
        )

    def _as_account(self) -> dict:
        account = self._account
        who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        return {"cwd": self.directory, **who}


@contextmanager
def private_postgres() -> Iterator[PrivatePostgres]:
    """Start a private server; its files are searched for leaks and removed when the block ends."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(MISSING)
    # In memory where that is possible: hundreds of databases are made and removed in one run.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="appliance-pg-", dir=memory) as directory:
        server = PrivatePostgres(binaries, Path(directory)).initialise()
        try:
            yield server.start()
        finally:
            # Nothing of it is needed any more; stopping it in order would first write it all to disk.
            server.abandon()
            leaks.look_in(server.directory)


def _unprivileged() -> pwd.struct_passwd:
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _children(parent: int) -> list[int]:
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in processes if (stat := _stat(pid)) and int(stat[1]) == parent]


def _is_running(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def _stat(pid: int) -> list[str] | None:
    """State and parent of a process, then the rest; its name may hold anything but ends at `)`."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
