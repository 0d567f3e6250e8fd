"""
TLS from files: the certificate, its key, and the authorities of client certificates.

New files are read into a new context, which replaces the old one with one assignment: a handshake uses the
old certificate or the new one, never half of each, and open connections continue.  Fails closed at the start;
a broken file found later changes nothing.
"""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509 import Certificate

from appliance.errors import ConfigurationError
from appliance.infra.logs import Logger
from appliance.infra.settings import TlsSettings
from appliance.tenancy.identity.files import stamp

DAY_SECONDS = 86_400
WARN_SECONDS = 14 * DAY_SECONDS
"""Time before a certificate expires from which the gateway warns."""
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class Tls:
    """The gateway's TLS; raises ConfigurationError unless every file can be used."""

    def __init__(
        self,
        certificate_file: Path,
        key_file: Path,
        settings: TlsSettings,
        *,
        logger: Logger,
        clock: Callable[[], float],
    ) -> None:
        self._certificate_file = certificate_file
        self._key_file = key_file
        self._settings = settings
        self._logger = logger
        self._clock = clock
        self._files = [
            file
            for file in (certificate_file, key_file, settings.key_password_file, settings.client_ca_file)
            if file is not None
        ]
        self._stamp = stamp(self._files)
        self.context, self.not_after = self._load()
        """The context to listen with, and the Unix time at which the current certificate expires."""
        self._current = self.context
        # Called in every handshake, also if the client names no server.
        self.context.sni_callback = self._use_current
        self._report()

    def renew(self) -> None:
        """Apply changed files to new connections."""
        now = stamp(self._files)
        if now == self._stamp:
            return
        self._stamp = now
        try:
            self._current, self.not_after = self._load()
        except ConfigurationError as error:
            # Also between a new certificate and its key, if they are not replaced together.
            self._logger.warning("tls_files_not_taken_over", reason=str(error))
            return
        self._report()

    def _use_current(
        self, connection: ssl.SSLObject, _server_name: str | None, _context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _load(self) -> tuple[ssl.SSLContext, float]:
        password = _password(self._settings.key_password_file)
        certificate = _certificate(self._certificate_file)
        _check_key(self._key_file, password, certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[self._settings.minimum_version]
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_alpn_protocols(["http/1.1"])
        try:
            # A password is always given, or OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self._certificate_file, self._key_file, password or "")
        except (OSError, ValueError) as error:
            message = f"tls.certificate_file {self._certificate_file} cannot be used with its key: {error}"
            raise ConfigurationError(message) from error
        if self._settings.client_ca_file is not None:
            _request_certificates(context, self._settings.client_ca_file)
        return context, certificate.not_valid_after_utc.timestamp()

    def _report(self) -> None:
        end = datetime.fromtimestamp(self.not_after, UTC).isoformat()
        left = self.not_after - self._clock()
        if left <= 0:
            self._logger.warning("tls_certificate_expired", path=str(self._certificate_file), detail=end)
        elif left < WARN_SECONDS:
            self._logger.warning("tls_certificate_expires_soon", path=str(self._certificate_file), detail=end)
        else:
            self._logger.info("tls_certificate_loaded", path=str(self._certificate_file), detail=end)


def open_tls(settings: TlsSettings, *, logger: Logger, clock: Callable[[], float]) -> Tls | None:
    """TLS as configured; None without a certificate; raises ConfigurationError if a file cannot be used."""
    if settings.certificate_file is None or settings.key_file is None:
        return None
    return Tls(settings.certificate_file, settings.key_file, settings, logger=logger, clock=clock)


def command_context(settings: TlsSettings, *, is_own: bool) -> ssl.SSLContext:
    """
    TLS of a command that calls a gateway; raises ConfigurationError if a file cannot be used.

    The gateway of the command's own settings is authenticated by its certificate, whatever its host name and
    issuer; any other must have a certificate that the system trusts.
    """
    if is_own and settings.certificate_file is not None:
        certificate = _certificate(settings.certificate_file)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=certificate.public_bytes(Encoding.DER))
    else:
        context = ssl.create_default_context()
    if settings.command_certificate_file is not None:
        try:
            context.load_cert_chain(settings.command_certificate_file, settings.command_key_file, "")
        except (OSError, ValueError) as error:
            name = settings.command_certificate_file
            message = f"tls.command_certificate_file {name} cannot be used with its key: {error}"
            raise ConfigurationError(message) from error
    return context


def _request_certificates(context: ssl.SSLContext, authorities: Path) -> None:
    # Optional: a caller without a certificate may have a key, and health checks need neither.
    context.verify_mode = ssl.CERT_OPTIONAL
    # A resumed session would keep its certificate after its authority was removed from the file.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    try:
        context.load_verify_locations(cadata=_read("client_ca_file", authorities).decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"tls.client_ca_file {authorities} has no PEM certificates") from error


def _read(setting: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"tls.{setting} {file} cannot be read: {error.strerror}") from error


def _password(file: Path | None) -> bytes | None:
    return None if file is None else _read("key_password_file", file).rstrip(b"\r\n")


def _certificate(file: Path) -> Certificate:
    try:
        return x509.load_pem_x509_certificate(_read("certificate_file", file))
    except ValueError as error:
        raise ConfigurationError(f"tls.certificate_file {file} has no PEM certificate") from error


def _check_key(file: Path, password: bytes | None, certificate: Certificate) -> None:
    """Check the key with plainer messages than OpenSSL's."""
    data = _read("key_file", file)
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    try:
        key = load_pem_private_key(data, password if b"ENCRYPTED" in data else None)
        fits = key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)
    except TypeError as error:
        raise ConfigurationError(f"tls.key_file {file} is encrypted: set tls.key_password_file") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        message = f"tls.key_file {file} has no PEM private key we support, or its password is wrong"
        raise ConfigurationError(message) from error
    if not fits:
        message = f"tls.key_file {file} is not the key of the certificate in tls.certificate_file"
        raise ConfigurationError(message)
