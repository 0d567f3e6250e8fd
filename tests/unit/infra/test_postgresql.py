"""What a PostgreSQL URL may say; what the server then does is in tests/contract."""

import socket
import ssl
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from appliance.errors import ConfigurationError
from appliance.infra.database import first_line, open_database
from appliance.infra.postgresql import SSL_REQUEST, _encryption

URL = "postgresql://gateway@127.0.0.1/audit"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql+psycopg://a@b/c", "postgresql://"),
        ("postgresql://host/audit", "names no user"),
        (f"{URL}?connect_timeout=3", "connect_timeout"),
        (f"{URL}?sslmode=maybe", "sslmode=maybe"),
        (f"{URL}?sslmode=verify-full&sslrootcert=/no/such/file", "TLS files"),
        (f"{URL}?sslmode=require&sslrootcert=/no/such/file", "TLS files"),
        (f"{URL}?password_file=/no/such/file", "cannot read the database password"),
        ("mysql://a@b/c", "cannot be used"),
    ],
)
def test_unusable_url_is_reported_with_its_reason(url, words):
    """Before anything is connected, in one line."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_database(url, busy_seconds=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["", "?sslmode=require", "?sslmode=verify-ca", "?sslmode=verify-full"])
@pytest.mark.parametrize("driver", ["postgresql", "postgresql+pg8000"])
def test_a_proper_url_makes_an_engine_without_connecting(mode, driver):
    """Nothing has to answer yet; the password is in no text that is shown."""
    url = URL.replace("postgresql", driver).replace("gateway@", "gateway:secret@") + mode
    engine = open_database(url, busy_seconds=1)
    assert "secret" not in engine.url.render_as_string(hide_password=True)
    engine.dispose()


def test_the_server_is_checked_as_strictly_as_the_url_says():
    """`verify-full` checks name and certificate, `verify-ca` the certificate, `require` neither."""
    modes = ("verify-full", "verify-ca", "require", "prefer")
    encryptions = [_encryption({"sslmode": mode}) for mode in modes]
    checked = [(each.context.check_hostname, each.context.verify_mode) for each in encryptions]
    no_check = (False, ssl.CERT_NONE)
    assert checked == [(True, ssl.CERT_REQUIRED), (False, ssl.CERT_REQUIRED), no_check, no_check]
    assert [each.is_required for each in encryptions] == [True, True, True, False]
    assert (_encryption({}).is_required, _encryption({"sslmode": "disable"})) == (False, None)


def test_no_password_is_sent_to_a_server_that_does_not_encrypt_where_it_has_to():
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = []

        def serve():
            client, _ = server.accept()
            with client:
                heard.append(client.recv(4096))
                client.send(b"N")
                heard.append(client.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        engine = open_database(f"postgresql://a:secret@127.0.0.1:{port}/b?sslmode=require", busy_seconds=1)
        with pytest.raises(DBAPIError, match="offers no SSL"):
            engine.connect()
        thread.join()
    assert heard == [SSL_REQUEST, b""]


RESET = struct.pack("ii", 1, 0)
"""SO_LINGER by which a socket is closed as by a machine that went away."""


@pytest.mark.parametrize("said", [b"", b"N", b"NR"], ids=["at once", "when asked for TLS", "when greeted"])
@pytest.mark.parametrize("mode", ["", "?sslmode=disable"])
def test_a_server_that_goes_away_while_it_is_reached_costs_no_descriptor(said, mode):
    """Not even while the error is referenced: a gateway tries again every few seconds, for days."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError):
                while True:
                    reset_after(server.accept()[0], said)

        thread = threading.Thread(target=serve)
        thread.start()
        engine = open_database(f"postgresql://a@127.0.0.1:{server.getsockname()[1]}/b{mode}", busy_seconds=1)
        before, kept = open_sockets(), []
        for _ in range(5):
            with pytest.raises(DBAPIError) as caught:
                engine.connect()
            kept.append(caught.value)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        assert open_sockets() == before


def reset_after(client: socket.socket, said: bytes) -> None:
    """Say so much, each byte in answer to something, and be gone."""
    with client, suppress(OSError):
        for byte in said:
            client.recv(4096)
            client.send(bytes([byte]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def open_sockets() -> set[str]:
    """Those of this process."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith("socket:")}


def test_server_error_is_read_from_its_answer():
    """PostgreSQL answers in fields; the message is one of them."""
    error = Exception({"S": "ERROR", "C": "57014", "M": "canceling statement due to statement timeout"})
    assert first_line(error) == "canceling statement due to statement timeout"
