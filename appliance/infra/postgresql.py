"""
Connections to PostgreSQL: the driver pg8000 with time-outs, TLS options and complete clean-up.

Every statement is bounded twice: by the server, and by the socket if the server does not answer.  After a
time-out the connection is closed: a late answer would be taken for that of the next statement.  Fails closed:
every failure is a database error, except that a database with another encoding than UTF-8, which cannot keep
every text, is a configuration error.
"""

import socket
import ssl
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pg8000  # type: ignore[import-untyped]
from pg8000 import core
from sqlalchemy import URL, Engine, create_engine, event

from appliance.errors import ConfigurationError

DRIVERS = ("postgresql", "postgresql+pg8000")
ENCODING = "UTF8"
OPTIONS = frozenset({"unix_sock", "password_file", "sslmode", "sslrootcert", "sslcert", "sslkey"})
SSL_MODES = ("disable", "prefer", "require", "verify-ca", "verify-full")
SSL_REQUEST = struct.pack("!ii", 8, 80877103)
"""PostgreSQL's protocol, 55.7: asks whether the server encrypts; it answers S or N."""


@dataclass(frozen=True, slots=True)
class Encryption:
    context: ssl.SSLContext
    is_required: bool
    """Otherwise a server that does not encrypt is accepted."""


def open_postgresql(url: URL, *, busy_seconds: float, idle: int) -> Engine:
    """
    An engine that connects when it is first used.

    The URL's query may hold `unix_sock`, `password_file`, and libpq's `sslmode` with `sslrootcert`, `sslcert`
    and `sslkey`; ConfigurationError if it holds something else, or a file cannot be read.
    """
    arguments, encryption = _arguments(url, busy_seconds), _encryption(_options(url))

    def connect() -> Any:  # noqa: ANN401 - the driver has no types
        try:
            reached = _encrypted(_reach(arguments), encryption, arguments["host"])
            return _Connection(sock=reached, **{**arguments, "unix_sock": None})
        except OSError as error:
            raise pg8000.InterfaceError(f"network error: {error}") from error
        except AttributeError as error:
            if arguments["password"] is not None:
                raise
            # The driver's reaction if the server requires a password and there is none.
            raise pg8000.InterfaceError("the server asks for a password, and none was given") from error

    engine = create_engine(
        url.set(drivername=DRIVERS[1], query={}),
        creator=connect,
        pool_pre_ping=True,
        pool_size=idle,
        max_overflow=-1,
    )
    # One statement with many rows; the driver would send each by itself and wait for its answer.
    engine.dialect.use_insertmanyvalues_wo_returning = True
    _prepare_connections(engine)
    return engine


class _Connection(pg8000.Connection):  # type: ignore[misc]
    """A connection that reports time-outs as database errors, and closes its socket."""

    _usock: Any = None
    _sock: Any = None

    def __init__(self, *, sock: socket.socket, **arguments: Any) -> None:  # noqa: ANN401 - the driver has no types
        try:
            super().__init__(sock=sock, **arguments)
        except BaseException:
            # The driver leaves it open if the server disconnects during the handshake.
            self.close()
            sock.close()
            raise

    def handle_messages(self, context: Any) -> None:  # noqa: ANN401 - the driver has no types
        try:
            super().handle_messages(context)
        except OSError as error:
            raise pg8000.InterfaceError(f"network error: {error}") from error

    def execute_unnamed(
        self,
        statement: str,
        vals: Sequence[Any] = (),
        oids: Sequence[int] = (),
        stream: Any = None,  # noqa: ANN401 - the driver has no types
    ) -> Any:  # noqa: ANN401
        """As the driver's, which waits for the server three times: here it answers once, at the end."""
        if stream is not None:
            return super().execute_unnamed(statement, vals=vals, oids=oids, stream=stream)
        context, encoding = core.Context(statement), self._client_encoding
        nothing, count, length = core.NULL_BYTE, core.H_pack, core.i_pack
        # Before anything is sent: a value may be impossible to encode.
        parse = [nothing, statement.encode(encoding), nothing, count(len(oids))]
        parse += [length(max(oid, 0)) for oid in oids]
        bind = [nothing, nothing, count(0), count(len(vals))]
        for value in core.make_params(self.py_types, vals):
            content = b"" if value is None else value.encode(encoding)
            bind += [length(-1 if value is None else len(content)), content]
        bind.append(count(0))
        self._send_message(core.PARSE, b"".join(parse))
        self._send_message(core.DESCRIBE, core.STATEMENT + nothing)
        self._send_message(core.BIND, b"".join(bind))
        try:
            self._sock.write(core.EXECUTE_MSG + core.SYNC_MSG)
            self._sock.flush()
        except OSError as error:
            raise pg8000.InterfaceError(f"network error: {error}") from error
        self.handle_messages(context)
        return context

    def close(self) -> None:
        stream = self._sock
        # The server may be gone already.
        with suppress(pg8000.InterfaceError, OSError):
            super().close()
        # The driver only drops its reference, so an exception that is kept elsewhere keeps the descriptor
        # open.
        with suppress(OSError):
            if stream is not None:
                stream.close()


def _reach(arguments: dict[str, Any]) -> socket.socket:
    if arguments["unix_sock"] is None:
        opened = socket.create_connection((arguments["host"], arguments["port"]), arguments["timeout"])
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The driver writes a statement in pieces: without this each waits 40 ms for the server's delayed
        # acknowledgement of the one before.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.settimeout(arguments["timeout"])
        opened.connect(arguments["unix_sock"])
    except OSError:
        opened.close()
        raise
    return opened


def _encrypted(opened: socket.socket, encryption: Encryption | None, host: str) -> socket.socket:
    """As the driver would; but that reads the system's authorities again for each connection."""
    if encryption is None:
        return opened
    try:
        opened.sendall(SSL_REQUEST)
        if opened.recv(1) == b"S":
            return encryption.context.wrap_socket(opened, server_hostname=host)
    except BaseException:
        opened.close()
        raise
    if encryption.is_required:
        opened.close()
        raise pg8000.InterfaceError("the server offers no SSL")
    return opened


def _options(url: URL) -> dict[str, str]:
    return {name: value if isinstance(value, str) else value[-1] for name, value in url.query.items()}


def _arguments(url: URL, busy_seconds: float) -> dict[str, Any]:
    options = _options(url)
    if url.drivername not in DRIVERS:
        raise ConfigurationError(f"the database URL names the driver {url.drivername}: use postgresql://")
    if unknown := sorted(options.keys() - OPTIONS):
        raise ConfigurationError(f"the database URL has an option {unknown[0]}, which is unknown")
    if not url.username:
        raise ConfigurationError("the database URL names no user: use postgresql://USER@HOST/DATABASE")
    milliseconds = str(max(1, round(busy_seconds * 1000)))
    return {
        "user": url.username,
        "password": _password(url, options.get("password_file")),
        "host": url.host or "localhost",
        "port": url.port or 5432,
        "database": url.database,
        "unix_sock": options.get("unix_sock"),
        "ssl_context": False,  # `_encrypted` has done it
        # The server's own limit comes first if it still answers: its error is more precise.
        "timeout": busy_seconds + 1,
        "application_name": "appliance",
        "startup_params": {
            "statement_timeout": milliseconds,
            "lock_timeout": milliseconds,
            # A client that is cut off in a transaction must not keep others from writing.
            "idle_in_transaction_session_timeout": milliseconds,
            "default_transaction_isolation": "read committed",
        },
    }


def _password(url: URL, file: str | None) -> str | None:
    if file is None:
        return str(url.password) if url.password is not None else None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the database password {file}: {error}") from error


def _encryption(options: Mapping[str, str]) -> Encryption | None:
    """None for connections that are never encrypted."""
    mode = options.get("sslmode", "prefer")
    if mode not in SSL_MODES:
        raise ConfigurationError(f"the database URL has sslmode={mode}: use one of {', '.join(SSL_MODES)}")
    if mode == "disable" or "unix_sock" in options:
        return None
    files = options if mode != "prefer" else {}  # of no use where the server need not encrypt
    try:
        if mode in {"verify-ca", "verify-full"}:
            context = ssl.create_default_context(cafile=files.get("sslrootcert"))
            context.check_hostname = mode == "verify-full"
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if "sslrootcert" in files:  # nothing is checked by it, but a file that is not there is a mistake
                context.load_verify_locations(files["sslrootcert"])
        if "sslcert" in files:
            context.load_cert_chain(files["sslcert"], files.get("sslkey"))
    except OSError as error:
        raise ConfigurationError(f"cannot use the database's TLS files: {error}") from error
    return Encryption(context, is_required=mode != "prefer")


def _prepare_connections(engine: Engine) -> None:
    """Make commits durable, and refuse a database that cannot keep every text."""
    is_known = False

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:  # noqa: ANN401 - the driver has no types
        nonlocal is_known
        cursor = connection.cursor()
        # A stricter setting of the server's (remote_apply) is kept.
        cursor.execute(
            "SELECT current_setting('server_encoding'), current_database(),"
            " CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')"
            " THEN set_config('synchronous_commit', 'on', false) END"
        )
        encoding, database, _commit = cursor.fetchone()
        cursor.close()
        connection.commit()
        if encoding != ENCODING:
            connection.close()
            refusal = (
                f"the database {database} has the encoding {encoding}, which cannot keep every text: "
                f"recreate it with ENCODING '{ENCODING}' TEMPLATE template0"
            )
            # If it was right before, another database answers now: an outage, which should not end a gateway.
            raise pg8000.InterfaceError(refusal) if is_known else ConfigurationError(refusal)
        is_known = True
