"""
uvicorn's HTTP protocol with limits on size, number and time of each connection.

uvicorn bounds neither a request's head nor the time it takes to arrive.  Here every connection is bounded,
whatever its client does: by bytes while they arrive, and by time in a check of all connections every second,
so a request that arrives at once costs no timer.

A refusal here is answered in the shape of every other error, and the connection is closed once the client has
had time to read it.
"""

import re
from array import array
from asyncio import Transport
from collections.abc import Callable
from enum import Enum, auto
from fcntl import ioctl
from http import HTTPStatus
from termios import TIOCOUTQ
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from appliance.api.error_responses import render
from appliance.api.request_middleware import DRAIN_BYTES
from appliance.api.streaming import CONNECTION
from appliance.errors import (
    ApplianceError,
    HeadTooLargeError,
    InvalidRequestError,
    RequestTooSlowError,
    TooManyConnectionsError,
)
from appliance.infra.read_turns import ReadTurns
from appliance.infra.settings import ApiSettings
from appliance.tenancy.identity.certificates import EXTENSION, read_certificate

BODY_BYTES_PER_SECOND = 1024
"""Minimum speed of a body, after the grace of `api.body_seconds`."""
READ_BYTES_PER_SECOND = 1024
"""Minimum speed at which a client reads an answer, after the grace of `api.stalled_seconds`."""
CROWDED_IDLE_SECONDS = 5.0
"""Idle time of a connection while the maximum number is open."""
SMALL_PIECES = 1024
MIN_PIECE_BYTES = 64
"""Beyond `SMALL_PIECES` the pieces of a body must be this large on average, because each one is work."""
LINGER_SECONDS = 2.0
"""Time for a refused client to read the error, and for an idle one to end TLS."""
LINGER_BYTES = 2**20
"""Bytes that are read and dropped meanwhile."""
LARGE_DROP_BYTES = 2**16
DROP_PAUSE_SECONDS = 0.05
"""After each read of a larger body whose request is answered already: nothing waits for what is dropped."""
MAX_PIPELINED = 16
"""Maximum requests that a client may send before it has read the first answer."""
SPARE_CONNECTIONS = 256
"""Connections over the limit that get an error; further ones are aborted."""
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
END_OF_HEAD = b"\r\n\r\n"
HEAD_BYTES = 64 * 2**10
"""Maximum size of the request line and headers together."""
HEADER_LINES = 100
"""Maximum header lines of a request."""


class Phase(Enum):
    """The part of a request that the connection waits for."""

    BETWEEN = auto()
    """Nothing has arrived since the last request was complete."""
    HEAD = auto()
    BODY = auto()


class PacedFlow(FlowControl):
    """uvicorn's flow control, of which a connection that paused reads on in its turn."""

    def __init__(self, transport: Transport, turns: ReadTurns) -> None:
        super().__init__(transport)
        self._turns = turns
        self._waits = self._is_listed = False

    def pause_reading(self) -> None:
        self._waits = False
        super().pause_reading()

    def resume_reading(self) -> None:
        if not self.read_paused:
            return
        self._waits = True
        if not self._is_listed:
            self._is_listed = True
            self._turns.add(self._resume_in_turn)

    def _resume_in_turn(self) -> None:
        self._is_listed = False
        if self._waits and not self._transport.is_closing():
            self._waits = False
            super().resume_reading()


class JoinedWrites:
    """
    The transport of one request: it sends the head of an answer of known length together with its body.

    The head of a stream is not kept back, because a client or proxy may wait for it.
    """

    __slots__ = ("_cycle", "_head", "_transport", "is_closing")

    def __init__(self, transport: Transport, cycle: RequestResponseCycle) -> None:
        self._transport, self._cycle = transport, cycle
        self._head: bytes | None = None
        """None until the head was written; then what of it is kept back."""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None and self._cycle.response_started:  # before that it is "100 Continue"
            whole = self._cycle.chunked_encoding is False and self._cycle.scope["method"] != "HEAD"
            self._head, data = (data, b"") if whole else (b"", data)
        elif self._head:
            self._head, data = b"", self._head + data
        if data:
            self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        *,
        turns: ReadTurns,
        config: Config,
        server_state: ServerState,
        settings: ApiSettings,
        on_refusal: Callable[[ApplianceError], None],
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state={})
        self._settings = settings
        self._turns = turns
        self._on_refusal = on_refusal
        self._phase = Phase.BETWEEN
        self._since = 0.0
        """Loop time of the first check of the phase; 0 before it, and if a request arrives at once."""
        self._unparsed_bytes = 0
        """Bytes fed to the parser since its last callback."""
        self._body_bytes = 0
        self._body_pieces = 0
        self._dropped_bytes = 0
        self._stalled_since = 0.0
        self._unread_bytes = 0
        """Bytes the client had not read when writing paused, or when closing began."""
        self._closing_since = 0.0
        self._is_over_limit = False
        self._is_refused = False
        self._refusal: ApplianceError | None = None
        """Why one of our callbacks stopped the parser; None if it stopped by itself."""
        self._running: RequestResponseCycle | None = None
        """The request being answered; `cycle` is the newest one, which may wait behind it."""
        self._on_disconnect: Callable[[], None] | None = None
        self._extensions: dict[str, Any] = {CONNECTION: self}

    # The connection.

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PacedFlow(transport, self._turns)
        self._since = self.loop.time()
        certificate = transport.get_extra_info("peercert")
        if certificate:
            self._extensions[EXTENSION] = read_certificate(certificate)
        self._is_over_limit = len(self.connections) > self._settings.max_connections
        if len(self.connections) > self._settings.max_connections + SPARE_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect the request being answered, also if others wait behind it."""
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        if self._on_disconnect is not None:
            self._on_disconnect()

    # `appliance.api.streaming.Connection`, for the request being answered.

    def write_now(self, data: bytes) -> bool:
        running = self._running
        if running is None or not running.chunked_encoding or running.response_complete:
            return False
        if running.disconnected or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        self._on_disconnect = on_disconnect
        if on_disconnect is not None:
            # The end of a connection that is not read is not seen.
            self.flow.resume_reading()
            if self._running is not None and self._running.disconnected:
                on_disconnect()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._drop(data)
            return
        if self._is_over_limit:
            self._refuse(TooManyConnectionsError("The gateway has too many connections. Try again soon."))
            return
        if self._phase is Phase.BETWEEN and (b"pgrade:" in data or b"PGRADE:" in data):
            data = _without_upgrade(data)
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes and not self._is_refused:
            if self._unparsed_bytes > HEAD_BYTES:
                self._refuse(self._head_too_large())
            elif self._phase is Phase.BETWEEN:
                # Empty lines: a request begins, and its time starts.
                self._phase, self._since = Phase.HEAD, 0.0

    def check(self, now: float) -> None:
        """Close or abort the connection if its time is up; `now` is the loop's."""
        if self._is_refused or self._is_over_limit:
            if now - max(self._since, self._closing_since) > LINGER_SECONDS:
                self.transport.abort()
        elif self.transport.is_closing():
            if not self._closing_since:
                self._closing_since, self._unread_bytes = now, self._count_unread()
            elif self._has_stalled(now - self._closing_since):
                self.transport.abort()
        elif self.flow.write_paused:
            # Closing would wait for a client that does not read.
            if self._has_stalled(now - self._stalled_since):
                self.transport.abort()
        else:
            self._check_phase(now)

    def _check_phase(self, now: float) -> None:
        settings, running = self._settings, self._running
        if self._phase is Phase.BETWEEN:
            # After the first request uvicorn's own timer runs, which ignores the number of connections.
            if running is None and now - self._since > settings.idle_seconds:
                self._close()
            elif len(self.connections) >= settings.max_connections and (
                running is None or running.response_complete
            ):
                self._since = self._since or now
                if now - self._since > CROWDED_IDLE_SECONDS:
                    self._close()
            return
        waits_for_us = self.flow.read_paused or (
            self._phase is Phase.HEAD and running is not None and not running.response_complete
        )
        if waits_for_us or not self._since:
            self._since = now
        elif self._phase is Phase.HEAD and now - self._since > settings.head_seconds:
            self._refuse(RequestTooSlowError("The headers took too long to arrive. Send them again."))
        elif self._phase is Phase.BODY and now - self._since > (
            settings.body_seconds + self._body_bytes / BODY_BYTES_PER_SECOND
        ):
            self._refuse(RequestTooSlowError("The body took too long to arrive. Send it again."))

    def pause_writing(self) -> None:
        self._stalled_since, self._unread_bytes = self.loop.time(), self._count_unread()
        super().pause_writing()

    def _has_stalled(self, seconds: float) -> bool:
        """Whether the client has read too little in the `seconds` since `_unread_bytes` was counted."""
        grace = self._settings.stalled_seconds
        return seconds > grace and seconds > grace + (
            (self._unread_bytes - self._count_unread()) / READ_BYTES_PER_SECOND
        )

    def _count_unread(self) -> int:
        """Bytes the client has not read yet, in this process and in the kernel's send buffer."""
        connection = self.transport.get_extra_info("socket")
        if connection is None or connection.fileno() < 0:
            return 0
        in_kernel = array("i", [0])
        ioctl(connection.fileno(), TIOCOUTQ, in_kernel)
        return self.transport.get_write_buffer_size() + in_kernel[0]

    def shutdown(self) -> None:
        """Close the connection once its request, if any, is answered."""
        if self._is_refused or self._is_over_limit:
            self.transport.abort()
        elif self._running is None or self.cycle.response_complete:
            self._close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that is idle after a request."""
        if not self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        """Close; a client that has read everything but does not end TLS is aborted."""
        self.transport.close()
        if self.scheme == "https":
            self.loop.call_later(LINGER_SECONDS, self._abort_if_read)

    def _abort_if_read(self) -> None:
        if not self._count_unread():
            self.transport.abort()

    # The parser's callbacks; each one is progress.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = Phase.HEAD
        self._since = 0.0
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is refused."""
        self._refusal = self._objection()
        if self._refusal is not None:
            raise self._refusal
        self._phase = Phase.BODY
        self._since = 0.0
        self._unparsed_bytes = self._body_bytes = self._body_pieces = 0
        super().on_headers_complete()
        # Trailers are not headers of the request, and nothing reads them.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        self._body_pieces += 1
        if self._body_pieces > SMALL_PIECES + self._body_bytes // MIN_PIECE_BYTES:
            message = "The body comes in too many small pieces. Send larger chunks."
            self._refusal = InvalidRequestError(message, code="invalid_http")
            raise self._refusal
        if self.cycle.response_complete:
            if self._body_bytes > DRAIN_BYTES * self._settings.max_body_bytes:
                self.transport.abort()
            if self._body_bytes > LARGE_DROP_BYTES and not self.flow.read_paused:
                self.flow.pause_reading()
                self.loop.call_later(DROP_PAUSE_SECONDS, self.flow.resume_reading)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = Phase.BETWEEN
        self._unparsed_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - uvicorn's
        self._running = cycle
        cycle.transport = JoinedWrites(self.transport, cycle)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def _objection(self) -> ApplianceError | None:
        # The head cannot exceed the bytes fed since the last request, so its size is rarely computed.
        if len(self.headers) > HEADER_LINES or (
            self._unparsed_bytes > HEAD_BYTES
            and len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES
        ):
            return self._head_too_large()
        if self.parser.should_upgrade():
            return InvalidRequestError("The gateway supports only HTTP/1.1.", code="invalid_http")
        if len(self.pipeline) >= MAX_PIPELINED:
            message = (
                f"More than {MAX_PIPELINED} requests were pipelined. Read answers, or open more connections."
            )
            return InvalidRequestError(message, code="invalid_http")
        return None

    # Refusals.

    def _head_too_large(self) -> HeadTooLargeError:
        most = f"{HEAD_BYTES} bytes in {HEADER_LINES} lines"
        return HeadTooLargeError(f"The request's headers are too large: at most {most}. Send fewer.")

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP, or what one of our callbacks stopped; `msg` is uvicorn's text for both."""
        self._refuse(self._refusal or InvalidRequestError(msg, code="invalid_http"))

    def _refuse(self, error: ApplianceError) -> None:
        """Answer with an error, and close once the client has had time to read it."""
        self._is_refused = True
        self._closing_since = self.loop.time()
        self._unset_keepalive_if_required()
        self._on_refusal(error)
        running = self._running
        unanswered = running if running is not None and not running.response_complete else None
        is_this_request = self._phase is Phase.BODY and self.cycle is running
        has_started = unanswered is not None and unanswered.response_started
        if self.transport.is_closing() or has_started or (unanswered is not None) != is_this_request:
            # The client would read the error as part of another answer, or as a second one.
            self.transport.abort()
            return
        if unanswered is not None:
            unanswered.disconnected = True
            unanswered.message_event.set()
        self.flow.resume_reading()
        self.transport.write(_on_the_wire(error))
        # Closing at once would reset the connection while the client sends, and it would not read the error.
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.abort()


def _without_upgrade(data: bytes) -> bytes:
    """
    The same request without its `Upgrade` header, which a server may ignore (RFC 9110, section 7.8).

    Java's HTTP client offers HTTP/2 with every first request, and the parser would read its body as the other
    protocol.
    """
    head, end, rest = data.partition(END_OF_HEAD)
    return UPGRADE.sub(b"\r\nx-grade:", head) + end + rest if end else data


def _on_the_wire(error: ApplianceError) -> bytes:
    """An error as a complete HTTP response that closes the connection."""
    response = render(error)
    status = HTTPStatus(response.status_code)
    lines = [
        f"HTTP/1.1 {status} {status.phrase}".encode(),
        *(name + b": " + value for name, value in response.raw_headers),
        b"connection: close",
    ]
    return b"\r\n".join(lines) + END_OF_HEAD + bytes(response.body)
