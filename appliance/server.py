"""
The HTTP server: a uvicorn that leaves signals and sockets to whoever runs it.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from appliance.errors import ConfigurationError
from appliance.settings import ApiSettings

BACKLOG = 2048


class Server(uvicorn.Server):
    """Stops only when told to: set `should_exit`, and running requests are let finish."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signals: the process has other parts to stop, in an order of its own."""
        yield


def make_server(app: ASGIApp, settings: ApiSettings) -> Server:
    """A server for `app`, not started."""
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            # What uvicorn would print about an exception bypasses the list of fields that may be logged.
            log_level="critical",
            server_header=False,
            date_header=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=settings.drain_seconds,
            proxy_headers=False,
        )
    )


def bind(settings: ApiSettings) -> socket.socket:
    """
    Take the port before anything slow is started.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only where it is: without it, an answer
    # sent in two writes waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{settings.host} port {settings.port}"
        message = f"cannot listen on {where} ({error.strerror}): choose another with --host or --port"
        raise ConfigurationError(message) from error
    listener.setblocking(False)  # noqa: FBT003 - positional only
    return listener
