"""
A structure-aware fuzz campaign against a gateway process, over sockets.

    python -m tests.abuse.fuzz --requests 200000 --seed 1 --out benchmarks/results/fuzz-COMMIT.md

It sends requests to every route: each member that the gateway reads with wrong types, sizes and encodings,
damaged bodies, odd framing, forms, paths and keys.  Names of members are all string constants of the code
that reads bodies, so that a new member is fuzzed without being listed.  The campaign fails on a status 500, a
logged crash, a request without an answer, a stall of more than one second, or memory that grows.
"""

import argparse
import ast
import asyncio
import contextlib
import json
import logging
import random
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from aiohttp import web
from starlette.routing import Route

import appliance
from appliance.api import openai
from appliance.api.console import pages
from appliance.app.http_app import ADMIN_ROUTERS, API_ROUTERS
from appliance.serving.dialects.routes import ROUTES
from benchmarks.speculation.provenance import Provenance, provenance_of
from tests.abuse.conftest import gateways
from tests.abuse.gateway_under_test import MIB, GatewayUnderTest
from tests.fakes import ERROR, MODEL, FakeWorker, chat

PACKAGE = Path(appliance.__file__).parent
READERS = (
    "api",
    "gateway",
    "serving/dialects",
    "serving/target_only.py",
    "tenancy",
    "control",
    "audit/content",
)
RELAYED = ("serving/dialects", "serving/target_only.py", "gateway/body.py", "tenancy/limits")
INTERNAL = re.compile(rb'"code": ?"internal_error"')
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
CONNECTIONS = 16
TENANT = "caller-0"
REPAIR_EVERY = 500
ANSWER_SECONDS = 60.0
STALL_SECONDS = 1.0
GROWTH_BYTES = 24 * MIB
"""Between the first quarter of a campaign and its end; an allocator does not give back every page."""
OPTIONAL_HEADERS = (
    *(
        "x-request-id",
        "x-appliance-priority",
        "x-appliance-speculation",
        "x-appliance-metrics",
        "traceparent",
    ),
    *("accept", "idempotency-key", "anthropic-version", "x-api-key"),
)
INPUTS: dict[str, Any] = {
    "prompt": "x", "input": "x", "query": "x", "documents": ["x", "y"], "tokens": [1, 2],
    "queries": "x", "text_1": "x", "text_2": "y", "max_tokens": 8,
}  # fmt: skip
"""Besides messages, what some relayed route needs."""
TENANT_NAMED, WORKER_NAMED = {"tenant": "fuzzed"}, {"note": "x"}
COMMANDS: dict[str, dict[str, Any]] = {
    "/v1/batches": {"endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "/admin/v1/audit/reads": {"operation": "tail", "account": "x", "start": 0, "end": 1, "purpose": "x"},
    "/admin/v1/audit/erasures": {**TENANT_NAMED, "basis": "x", "before": "2020-01-01T00:00:00Z"},
    "/admin/v1/audit/prunes": {"before": "2020-01-01T00:00:00Z"},
    "/admin/v1/audit/holds": {**TENANT_NAMED, "reason": "x"},
    "/admin/v1/audit/holds/releases": {**TENANT_NAMED, "reason": "x"},
    "/admin/v1/drafts/promotions": {"draft": "sha256:" + "0" * 64},
    "/admin/v1/drafts/rollbacks": {"reason": "x"},
    "/admin/v1/speculation/override": {"mode": "target_only", "seconds": 1, "note": "x"},
    "/admin/v1/tenants": {"models": ["*"], "limits": {}},
    "/admin/v1/tenants/{name}": {"models": ["*"], "limits": {"requests_per_minute": 10}},
    "/admin/v1/tenants/{name}/keys": {"models": ["*"]},
    "/admin/v1/keys/{key_id}/rotate": {"overlap_seconds": 0},
    "/admin/v1/keys/{key_id}/revoke": {"reason": "x"},
    "/admin/v1/workers/{worker}/drain": WORKER_NAMED,
    "/admin/v1/workers/{worker}/undrain": WORKER_NAMED,
    "/admin/v1/workers/{worker}/recycle": {"with_draft": True, "note": "x"},
}
"""What the routes of the files, batches and admin APIs accept."""
PROBE = """
import socket, sys, threading, time
host, port = sys.argv[1], int(sys.argv[2])
connection = socket.create_connection((host, port))
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
longest = 0.0
while not ended.wait(0.02):
    began = time.monotonic()
    connection.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: appliance\\r\\n\\r\\n")
    answer = b""
    while b"}" not in answer:
        piece = connection.recv(4096)
        if not piece:
            sys.exit("the connection was closed")
        answer += piece
    longest = max(longest, time.monotonic() - began)
print(longest)
"""
"""Asks for /healthz all the time, in a process of its own, and prints the longest wait."""


@dataclass(frozen=True)
class Target:
    """A method of a route, and the members that its module reads."""

    path: str
    method: str
    names: tuple[str, ...]
    is_relayed: bool

    @property
    def label(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Findings:
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Requests sent, and bytes held then."""
    longest_seconds: float = 0.0

    def observe(self, target: Target, request: bytes, status: int, body: bytes) -> None:
        self.statuses[target.label][status] += 1
        if status == HTTPStatus.INTERNAL_SERVER_ERROR or INTERNAL.search(body):
            self.failures.append(f"{target.label}: {status} {body[:300]!r} to {request[:3000]!r}")

    @property
    def requests(self) -> int:
        return sum(counted.total() for counted in self.statuses.values())

    @property
    def growth_bytes(self) -> int:
        early = [held for sent, held in self.memory if sent >= self.memory[-1][0] // 4]
        return early[-1] - early[0]


@cache
def constants(path: Path) -> tuple[str, ...]:
    """String constants in the form of a member's name, in a file or all files of a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return tuple(
        sorted(
            {
                node.value
                for file in files
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and NAME.fullmatch(node.value)
            }
        )
    )


def targets() -> list[Target]:
    """Every method of every route."""
    relayed = tuple(sorted({name for part in RELAYED for name in constants(PACKAGE / part)}))
    found = []
    for router in (*API_ROUTERS, *ADMIN_ROUTERS, pages.router):
        for route in router.routes:
            assert isinstance(route, Route)
            is_relayed = isinstance(route.endpoint, openai.Relayed)
            module: ModuleType | None = sys.modules.get(getattr(route.endpoint, "__module__", ""))
            names = relayed if is_relayed or module is None else constants(Path(str(module.__file__)))
            found += [Target(route.path, method, names, is_relayed) for method in sorted(route.methods or ())]
    return found


class Maker:
    """Makes requests from one source of chance."""

    def __init__(self, chance: random.Random, worker: str) -> None:
        self.chance = chance
        self.names = tuple(sorted({name for part in READERS for name in constants(PACKAGE / part)}))
        self.known: list[str] = ["fuzzed", "demo", MODEL, worker]
        """Names and ids that exist, or did; not those of the campaign's own tenant."""
        self.cookie = ""
        """Of a session of the console."""

    def learn(self, target: Target, status: int, body: bytes) -> None:
        """Remember the newest ids of files and batches, and that the console's session ended."""
        if target.path.startswith("/console") and status in {303, 401}:
            self.cookie = ""
        self.known += re.findall(r'"id": ?"((?:file|batch)[\w-]{4,60})"', body[:2000].decode("latin-1"))
        del self.known[4:-50]

    def text(self) -> str:
        chance = self.chance
        return chance.choice(
            (
                *(
                    "",
                    " ",
                    "\x00",
                    "\u2028",
                    "\ud800",
                    "\udfff\ud800",
                    "null",
                    "true",
                    "0",
                    "-1",
                    "1e999",
                    "NaN",
                ),
                *("data:;base64,", "data: [DONE]", "../../etc/passwd", "*", "auto", "user", "system", "off"),
                *(
                    "2026-01-01T00:00:00Z",
                    "9999-12-31",
                    "sha256:" + "0" * 64,
                    "{{ x }}",
                    "%s%n",
                    "\U0001f4a3",
                ),
                *self.known[-20:],
                chance.choice(self.names),
                "x" * chance.choice((1, 64, 129, 4097, 70_000)),
                "\u202e" * chance.randrange(200),
            )
        )

    def number(self) -> Any:
        return self.chance.choice(
            (0, 1, -1, 2, 16, 129, 2049, 2**31, 2**53 + 1, -(2**63), 10**40, 0.0, -0.0, 0.5, 1e308, 16.0)
        )

    def value(self, depth: int = 0) -> Any:
        kind = self.chance.randrange(12 if depth < 3 else 6)
        if kind < 6:
            return (None, True, False, self.number(), self.text(), self.text())[kind]
        if kind < 9:
            return [self.value(depth + 1) for _ in range(self.chance.choice((0, 1, 1, 2, 3, 40)))]
        return {
            self.chance.choice((*self.names, "role", "content", "type", "text")): self.value(depth + 1)
            for _ in range(self.chance.randrange(4))
        }

    def good(self, target: Target) -> dict[str, Any]:
        """What the route accepts, as far as one form fits all routes."""
        if target.is_relayed:
            return {**chat(stream=self.chance.random() < 0.3), **INPUTS}
        members = dict(COMMANDS.get(target.path, {}))
        if target.path == "/admin/v1/tenants":
            members["name"] = f"fuzzed-{self.chance.randrange(20)}"
        if target.path == "/admin/v1/speculation/override":
            members["worker"] = self.known[3]
        if target.path == "/v1/batches":
            members["input_file_id"] = self.chance.choice(self.known)
        return members

    def body(self, target: Target) -> bytes:
        chance, members = self.chance, self.good(target)
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            names = target.names if target.names and chance.random() < 0.8 else self.names
            members[chance.choice(names)] = self.value()
        if members and chance.random() < 0.2:
            members.pop(chance.choice(sorted(members)), None)
        if chance.random() < 0.02:
            members = self.value()
        text = json.dumps(members, ensure_ascii=chance.random() < 0.5)
        encoding = chance.choice(
            ("utf-8", "utf-8", "utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16")
        )
        return self.damage(text.encode(encoding, "surrogatepass"))

    def form(self) -> tuple[bytes, str]:
        chance = self.chance
        lines = "\n".join(
            json.dumps({"custom_id": str(number), "method": "POST", "url": self.text(), "body": self.value()})
            for number in range(chance.randrange(4))
        )
        parts = [("purpose", "", "batch"), ("file", '; filename="a.jsonl"', lines)]
        parts += [
            (chance.choice(self.names), chance.choice(("", '; filename="x"')), self.text())
            for _ in range(chance.choice((0, 0, 1, 3, 20)))
        ]
        chance.shuffle(parts)
        boundary = chance.choice(("b", "b" * 70, "b'()+_,-./:=?"))
        made = b"".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{text}\r\n'.encode(
                "utf-8", "surrogatepass"
            )
            for name, more, text in parts
        )
        body = self.damage(made + f"--{boundary}--\r\n".encode())
        return body, f'multipart/form-data; boundary="{boundary}"'

    def fields(self, target: Target) -> bytes:
        """A form of the console; few know the token of their session."""
        names = [self.chance.choice((*target.names, "key", "csrf")) for _ in range(self.chance.randrange(4))]
        return self.damage(
            urlencode([(name, self.text().encode("utf-8", "surrogatepass")) for name in names]).encode()
        )

    def damage(self, body: bytes) -> bytes:
        chance = self.chance
        if chance.random() < 0.75:
            return body
        at = chance.randrange(len(body) + 1)
        piece = chance.choice(
            (b"", b'"', b"{", b"]", b"\\", b"\xff", b",", b"\x00", b"[" * 300, b"[]," * 3000)
        )
        return body[:at] + piece + body[at + chance.randrange(3) :]

    def path(self, target: Target) -> str:
        chance = self.chance

        def fill(_found: re.Match[str]) -> str:
            junk = self.text().encode("utf-8", "surrogatepass")[:300]
            return quote(chance.choice(self.known) if chance.random() < 0.7 else junk, safe="")

        path = re.sub(r"\{[^}]*\}", fill, target.path)
        if chance.random() < 0.3:
            names = (
                "limit",
                "after",
                "before",
                "order",
                "purpose",
                "start",
                "end",
                chance.choice(self.names),
            )
            query = [
                f"{name}={quote(str(self.value()).encode('utf-8', 'surrogatepass'))[:300]}" for name in names
            ]
            path += "?" + "&".join(chance.sample(query, chance.randrange(1, 4)))
        return path

    def request(self, target: Target, keys: Sequence[str]) -> bytes:
        chance = self.chance
        key = (
            keys[target.path.startswith("/admin")]
            if chance.random() < 0.93
            else chance.choice((*keys, "sk-x", ""))
        )
        method = (
            target.method if chance.random() < 0.97 else chance.choice(("PUT", "PATCH", "DELETE", "OPTIONS"))
        )
        headers = [("Host", "appliance"), ("Authorization", f"Bearer {key}")]
        body, kind = b"", "application/json"
        if method not in {"GET", "HEAD", "OPTIONS"}:
            if target.path == "/v1/files":
                body, kind = self.form()
            elif target.path.startswith("/console"):
                body, kind = self.fields(target), "application/x-www-form-urlencoded"
            else:
                body = self.body(target)
        if target.path.startswith("/console") and self.cookie and chance.random() < 0.9:
            headers += [("Cookie", self.cookie), ("Sec-Fetch-Site", "same-origin")]
        headers.append(("Content-Type", kind if chance.random() < 0.97 else self.line()))
        for name in OPTIONAL_HEADERS:
            if chance.random() < 0.02:
                headers.append((name, self.line()))
        if chance.random() < 0.1 and body:
            framing, sent = ("Transfer-Encoding", "chunked"), self.chunked(body)
        else:
            framing, sent = ("Content-Length", str(len(body))), body
        lines = "".join(f"{name}: {value}\r\n" for name, value in (*headers, framing))
        return f"{method} {self.path(target)} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace") + sent

    def line(self) -> str:
        return re.sub(r"[\x00-\x1f\x7f]", "?", self.text())[:400]

    def chunked(self, body: bytes) -> bytes:
        sent = bytearray()
        while body:
            size = self.chance.choice((1, 7, 1000, 65_536))
            piece, body = body[:size], body[size:]
            sent += f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
            if len(sent) > 100_000:
                size = len(body) or 1
                sent += f"{len(body):x}\r\n".encode() + body + b"\r\n" if body else b""
                break
        return bytes(sent + b"0\r\n\r\n")


class Connection:
    """Sends one request after the other; opened again when the gateway closes it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes, *, whole: bool = False) -> tuple[int, bytes]:
        """
        Status and body of the answer, or with `whole` head and body.

        Raises OSError, EOFError, TimeoutError or ValueError if there is none.
        """
        is_fresh = self._streams is None
        try:
            status, head, body = await self._send(request)
        except (OSError, EOFError):
            self.close()
            if is_fresh:
                raise
            # The gateway may close an idle connection, or one whose last request it gave up reading.
            status, head, body = await self._send(request)
        return status, head + body if whole else body

    async def _send(self, request: bytes) -> tuple[int, bytes, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=2**20)
        reader, writer = self._streams
        async with asyncio.timeout(ANSWER_SECONDS):
            with contextlib.suppress(ConnectionError):  # an answer may come before the request is read
                writer.write(request)
                await writer.drain()
            raw = await reader.readuntil(b"\r\n\r\n")
            head = raw.decode("latin-1").lower()
            status = int(head.split(" ", 2)[1])
            body = await self._body(reader, head, has_body=not request.startswith(b"HEAD") and status != 204)
        if "connection: close" in head:
            self.close()
        return status, raw, body

    async def _body(self, reader: asyncio.StreamReader, head: str, *, has_body: bool) -> bytes:
        if not has_body:
            return b""
        if found := re.search(r"content-length: (\d+)", head):
            return await reader.readexactly(int(found[1]))
        body = bytearray()
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return bytes(body)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


class TolerantWorker(FakeWorker):
    """Refuses what it was not written for, as a worker does, and streams only on routes that have streams."""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super().completions(request)
        except (KeyError, TypeError, ValueError, AttributeError):
            return web.json_response(ERROR, status=400)

    def forget(self) -> None:
        """Free what tests of single requests look at."""
        for kept in (self.bodies, self.paths, self.headers):
            kept.clear()

    async def stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        if request.path in ROUTES and ROUTES[request.path].dialect.streams:
            return await super().stream(request, asked)
        return await self.plain(request)


async def run(gateway: GatewayUnderTest, worker: TolerantWorker, *, requests: int, seed: int) -> Findings:
    """Send so many requests, as a tenant that the campaign makes for itself and as an admin."""
    findings, every = Findings(), targets()
    addresses = {is_admin: _address(url) for is_admin, url in _urls(gateway).items()}
    sent = 0
    with contextlib.ExitStack() as stack:

        def connect(*, is_admin: bool) -> Connection:
            return stack.enter_context(contextlib.closing(Connection(addresses[is_admin])))

        operator = Operator(gateway, connect(is_admin=True))
        keys = (await operator.make_tenant(), operator.key)
        gateway.process.key = keys[0]  # of whoever asks afterwards

        async def work(number: int) -> None:
            nonlocal sent
            maker = Maker(random.Random(f"{seed}-{number}"), operator.worker)
            connections = {is_admin: connect(is_admin=is_admin) for is_admin in addresses}
            while sent < requests:
                sent += 1
                if sent % max(1, requests // 40) == 0:
                    findings.memory.append((sent, gateway.resident_bytes))
                if sent % REPAIR_EVERY == 0:
                    await operator.repair()
                    worker.forget()
                if not maker.cookie:
                    maker.cookie = await operator.log_in()
                target = maker.chance.choice(every)
                request = maker.request(target, keys)
                connection = connections[is_internal(target.path)]
                try:
                    status, body = await connection.send(request)
                except (OSError, EOFError, TimeoutError, ValueError) as error:
                    findings.failures.append(f"{target.label}: no answer ({error!r}) to {request[:3000]!r}")
                    connection.close()
                    continue
                findings.observe(target, request, status, body)
                maker.learn(target, status, body)

        async with probed(addresses[False], findings), asyncio.TaskGroup() as group:
            for number in range(CONNECTIONS):
                group.create_task(work(number))
        await operator.repair()
    findings.failures += [line for line in gateway.process.output if "request_crashed" in line]
    return findings


@contextlib.asynccontextmanager
async def probed(address: tuple[str, int], findings: Findings) -> AsyncIterator[None]:
    """Ask for /healthz all the time, and note the longest wait."""
    probe = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROBE, *map(str, address)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield
    finally:
        said, _ = await probe.communicate(b"")
    findings.longest_seconds = float(said)


class Operator:
    """Sets the gateway up, and undoes what would keep the rest of a campaign from reaching anything."""

    def __init__(self, gateway: GatewayUnderTest, connection: Connection) -> None:
        self.key = (gateway.process.data / "admin.key").read_text(encoding="utf-8").strip()
        self.worker = ""
        self._connection = connection
        self._turn = asyncio.Lock()

    async def make_tenant(self) -> str:
        """Create tenants, learn the worker's id, and return a key that no request of a campaign names."""
        for name in ("fuzzed", TENANT):
            await self._ask("POST", "/admin/v1/tenants", {"name": name, "content": "encrypted"})
        workers = await self._ask("GET", "/admin/v1/workers", {})
        self.worker = workers["workers"][0]["worker"]
        return str((await self._ask("POST", f"/admin/v1/tenants/{TENANT}/keys", {}))["key"])

    async def repair(self) -> None:
        """Give the worker back its requests, and the monitor its decision."""
        worker = quote(self.worker, safe="")
        await self._ask("POST", f"/admin/v1/workers/{worker}/undrain", {})
        for each in (self.worker, None):
            await self._ask("PUT", "/admin/v1/speculation/override", {"worker": each, "mode": "auto"})

    async def log_in(self) -> str:
        body = urlencode({"key": self.key}).encode()
        answer = await self._send("POST", "/console/login", body, "application/x-www-form-urlencoded")
        found = re.search(rb"set-cookie: (appliance_console=[^;\r]+)", answer, re.IGNORECASE)
        return "" if found is None else found[1].decode()

    async def _ask(self, method: str, path: str, members: dict[str, Any]) -> Any:
        answer = await self._send(method, path, json.dumps(members).encode(), "application/json")
        return json.loads(answer.partition(b"\r\n\r\n")[2])

    async def _send(self, method: str, path: str, body: bytes, kind: str) -> bytes:
        """Head and body of an answer."""
        lines = (
            f"{method} {path} HTTP/1.1", "Host: appliance", f"Authorization: Bearer {self.key}",
            f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Sec-Fetch-Site: same-origin",
        )  # fmt: skip
        async with self._turn:
            _, answer = await self._connection.send(
                "\r\n".join(lines).encode() + b"\r\n\r\n" + body, whole=True
            )
        return answer


def is_internal(path: str) -> bool:
    return path.startswith(("/admin", "/metrics", "/console"))


def _urls(gateway: GatewayUnderTest) -> Mapping[bool, str]:
    """Of the tenants' listener, and of the one for operators."""
    return {False: gateway.process.url, True: gateway.process.admin_url}


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def problems(findings: Findings) -> list[str]:
    """Why a campaign failed, one line each; empty if it did not."""
    found = [*dict.fromkeys(findings.failures)]
    if findings.longest_seconds > STALL_SECONDS:
        found.append(f"a stall of {findings.longest_seconds:.2f} s")
    if findings.growth_bytes > GROWTH_BYTES:
        found.append(f"memory grew by {findings.growth_bytes / MIB:.0f} MiB")
    return found


def page(findings: Findings, provenance: Provenance) -> str:
    rows = [
        f"| `{label}` | {counted.total():,} | "
        + ", ".join(f"{status}: {count:,}" for status, count in sorted(counted.items()))
        + " |"
        for label, counted in sorted(findings.statuses.items())
    ]
    memory = ", ".join(
        f"{held / MIB:.0f}" for _, held in findings.memory[:: max(1, len(findings.memory) // 10)]
    )
    return "\n".join(
        [
            f"# Fuzz campaign, at commit {provenance.source}",
            "",
            f"`{provenance.command}`, {provenance.date}, on {provenance.hardware}.",
            "",
            f"- Requests: {findings.requests:,}, {CONNECTIONS} at a time",
            f"- Routes and methods: {len(findings.statuses)}",
            f"- Status 500, crashes, requests without an answer: {len(findings.failures)}",
            f"- Longest wait for `/healthz`, asked every 20 ms: {findings.longest_seconds * 1000:.0f} ms",
            f"- Memory of the gateway, in MiB, in order: {memory}",
            "",
            "| Route | Requests | Answers by status |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


@contextlib.asynccontextmanager
async def fuzzed_gateway(directory: Path) -> AsyncIterator[tuple[GatewayUnderTest, TolerantWorker]]:
    worker = TolerantWorker(pieces=["a", "b"])
    async with gateways(directory) as start:
        yield await start(worker), worker


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="page of results; default: standard output")
    options = parser.parse_args()
    # Answers that the gateway gave up are not this program's errors.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # noqa: TID251 - aiohttp's own
    with tempfile.TemporaryDirectory() as directory:
        async with fuzzed_gateway(Path(directory)) as (gateway, worker):
            findings = await run(gateway, worker, requests=options.requests, seed=options.seed)
            await gateway.serves_others(told_to_wait=True)
    command = f"python -m tests.abuse.fuzz --requests {options.requests} --seed {options.seed}"
    made = page(findings, provenance_of(command, model=MODEL, draft="none"))
    if options.out:
        options.out.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
    failed = problems(findings)
    for line in failed[:50]:
        sys.stderr.write(f"FAILED: {line}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
