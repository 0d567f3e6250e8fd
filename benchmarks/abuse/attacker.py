"""
One attacker, in a process of its own and of the lowest priority: many connections, one kind of request.

    python -m benchmarks.abuse.attacker URL KEY ATTACK CONNECTIONS

Each connection sends its next request as soon as the last was answered, as fast as the gateway takes it.
Runs until standard input ends, and prints what it did: requests by status and bytes sent, as JSON.
"""

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

MODEL = "attacked"
MIB = 2**20
CHAT, TEXT, FILES = "/v1/chat/completions", "/v1/completions", "/v1/files"
PAUSE_SECONDS = 0.5
"""Between two pieces of an upload that never ends, and between two looks at a stream that is not read."""
HELD_SECONDS = 5.0
"""Until an upload or stream is left, and the next begun."""


def chat_of(messages: bytes) -> bytes:
    return b'{"model":"%s","messages":%s}' % (MODEL.encode(), messages)


def valid(size: int) -> bytes:
    """A valid chat: many messages."""
    message = b'{"role":"user","content":"some words of a conversation"}'
    return chat_of(b"[" + b",".join([message] * (size // (len(message) + 1))) + b"]")


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "1 MiB of {}": (CHAT, lambda: chat_of(b"[" + b",".join([b"{}"] * (MIB // 3)) + b"]")),
    "16 MiB of escapes": (CHAT, lambda: chat_of(b'"' + b"[" * 201 + b'\\"' * (8 * MIB - 256) + b'"')),
    "10,000 prompts": (
        TEXT,
        lambda: json.dumps({"model": MODEL, "prompt": ["word " * 20] * 10_000}).encode(),
    ),
    "900,000 tokens": (
        TEXT,
        lambda: b'{"model":"%s","prompt":[%s]}' % (MODEL.encode(), b",".join([b"1"] * 900_000)),
    ),
    "a tenant over its limit, 1.4 MB": (CHAT, lambda: valid(1_400_000)),
}
UPLOADS, UNREAD = "half-sent uploads", "unread streams"
ATTACKS = (*BODIES, UPLOADS, UNREAD)
LIMITED = "a tenant over its limit, 1.4 MB"
"""Sent with the key of a tenant that is limited to one request a minute."""


@dataclass
class Attacker:
    url: str
    key: str
    attack: str
    statuses: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, body: bytes) -> None:
        while not self.stopped.is_set():
            try:
                self._connection(body)
            except OSError as error:
                self.statuses[type(error).__name__] += 1
                self.stopped.wait(0.05)

    def _connection(self, body: bytes) -> None:
        parts = urlsplit(self.url)
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=60) as connection:
            if self.attack == UPLOADS:
                self._upload(connection)
            elif self.attack == UNREAD:
                self._leave_unread(connection)
            else:
                self._repeat(connection, BODIES[self.attack][0], body)

    def _repeat(self, connection: socket.socket, path: str, body: bytes) -> None:
        answers = connection.makefile("rb")
        while not self.stopped.is_set():
            self._send(connection, self._head(path, "application/json", len(body)))
            self._send(connection, body)
            status, length = answers.readline().split()[1].decode(), 0
            while (line := answers.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            answers.read(length)
            self.statuses[status] += 1

    def _upload(self, connection: socket.socket) -> None:
        part = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s'
        first = part % (b"purpose", b"", b"batch\r\n") + part % (b"file", b'; filename="a.jsonl"', b"")
        self._send(connection, self._head(FILES, "multipart/form-data; boundary=x", 64 * MIB) + first)
        ends = time.monotonic() + HELD_SECONDS
        while time.monotonic() < ends and not self.stopped.is_set():
            self._send(connection, b"x" * (MIB // 4))
            self.stopped.wait(PAUSE_SECONDS)
        self.statuses["left"] += 1

    def _leave_unread(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        asked = {"model": MODEL, "messages": [], "stream": True, "max_tokens": 100_000}
        body = json.dumps(asked).encode()
        self._send(connection, self._head(CHAT, "application/json", len(body)) + body)
        self.stopped.wait(HELD_SECONDS)
        self.statuses["left"] += 1

    def _head(self, path: str, content_type: str, length: int) -> bytes:
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: appliance",
            f"Authorization: Bearer {self.key}",
            f"Content-Type: {content_type}",
            f"Content-Length: {length}",
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def _send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.sent_bytes += len(data)


def main() -> None:
    url, key, attack, connections = sys.argv[1:]
    os.nice(19)
    body = BODIES[attack][1]() if attack in BODIES else b""
    attacker = Attacker(url, key, attack)
    threads = [
        threading.Thread(target=attacker.run, args=(body,), daemon=True) for _ in range(int(connections))
    ]
    for thread in threads:
        thread.start()
    with suppress(KeyboardInterrupt):
        sys.stdin.read()
    attacker.stopped.set()
    print(json.dumps({"statuses": attacker.statuses, "sent_bytes": attacker.sent_bytes}), flush=True)


if __name__ == "__main__":
    main()
