"""
Networks of their own for tests: namespaces, and a cable between two of them.

Needs root and `ip` (Debian package iproute2); `why_not` says what is missing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

_NUMBERS = count(1)
LISTENER = """
import socket, sys
sockets = []
for kind, host, port in (argument.split(",") for argument in sys.argv[1:]):
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, int(port)))
    if kind == "tcp":
        made.listen()
    sockets.append(made)
print("listening", flush=True)
answering = [made for made in sockets if made.type == socket.SOCK_DGRAM]
while answering:
    query, client = answering[0].recvfrom(512)
    answering[0].sendto(query, client)
sys.stdin.read()
"""


def why_not() -> str | None:
    """Why this machine cannot create namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "there is no `ip`: install iproute2"
    name = f"try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Namespace:
    """A network with nothing in it but what a test puts there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ip(self, *words: str) -> None:
        """Run `ip` inside."""
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True)

    def command(self, *words: str) -> list[str]:
        """What to run to have these words run inside."""
        return ["ip", "netns", "exec", self.name, *words]

    def appliance(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ours inside, to its end."""
        return subprocess.run(
            self.command(sys.executable, "-m", "appliance", *words),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, **environment},
        )

    def get(self, url: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer to a request from inside."""
        script = (
            "import json, sys, urllib.request as r, urllib.error as e\n"
            "opener = r.build_opener(r.ProxyHandler({}))\n"
            "try: a = opener.open(sys.argv[1], timeout=20)\n"
            "except e.HTTPError as error: a = error\n"
            "print(json.dumps([a.status, json.load(a)]))"
        )
        asked = subprocess.run(
            self.command(sys.executable, "-c", script, url),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        status, body = json.loads(asked.stdout)
        return status, body

    @contextmanager
    def listening(self, *where: str) -> Iterator[None]:
        """Start listeners inside, at addresses such as `tcp,1.1.1.1,443` or `udp,8.8.8.8,53`."""
        process = subprocess.Popen(
            self.command(sys.executable, "-c", LISTENER, *where),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"listening\n"
            yield
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@contextmanager
def namespace(*, loopback: bool = True) -> Iterator[Namespace]:
    """Make one with loopback and nothing else, or with nothing at all."""
    made = Namespace(f"egress-{os.getpid()}-{next(_NUMBERS)}")
    subprocess.run(["ip", "netns", "add", made.name], check=True)
    try:
        if loopback:
            made.ip("link", "set", "lo", "up")
        yield made
    finally:
        subprocess.run(["ip", "netns", "delete", made.name], check=True)


@contextmanager
def cable(inside: Namespace, outside: Namespace, *addresses: str) -> Iterator[None]:
    """Join two by a cable, 10.99.0.1 and 10.99.0.2; the one outside also has these addresses."""
    inside.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", outside.name)
    for side, address in ((inside, "10.99.0.1/30"), (outside, "10.99.0.2/30")):
        side.ip("address", "add", address, "dev", "cable")
        side.ip("link", "set", "cable", "up")
    for address in addresses:
        outside.ip("address", "add", f"{address}/32", "dev", "lo")
    yield
