"""
Client certificates: their names, and the tenant these map to.  Pure.

TLS has already verified that a trusted authority signed the certificate and that the client holds its key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError

EXTENSION = "appliance.client_certificate"
"""Key of the `ClientCertificate` in an ASGI scope's `extensions`, if the connection has one."""
KINDS = {"URI": "uri", "DNS": "dns"}


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """The names in a client's certificate: `uri:spiffe://bank/billing`, `dns:host.bank`, `cn:billing`."""

    names: tuple[str, ...]


def read_certificate(peer: Mapping[str, Any]) -> ClientCertificate:
    """The names in a result of `ssl.SSLObject.getpeercert()`, possibly none."""
    alternatives = [
        f"{KINDS[kind]}:{value.lower() if kind == 'DNS' else value}"
        for kind, value in peer.get("subjectAltName", ())
        if kind in KINDS
    ]
    common = [
        f"cn:{value}"
        for relative in peer.get("subject", ())
        for attribute, value in relative
        if attribute == "commonName"
    ]
    return ClientCertificate(names=(*alternatives, *common))


def find_tenant(certificate: ClientCertificate, tenants: Mapping[str, str]) -> tuple[str, str]:
    """
    The tenant of a certificate, by `tls.client_tenants`, and the name that maps to it.

    Raises RefusedCallerError if its names map to no tenant, or to several.
    """
    named = {tenants[name]: name for name in certificate.names if name in tenants}
    if len(named) != 1:
        raise RefusedCallerError(RefusalReason.CERTIFICATE_TENANT)
    return named.popitem()
