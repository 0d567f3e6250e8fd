"""
TLS of the picker: the certificate of the settings, renewed when its files change, or one made at the start.

Proxies verify the certificate of a picker only if they are told to; without verification, TLS protects
against readers of the network and not against another process at the picker's address.  Fails closed at the
start; a broken file found later changes nothing.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from appliance.api.http.tls import open_tls
from appliance.errors import ConfigurationError
from appliance.infra.logs import Logger
from appliance.infra.settings import Settings
from appliance.tenancy.identity.files import stamp

SELF_SIGNED_DAYS = 3650


def credentials_of(
    settings: Settings, *, logger: Logger, clock: Callable[[], float]
) -> grpc.ServerCredentials | None:
    """
    None for plaintext; raises ConfigurationError if a file cannot be used.

    `clock` gives Unix time.
    """
    if settings.picker.plaintext:
        return None
    tls = settings.tls
    if tls.certificate_file is None or tls.key_file is None:
        return grpc.ssl_server_credentials([_self_signed(clock())])
    if tls.key_password_file is not None:
        raise ConfigurationError(
            "tls.key_password_file: the picker's key must not be encrypted; leave it out"
        )
    certificate, key, authorities = tls.certificate_file, tls.key_file, tls.client_ca_file
    files = [each for each in (certificate, key, authorities) if each is not None]

    def load() -> grpc.ServerCertificateConfiguration:
        open_tls(tls, logger=logger, clock=clock)  # checks that they fit each other
        return grpc.ssl_server_certificate_configuration(
            [(key.read_bytes(), certificate.read_bytes())],
            root_certificates=authorities.read_bytes() if authorities is not None else None,
        )

    read, first = stamp(files), load()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called at each handshake; with None the former certificate stays."""
        nonlocal read
        if (now := stamp(files)) == read:
            return None
        try:
            fresh = load()
        except (ConfigurationError, OSError):
            return None  # between a new certificate and its key; tried again at the next handshake
        read = now
        return fresh

    return grpc.dynamic_ssl_server_credentials(
        first, renewed, require_client_authentication=authorities is not None
    )


def _self_signed(now: float) -> tuple[bytes, bytes]:
    """A key and its certificate (PEM), which are never written to a disk."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "appliance-picker")])
    start = datetime.fromtimestamp(now, UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(start - timedelta(days=1))
        .not_valid_after(start + timedelta(days=SELF_SIGNED_DAYS))
        .sign(key, SHA256())
    )
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text, certificate.public_bytes(Encoding.PEM)
