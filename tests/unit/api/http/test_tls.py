"""Errors for unusable files, and the change to new ones."""

import ssl
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from appliance.api.http.tls import Tls, command_context, open_tls
from appliance.errors import ConfigurationError
from appliance.infra.logs import configure_logs
from appliance.infra.settings import LogSettings, TlsSettings
from appliance.tenancy.identity.certificates import read_certificate
from tests.certificates import LOOPBACK, Authority

AUTHORITY, CLIENTS = Authority("servers"), Authority("clients")


def opened(settings: TlsSettings) -> Tls:
    logger = configure_logs(LogSettings(format="json"), terminal=False)
    found = open_tls(settings, logger=logger, clock=time.time)  # noqa: TID251 - certificates are made by it
    assert found is not None
    return found


@pytest.fixture
def settings(tmp_path: Path) -> TlsSettings:
    files = AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK)
    return TlsSettings(certificate_file=files.certificate, key_file=files.key)


@pytest.fixture
def mutual(tmp_path: Path, settings: TlsSettings) -> TlsSettings:
    """With an authority of clients."""
    (tmp_path / "ca.pem").write_text(CLIENTS.pem)
    return settings.model_copy(update={"client_ca_file": tmp_path / "ca.pem"})


def client(authority: Authority = AUTHORITY) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.pem)
    return context


def handshake(tls: Tls, context: ssl.SSLContext, name: str | None = "localhost") -> tuple[Any, Any]:
    """Client's and server's end after a whole handshake, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.context.wrap_bio(to_server, to_client, server_side=True)
    near = context.wrap_bio(to_client, to_server, server_hostname=name)
    waiting = [near, server]
    for _ in range(10):
        for end in tuple(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    return near, server


def serial(end: Any) -> int:
    return x509.load_der_x509_certificate(end.getpeercert(binary_form=True)).serial_number


def test_without_a_certificate_there_is_no_tls():
    """Plain HTTP stays the default, on loopback."""
    logger = configure_logs(LogSettings(), terminal=False)
    assert open_tls(TlsSettings(), logger=logger, clock=lambda: 0.0) is None


def test_tls_versions_follow_the_settings(settings):
    """1.3 by default, 1.2 if the client needs it and the settings allow it, nothing older."""
    tls = opened(settings)
    assert handshake(tls, client())[0].version() == "TLSv1.3"
    old = client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(tls, old)[0].version() == "TLSv1.2"
    with pytest.raises(ssl.SSLError):
        handshake(opened(settings.model_copy(update={"minimum_version": "1.3"})), old)


def test_a_key_with_a_password_is_read(tmp_path):
    """From a file with or without a newline at the end."""
    files = AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK, password=b"open sesame")
    (tmp_path / "password").write_text("open sesame\n")
    settings = TlsSettings(
        certificate_file=files.certificate, key_file=files.key, key_password_file=tmp_path / "password"
    )
    assert handshake(opened(settings), client())


@pytest.mark.parametrize("name", ["localhost", None])
def test_new_files_apply_to_clients_with_and_without_sni(settings, tmp_path, name):
    """A client that connects to an address sends no server name."""
    tls, context = opened(settings), client()
    context.check_hostname = name is not None
    before, _ = handshake(tls, context, name)
    first_end = tls.not_after
    AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK, lasts=timedelta(days=60))
    assert serial(handshake(tls, context, name)[0]) == serial(before)
    tls.renew()
    after, _ = handshake(tls, context, name)
    assert serial(after) != serial(before)
    assert tls.not_after > first_end
    AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK)
    tls.renew()
    assert serial(handshake(tls, context, name)[0]) not in {serial(before), serial(after)}


def test_a_certificate_without_its_key_is_not_applied(settings, tmp_path, capsys):
    """Between the two writes the old pair stays in use; after the second the new one is used."""
    tls = opened(settings)
    before, _ = handshake(tls, client())
    old_key = settings.key_file.read_bytes()
    AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK)
    new_key = settings.key_file.read_bytes()
    settings.key_file.write_bytes(old_key)
    tls.renew()
    assert serial(handshake(tls, client())[0]) == serial(before)
    assert "tls_files_not_taken_over" in capsys.readouterr().err
    settings.key_file.unlink()
    settings.key_file.write_bytes(new_key)
    tls.renew()
    assert serial(handshake(tls, client())[0]) != serial(before)


def test_a_client_certificate_is_requested_but_not_required(mutual, tmp_path):
    """A client with one shows its names, one without connects, one of an unknown authority does not."""
    tls = opened(mutual)
    files = CLIENTS.issue(tmp_path, "billing", x509.UniformResourceIdentifier("spiffe://bank/billing"))
    known = client()
    known.load_cert_chain(files.certificate, files.key)
    _, server = handshake(tls, known)
    assert read_certificate(server.getpeercert()).names == ("uri:spiffe://bank/billing", "cn:billing")
    assert handshake(tls, client())[1].getpeercert() is None
    stranger = client()
    own = Authority("strangers").issue(tmp_path, "stranger")
    stranger.load_cert_chain(own.certificate, own.key)
    with pytest.raises(ssl.SSLError):
        handshake(tls, stranger)


def test_an_authority_removed_from_the_file_is_not_trusted(mutual, tmp_path):
    """Clients of the new one are, and no session outlives the change."""
    tls, successors = opened(mutual), Authority("successors")
    files = CLIENTS.issue(tmp_path, "billing")
    known = client()
    known.load_cert_chain(files.certificate, files.key)
    near, _ = handshake(tls, known)
    assert near.session is None or not near.session.has_ticket
    mutual.client_ca_file.write_text(successors.pem)
    tls.renew()
    with pytest.raises(ssl.SSLError):
        handshake(tls, known)
    files = successors.issue(tmp_path, "billing")
    known.load_cert_chain(files.certificate, files.key)
    assert handshake(tls, known)[1].getpeercert()


@pytest.mark.parametrize(
    ("field", "content", "words"),
    [
        ("certificate_file", None, "No such file"),
        ("certificate_file", "nonsense", "no PEM certificate"),
        ("key_file", None, "No such file"),
        ("key_file", "nonsense", "no PEM private key"),
        ("key_password_file", None, "No such file"),
        ("client_ca_file", None, "No such file"),
        ("client_ca_file", "nonsense", "no PEM certificates"),
        ("client_ca_file", "ü", "no PEM certificates"),
    ],
)
def test_an_unusable_file_is_named_with_its_setting(settings, tmp_path, field, content, words):
    file = tmp_path / "broken"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=words) as error:
        opened(settings.model_copy(update={field: file}))
    assert str(error.value).startswith(f"tls.{field} {file}")
    assert "\n" not in str(error.value)


def test_a_key_of_another_certificate_is_refused(settings, tmp_path):
    """With a plainer message than OpenSSL's."""
    other = AUTHORITY.issue(tmp_path, "other")
    with pytest.raises(ConfigurationError, match="is not the key of the certificate"):
        opened(settings.model_copy(update={"key_file": other.key}))


@pytest.mark.parametrize("password", [None, "wrong"])
def test_a_key_without_its_password_is_refused_without_a_prompt(tmp_path, password):
    """A start never waits for a terminal."""
    files = AUTHORITY.issue(tmp_path, "gateway", password=b"open sesame")
    given = None
    if password is not None:
        given = tmp_path / "password"
        given.write_text(password)
    with pytest.raises(ConfigurationError, match="password"):
        opened(TlsSettings(certificate_file=files.certificate, key_file=files.key, key_password_file=given))


@pytest.mark.parametrize(
    ("days", "event"),
    [(30, "tls_certificate_loaded"), (3, "tls_certificate_expires_soon"), (-1, "tls_certificate_expired")],
)
def test_a_certificate_that_expires_soon_or_has_expired_causes_a_warning(tmp_path, capsys, days, event):
    """It is still served: clients decide whether they trust it."""
    files = AUTHORITY.issue(tmp_path, "gateway", lasts=timedelta(days=days))
    opened(TlsSettings(certificate_file=files.certificate, key_file=files.key))
    assert event in capsys.readouterr().err


def test_a_command_trusts_the_certificate_in_its_own_settings(settings, tmp_path):
    """With any host name and issuer; another gateway's certificate is not trusted."""
    tls = opened(settings)
    context = command_context(settings, is_own=True)
    assert handshake(tls, context, "10.0.0.1")
    other = AUTHORITY.issue(tmp_path, "other", *LOOPBACK)
    with pytest.raises(ssl.SSLError):
        handshake(opened(TlsSettings(certificate_file=other.certificate, key_file=other.key)), context)
    with pytest.raises(ssl.SSLError):
        handshake(tls, command_context(settings, is_own=False))


def test_a_command_sends_its_client_certificate(mutual, tmp_path):
    """So that commands work if certificates are required."""
    files = CLIENTS.issue(tmp_path, "operator")
    settings = mutual.model_copy(
        update={"command_certificate_file": files.certificate, "command_key_file": files.key}
    )
    _, server = handshake(opened(settings), command_context(settings, is_own=True))
    assert read_certificate(server.getpeercert()).names == ("cn:operator",)
    wrong = settings.model_copy(update={"command_key_file": settings.key_file})
    with pytest.raises(ConfigurationError, match="command_certificate_file"):
        command_context(wrong, is_own=True)
