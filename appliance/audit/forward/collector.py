"""
A connection to a syslog collector: TLS only, its name checked, with our certificate if it wants one.

Whatever goes wrong is `ForwardError`.  What a collector sends is read and dropped: unread, it would turn the
end of the connection into a reset, which destroys what the collector has not read yet.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from appliance.errors import ForwardError
from appliance.infra.public_address import public_address_of
from appliance.infra.settings import ForwardSettings, split_host

CONNECT_SECONDS = 10.0
STALLED_SECONDS = 60.0
"""Maximum time in which a collector reads nothing of a batch; then the connection is made again."""
VERDICT_SECONDS = 1.0
"""With TLS 1.3 a collector refuses our certificate only after the handshake: so long it has to say so."""
KEEPALIVE_SECONDS = 30
BUFFER_BYTES = 2**16
"""Written and not yet taken by the kernel, before the sender waits."""
CLOSE_SECONDS = 2.0


class Collector:
    """Made by `open`, used by one task."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ended = asyncio.create_task(_until_ended(reader))

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: ForwardSettings) -> AsyncIterator[Self]:
        """Connect; raises ForwardError if that fails, or the collector refuses at once."""
        host, port = split_host(settings.destination)
        try:
            context = await asyncio.to_thread(_context, settings)
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port, ssl=context, server_hostname=host), CONNECT_SECONDS
            )
        except TimeoutError as error:
            raise ForwardError(f"no answer within {CONNECT_SECONDS:g} s") from error
        except OSError as error:  # of TLS as well
            raise ForwardError(_reason(error)) from error
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        connection: socket.socket | None = writer.get_extra_info("socket")
        if connection is not None:  # else it has ended already, which `wait` reports
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        collector = cls(reader, writer)
        try:
            await collector.wait(VERDICT_SECONDS)
            yield collector
        finally:
            await collector._close()

    async def send(self, data: bytes) -> None:
        """Return once the kernel has all but a small buffer; raises ForwardError if the connection ends."""
        self._writer.write(data)
        drained = asyncio.ensure_future(self._writer.drain())
        try:
            await asyncio.wait(
                {drained, self._ended}, timeout=STALLED_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if self._ended.done():
                raise ForwardError(self._ended.result())
            if not drained.done():
                raise ForwardError(f"it has read nothing for {STALLED_SECONDS:g} s")
            drained.result()
        except OSError as error:
            raise ForwardError(_reason(error)) from error
        finally:
            if not drained.cancel():
                drained.exception()  # seen, so that asyncio does not log it

    async def wait(self, seconds: float) -> None:
        """Pass the time; raises ForwardError as soon as the connection ends."""
        await asyncio.wait({self._ended}, timeout=seconds)
        if self._ended.done():
            raise ForwardError(self._ended.result())

    async def _close(self) -> None:
        self._ended.cancel()
        self._writer.close()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_SECONDS)


async def _until_ended(reader: asyncio.StreamReader) -> str:
    """Why the connection ended."""
    try:
        while await reader.read(BUFFER_BYTES):
            pass
    except OSError as error:
        return _reason(error)
    return "it closed the connection"


def _context(settings: ForwardSettings) -> ssl.SSLContext:
    """Read the files again at each connection: certificates are renewed."""
    host, _ = split_host(settings.destination)
    if not settings.allow_public and (address := public_address_of(host)):
        raise ForwardError(
            f"{host} resolves to {address}, a public address: name a SIEM in your network, or set "
            "audit.forward.allow_public"
        )
    context = ssl.create_default_context(cafile=settings.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.certificate_file is not None:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
    # asyncio's own text names the address only.
    said = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return said or type(error).__name__
