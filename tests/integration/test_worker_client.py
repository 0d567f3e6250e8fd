"""Requests to a worker that closes connections at any time."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from appliance.errors import WorkerFailedError, WorkerUnreachableError
from appliance.infra.settings import PoolSettings
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_tls import WorkerTls

NO_COUNTS = [
    (404, "{}"),
    (401, "{}"),
    (200, ""),
    (200, "[]"),
    (200, "{}"),
    (200, '{"prompt_tokens": 7}'),
    (200, '{"prompt_tokens": 7, "completion_tokens": -1}'),
    (200, '{"prompt_tokens": true, "completion_tokens": 1}'),
    (500, '{"prompt_tokens": 7, "completion_tokens": 1}'),
]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
PART = b"HTTP/1.1 200 OK\r\nContent-"


class Scripted:
    """Answers the requests of each connection by its list; None closes the connection unanswered."""

    def __init__(self, *connections):
        self.connections, self.heard = list(connections), 0
        self.server, self.serving = None, set()

    async def serve(self, reader, writer):
        self.serving.add(asyncio.current_task())
        with suppress(OSError):
            await self.answer(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def answer(self, reader, writer):
        for said in self.connections.pop(0):
            await reader.readuntil(b"body")
            self.heard += 1
            if self.heard == 2 and not self.connections:
                self.server.close()
            if said is not None:
                writer.write(said)
                await writer.drain()
            if said != ANSWER:
                break
        else:
            await reader.read()


@asynccontextmanager
async def _asking(*connections):
    scripted = Scripted(*connections)
    scripted.server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    port = scripted.server.sockets[0].getsockname()[1]
    worker = Worker(worker_id=WorkerId("w"), url=f"http://127.0.0.1:{port}")
    async with WorkerClient.open(
        token="secret", tls=WorkerTls(PoolSettings()), connect_seconds=2.0
    ) as client:

        async def ask():
            async with client.forward(worker, "/v1/completions", [b"body"], {}, 5.0) as answer:
                return answer.status, await answer.read(5.0)

        yield ask, scripted
    scripted.server.close()
    await asyncio.gather(*scripted.serving)


async def test_a_kept_connection_that_was_just_closed_is_no_failure():
    """Workers close idle connections; the request is sent again, without an effect on the client."""
    async with _asking([ANSWER, None], [ANSWER]) as (ask, scripted):
        assert await ask() == (200, b"{}")
        assert await ask() == (200, b"{}")
        assert scripted.heard == 3


async def test_a_new_connection_that_is_closed_is_a_failure():
    """It was not closed for being idle: the request itself may be why."""
    async with _asking([None], [ANSWER]) as (ask, scripted):
        with pytest.raises(WorkerFailedError, match="closed the connection"):
            await ask()
        assert scripted.heard == 1


async def test_a_request_whose_answer_has_begun_is_not_retried():
    """The worker was processing it."""
    async with _asking([ANSWER, PART], [ANSWER]) as (ask, scripted):
        assert await ask() == (200, b"{}")
        with pytest.raises(WorkerFailedError, match="closed the connection"):
            await ask()
        assert scripted.heard == 2


async def test_a_worker_that_is_gone_after_a_request_is_not_called_unreachable():
    """A worker without the request can be replaced for free; one that died of it must not kill others."""
    async with _asking([ANSWER, None]) as (ask, scripted):
        assert await ask() == (200, b"{}")
        with pytest.raises(WorkerFailedError, match="closed the connection") as caught:
            await ask()
        assert not isinstance(caught.value, WorkerUnreachableError)
        assert scripted.heard == 2


@pytest.mark.parametrize(("status", "text"), NO_COUNTS)
async def test_a_count_that_cannot_be_read_is_none(status, text):
    """The gateway then estimates; a worker that is gone is the same."""

    async def answer(_request):
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/appliance/usage/one", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    worker = Worker(worker_id=WorkerId("w"), url=f"http://{host}:{port}")
    async with SpeculationClient.open(token="the token", tls=WorkerTls(PoolSettings())) as client:
        assert await client.usage(worker, "one") is None
        await runner.cleanup()
        assert await client.usage(worker, "one") is None
