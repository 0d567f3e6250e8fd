"""
Certificates for tests: an authority, and what it signs, on elliptic curves because those are quick to make.
"""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Files:
    """Where a certificate and its key were written."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.certificate = (
            _builder(self._name, self._name, self._key, timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        """The authority's own certificate, for clients that trust it."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def issue(
        self,
        directory: Path,
        name: str,
        *alternatives: x509.GeneralName,
        lasts: timedelta = timedelta(days=30),
        password: bytes | None = None,
    ) -> Files:
        """Write a certificate for `name` (its common name) and its key; existing files are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._name, key, lasts)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        files = Files(directory / f"{name}.pem", directory / f"{name}.key")
        certificate = builder.sign(self._key, hashes.SHA256())
        files.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
        hidden = NoEncryption() if password is None else BestAvailableEncryption(password)
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))
        return files


LOOPBACK = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
"""The names of a server in a test."""


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: timedelta
) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + lasts
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(end, datetime.now(UTC)) - timedelta(days=1))
        .not_valid_after(end)
    )
