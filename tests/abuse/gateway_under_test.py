"""
A gateway process under attack: its memory, its answers to other clients, its audit log.
"""

import asyncio
import contextlib
import json
import resource
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from appliance.audit.entry import decode
from appliance.audit.store import SqlAuditStore
from demo.process import ApplianceProcess
from tests.fakes import FakeWorker, chat, until

MIB = 2**20
PATIENT = aiohttp.ClientTimeout(total=60)
"""The key of an honest client, which must be served during an attack."""


@dataclass
class GatewayUnderTest:
    """One gateway process and the scripted worker behind it."""

    process: ApplianceProcess
    worker: FakeWorker

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        url = urlsplit(self.process.url)
        assert url.hostname
        assert url.port
        return url.hostname, url.port

    @property
    def resident_bytes(self) -> int:
        """Memory the process holds now."""
        return 1024 * self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """Most memory it has held since `forget_peak`."""
        return 1024 * self._status("VmHWM")

    def forget_peak(self) -> None:
        """Reset the measured peak."""
        (self._proc / "clear_refs").write_text("5", encoding="ascii")

    def _status(self, name: str) -> int:
        lines = (self._proc / "status").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))

    @property
    def _proc(self) -> Path:
        return Path(f"/proc/{self.process.process.pid}")

    @property
    def open_files(self) -> int:
        """Files and sockets the process holds."""
        return len(list((self._proc / "fd").iterdir()))

    def holds(self, connection: socket.socket) -> bool:
        """Whether a process has the other end of a connection; the kernel may have bytes left for it."""
        ours, theirs = connection.getsockname()[1], connection.getpeername()[1]
        for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            local, remote, inode = (line.split()[column] for column in (1, 2, 9))
            if (int(local[-4:], 16), int(remote[-4:], 16)) == (theirs, ours):
                return inode != "0"
        return False

    async def serves_others(self, *, told_to_wait: bool = False) -> None:
        """A well-behaved client gets its answer, if necessary after the retry it was asked for."""
        headers = {"Authorization": f"Bearer {self.process.key}"}
        async with asyncio.timeout(100), aiohttp.ClientSession(timeout=PATIENT, headers=headers) as session:
            while True:
                async with session.post(f"{self.process.url}/v1/chat/completions", json=chat()) as answer:
                    if not (told_to_wait and answer.status == 503):
                        assert answer.status == 200, await answer.text()
                        return
                await asyncio.sleep(float(answer.headers["Retry-After"]))

    def connect(self, *, receive_bytes: int | None = None) -> socket.socket:
        """A connection that blocks; with a small receive buffer, one that soon takes no more."""
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(60)
        connection.connect(self.address)
        return connection

    def head(
        self, length: int | None, *, key: str | None = None, path: str = "/v1/chat/completions"
    ) -> bytes:
        """The head of a request whose body has this length, or is chunked."""
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: appliance",
            f"Authorization: Bearer {self.process.key if key is None else key}",
            "Content-Type: application/json",
            framing,
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def request(self, **more: Any) -> bytes:
        """A whole request for a chat."""
        body = json.dumps(chat(**more)).encode()
        return self.head(len(body)) + body

    def entries(self, *types: str) -> list[dict[str, Any]]:
        """The fields of the audit log's entries of these types."""
        store = SqlAuditStore(f"sqlite:///{self.process.data / 'audit.db'}")
        try:
            return [decode(leaf.leaf).fields for leaf in store.leaves(0, 10**6) if leaf.type in types]
        finally:
            store.close()

    async def outcomes(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many requests have ended, and return how."""
        await until(lambda: len(self.entries("request.outcome")) >= count)
        return self.entries("request.outcome")


def allow_open_files(count: int) -> None:
    """Raise this process's limit, which the processes it starts inherit; skip where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(
            f"THIS MACHINE ALLOWS A PROCESS {hard} OPEN FILES, SO NOTHING IS SHOWN ABOUT {count} HERE"
        )
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def wait_closed(connection: socket.socket, seconds: float = 60.0) -> bytes:
    """Read until the other side has closed; returns its answer."""
    connection.settimeout(seconds)
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            said += piece
    connection.close()
    return said


def close_all(connections: Iterable[socket.socket]) -> None:
    """Close all of them."""
    for connection in connections:
        connection.close()


def reset(connection: socket.socket) -> None:
    """Reset the connection, as a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
