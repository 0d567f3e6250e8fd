"""The tap changes nothing and keeps everything."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from tests.clients.tap import Tap
from tests.fakes import until


@pytest.fixture
async def behind():
    """A server of two routes, and what it noticed."""
    seen: dict[str, int] = {"left": 0}

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"said": (await request.read()).decode()}, status=201)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(1000):
                await response.write(f": wait\n\nevent: count\ndata: {number}\n\n".encode())
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, ConnectionError):
            seen["left"] += 1
            raise
        return response

    app = web.Application()
    app.router.add_post("/echo", echo)
    app.router.add_get("/stream", stream)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}", seen
    await runner.cleanup()


async def test_requests_and_answers_are_kept_whole(behind):
    """Several on one connection, in order, with headers, status and body."""
    url, _ = behind
    with Tap(url) as tap:
        async with aiohttp.ClientSession() as session:
            for word in ("one", "two"):
                async with session.post(f"{tap.url}/echo?x=1", data=word, headers={"X-Word": word}) as answer:
                    assert await answer.json() == {"said": word}
        first, second = tap.exchanges()
    assert (first.method, first.path, first.status, first.complete) == ("POST", "/echo", 201, True)
    assert (first.request, first.asked["x-word"]) == (b"one", "one")
    assert json.loads(second.body) == {"said": "two"}
    assert second.headers["content-type"].startswith("application/json")


async def test_server_observes_a_client_that_leaves(behind):
    """The bytes sent until then are kept as events."""
    url, seen = behind
    with Tap(url) as tap:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{tap.url}/stream") as answer:
                await answer.content.readuntil(b"data: 3\n\n")
                answer.close()
            await until(lambda: seen["left"])
        (exchange,) = tap.exchanges()
    assert exchange.is_stream
    assert not exchange.complete
    assert list(exchange.events())[:3] == [("count", 0), ("count", 1), ("count", 2)]
