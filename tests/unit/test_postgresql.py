"""What a PostgreSQL URL may say; what the server then does is in tests/contract."""

import ssl

import pytest

from appliance.database import first_line, open_database
from appliance.errors import ConfigurationError
from appliance.postgresql import _ssl_context

URL = "postgresql://gateway@127.0.0.1/audit"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql+psycopg://a@b/c", "postgresql://"),
        ("postgresql://host/audit", "names no user"),
        (f"{URL}?connect_timeout=3", "connect_timeout"),
        (f"{URL}?sslmode=maybe", "sslmode=maybe"),
        (f"{URL}?sslmode=verify-full&sslrootcert=/no/such/file", "TLS files"),
        (f"{URL}?password_file=/no/such/file", "cannot read the database password"),
        ("mysql://a@b/c", "cannot be used"),
    ],
)
def test_a_url_that_cannot_be_used_says_why(url, words):
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
    strict, chain, encrypted = (
        _ssl_context({"sslmode": mode}) for mode in ("verify-full", "verify-ca", "require")
    )
    assert (strict.check_hostname, strict.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert (chain.check_hostname, chain.verify_mode) == (False, ssl.CERT_REQUIRED)
    assert (encrypted.check_hostname, encrypted.verify_mode) == (False, ssl.CERT_NONE)
    assert (_ssl_context({"sslmode": "disable"}), _ssl_context({})) == (False, None)


def test_what_the_server_says_is_read_from_its_answer():
    """PostgreSQL answers in fields; the message is one of them."""
    error = Exception({"S": "ERROR", "C": "57014", "M": "canceling statement due to statement timeout"})
    assert first_line(error) == "canceling statement due to statement timeout"
