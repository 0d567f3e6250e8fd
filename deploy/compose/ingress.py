"""
A door of `deploy/compose.yaml`: passes TCP connections on to one address, and does nothing else.

    ingress.py PORT HOST:PORT

An engine publishes no port of a container that is on internal networks alone, and a container on any other
network can reach out.  So the gateway is on internal networks alone, and this is on the other one: a process
without keys, data or configuration, that opens connections to one address only and reads nothing of what
passes, which with TLS it could not.

A connection ends soon after the gateway ends it, which has a bound for everything a client can keep
waiting; and when a client has read nothing for long, which the gateway does not see from behind this.
"""

import asyncio
import resource
import signal
import sys
from contextlib import suppress

CHUNK_BYTES = 64 * 2**10
BACKLOG = 2048
STALLED_SECONDS = 600.0
"""Maximum time without progress of a write; longer than the gateway's own limit for clients."""
LINGER_SECONDS = 10.0
"""Maximum time for a client to close its side after the gateway has closed."""


class Ingress:
    """Listens, and forwards each connection to one address."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, port: int, stop: asyncio.Event) -> None:
        """Forward connections until asked to stop; then accept none and let the open ones finish."""
        server = await asyncio.start_server(self._accept, port=port, backlog=BACKLOG, limit=CHUNK_BYTES)
        await stop.wait()
        server.close()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._pass_on(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        await connection

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A broken connection is reported by client or gateway, not here.
        with suppress(OSError, ExceptionGroup):
            try:
                inner_reader, inner_writer = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
                try:
                    async with asyncio.TaskGroup() as both:
                        asking = both.create_task(_copy(reader, inner_writer))
                        await _copy(inner_reader, writer)
                        await asyncio.wait({asking}, timeout=LINGER_SECONDS)
                        asking.cancel()
                finally:
                    inner_writer.close()
            finally:
                await _end(writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes, with back-pressure, and then the end of the stream."""
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        async with asyncio.timeout(STALLED_SECONDS):
            await writer.drain()
    writer.write_eof()


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close it, and drop unsent bytes."""
    writer.close()
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            await writer.wait_closed()
    finally:
        writer.transport.abort()


async def main(port: int, target: str) -> None:
    """Run until SIGTERM or SIGINT."""
    host, _, inner_port = target.rpartition(":")
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Ingress(host, int(inner_port)).serve(port, stop)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
