"""
Limits of a gateway for misbehaving clients, on real sockets.

The clocks are short here; connections are checked once a second.
"""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes import FakeWorker, chat, until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
PATIENCE = 15.0


@asynccontextmanager
async def connection(running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = running.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(running) -> bytes:
    return HEAD % running.key.encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and error code of an answer after which the connection ends."""
    async with asyncio.timeout(PATIENCE):
        data = await reader.read()
    start, _, body = data.partition(b"\r\n\r\n")
    return int(start.split(b" ")[1]), json.loads(body)["error"]["code"]


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a byte from time to time, until the connection is closed."""
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.1)


async def test_headers_that_trickle_are_given_up(serve):
    """A client that keeps sending a little is as late as one that sends nothing."""
    running = await serve(FakeWorker(), head_seconds=1.0)
    async with connection(running) as (reader, writer):
        sending = asyncio.create_task(trickle(writer, head(running) + b"x" * 1000))
        assert await answer(reader) == (408, "request_too_slow")
        sending.cancel()
    assert (await running.post(chat())).status == 200


async def test_a_body_that_trickles_is_given_up_and_is_no_defect(serve):
    """No worker is called, no crash is logged, and the connection's slot is free again."""
    running = await serve(FakeWorker(), body_seconds=1.0)
    async with connection(running) as (reader, writer):
        writer.write(head(running) + b"content-length: 100000\r\n\r\n")
        sending = asyncio.create_task(trickle(writer, b"{" * 1000))
        assert await answer(reader) == (408, "request_too_slow")
        sending.cancel()
    await until(lambda: not running.server.server_state.connections)
    assert running.worker.bodies == []
    assert not running.logged("request_crashed")


async def test_a_flood_of_headers_is_answered_while_it_still_comes(serve):
    """The client gets the reason while it still sends."""
    running = await serve(FakeWorker())
    async with connection(running) as (reader, writer):
        writer.write(head(running))
        writer.writelines(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(500))
        assert await answer(reader) == (431, "head_too_large")
    page = running.metrics.registry
    assert page.get_sample_value("appliance_errors_total", {"code": "head_too_large"}) == 1


async def test_connection_beyond_the_limit_gets_503(serve):
    """Existing connections continue."""
    running = await serve(FakeWorker(), max_connections=2)
    async with connection(running), connection(running) as (reader, writer):
        await until(lambda: len(running.server.server_state.connections) == 2)
        async with connection(running) as (over, over_writer):
            over_writer.write(head(running) + b"\r\n")
            assert await answer(over) == (503, "too_many_connections")
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
    await until(lambda: not running.server.server_state.connections)
    assert (await running.post(chat())).status == 200


async def test_admin_listener_answers_while_the_api_is_at_its_limit(serve):
    """Clients that hold every connection of the API lock out neither Prometheus nor administrators."""
    running = await serve(FakeWorker(), max_connections=2)
    async with connection(running), connection(running):
        await until(lambda: len(running.server.server_state.connections) == 2)
        async with connection(running) as (over, over_writer):
            over_writer.write(head(running) + b"\r\n")
            assert await answer(over) == (503, "too_many_connections")
        assert (await running.get("/metrics")).status == 200
        assert (await running.get("/admin/v1/status", key=running.admin_key)).status == 200
        async with running.session.get(running.admin_url + "/healthz") as response:
            assert response.status == 200


async def test_tenants_reach_neither_metrics_nor_admin_api(serve):
    """Without a key or with an administrator's; the model routes are on both listeners."""
    running = await serve(FakeWorker())
    for path in ("/metrics", "/admin/v1/status", "/console"):
        for key in (None, running.key, running.admin_key):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with running.session.get(running.url + path, headers=headers) as response:
                content = await response.json()
            assert (response.status, content["error"]["code"]) == (404, "route_not_found"), path
    async with running.session.get(running.admin_url + "/metrics") as response:
        assert "appliance_" in await response.text()
    body, headers = json.dumps(chat()), {"Authorization": f"Bearer {running.key}"}
    for url in (running.url, running.admin_url):
        async with running.session.post(url + "/v1/chat/completions", data=body, headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize("admin", [False, True], ids=["api", "admin"])
async def test_paths_that_a_proxy_may_read_differently_are_refused_as_they_are_sent(serve, admin):
    """As bytes on the connection, which no client of ours has normalised; the connection stays usable."""
    running = await serve(FakeWorker())
    host, port = (running.admin_url if admin else running.url).removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    refused = [
        b"/%61dmin/v1/status", b"/admin%2fv1%2fstatus", b"/admin%5Cv1", b"//admin/v1/status", b"/v1/../admin",
        b"/v1/./models", b"/v1/%2e%2e/admin/v1/status", b"http://x//admin/v1", b"/v1/models/%2e%2e%2fadmin",
    ]  # fmt: skip
    asked = [b"/v1/models/demo", b"/v1/models/org%2Fnone", b"/v1/models/a%3A7b%20%E5%90%8D"]
    try:
        for path in (*refused, *asked):
            writer.write(
                b"GET %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n"
                % (path, running.key.encode())
            )
            async with asyncio.timeout(PATIENCE):
                start = await reader.readuntil(b"\r\n\r\n")
                length = int(re.search(rb"content-length: (\d+)", start)[1])
                content = json.loads(await reader.readexactly(length))
            status = int(start.split(b" ")[1])
            if path in refused:
                assert (status, content["error"]["code"]) == (400, "invalid_path"), path
            else:
                assert status == 200 or content["error"]["code"] == "model_not_found", path
    finally:
        writer.close()


async def test_a_connection_without_a_request_is_closed(serve):
    """Before its first request, or after one; without an answer."""
    running = await serve(FakeWorker(), idle_seconds=1)
    async with connection(running) as (reader, _), connection(running) as (other, other_writer):
        other_writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await other.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b""
            await other.read()


async def test_client_that_stops_reading_is_disconnected_and_its_worker_stops(serve):
    """Its answer is not buffered in memory."""
    worker = FakeWorker(pieces=["x" * 50_000] * 2000)
    running = await serve(worker, stalled_seconds=1.0)
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps(chat(stream=True)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, head(running) + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: worker.aborted == 1, PATIENCE)
    assert (await running.outcome())["outcome"] == "client_gone"
