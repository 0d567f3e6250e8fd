"""
A witness on the network: C2SP `tlog-witness` over HTTP.

Clients are not authenticated: the log must have signed what a witness cosigns.  The default address is
loopback.  Fails closed: without its state it answers 503.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from appliance.audit.witness.witness import (
    BAD_REQUEST,
    MAX_REQUEST_BYTES,
    NOT_FOUND,
    TEXT_TYPE,
    Answer,
    Witness,
)
from appliance.errors import AuditUnavailableError, ConfigurationError

UNAVAILABLE = 503
GRACE_SECONDS = 5.0


def make_app(witness: Witness) -> web.Application:
    """Return the application: `POST /add-checkpoint` and `GET /<origin hash>/checkpoint`."""

    async def add_checkpoint(request: web.Request) -> web.Response:
        try:
            text = (await request.read()).decode()
        except UnicodeDecodeError:
            return _respond(Answer(status=BAD_REQUEST, text="the request is not UTF-8\n"))
        try:
            return _respond(await asyncio.to_thread(witness.add_checkpoint, text))
        except AuditUnavailableError as error:
            return _respond(Answer(status=UNAVAILABLE, text=f"{error}\n"))

    async def checkpoint(request: web.Request) -> web.Response:
        try:
            known = await asyncio.to_thread(witness.checkpoints)
        except AuditUnavailableError as error:
            return _respond(Answer(status=UNAVAILABLE, text=f"{error}\n"))
        by_hash = {hashlib.sha256(origin.encode()).hexdigest(): note for origin, note in known.items()}
        note = by_hash.get(request.match_info["hash"])
        if note is None:
            return _respond(Answer(status=NOT_FOUND, text="no checkpoint of this log was cosigned here\n"))
        return _respond(Answer(status=200, text=note))

    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.router.add_post("/add-checkpoint", add_checkpoint)
    app.router.add_get("/{hash:[0-9a-f]{64}}/checkpoint", checkpoint)
    return app


@asynccontextmanager
async def serving(witness: Witness, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the block runs; gives the base URL.  Raises ConfigurationError if it cannot listen."""
    runner = web.AppRunner(make_app(witness), access_log=None, shutdown_timeout=GRACE_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            message = f"cannot listen on {host} port {port} ({error.strerror}): choose another with --port"
            raise ConfigurationError(message) from error
        bound, number = runner.addresses[0][:2]
        yield f"http://{f'[{bound}]' if ':' in bound else bound}:{number}"
    finally:
        await runner.cleanup()


def _respond(answer: Answer) -> web.Response:
    return web.Response(
        status=answer.status,
        body=answer.text.encode(),
        headers={"Content-Type": answer.content_type if answer.status != UNAVAILABLE else TEXT_TYPE},
    )
