"""
Client certificates: the names in one, and the tenant they stand for.  Pure.

That a certificate was signed by an authority we believe, and that the client holds its key, TLS has
checked before anything here is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.tenancy.identity.refusal import Reason, RefusedCallerError

EXTENSION = "appliance.client_certificate"
"""Where an ASGI scope's `extensions` hold the `ClientCertificate`, on connections that came with one."""
KINDS = {"URI": "uri", "DNS": "dns"}


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """The names in a client's certificate: `uri:spiffe://bank/billing`, `dns:host.bank`, `cn:billing`."""

    names: tuple[str, ...]


def read_certificate(peer: Mapping[str, Any]) -> ClientCertificate:
    """The names in what `ssl.SSLObject.getpeercert()` returned; none for a certificate without any."""
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
    Whose a certificate is.

    Args:
        certificate: what the client came with.
        tenants: tenant by name in the certificate, as in `tls.client_tenants`.

    Returns:
        The tenant and the name that says so.

    Raises:
        RefusedCallerError: its names lead to no tenant, or to several.
    """
    named = {tenants[name]: name for name in certificate.names if name in tenants}
    if len(named) != 1:
        raise RefusedCallerError(Reason.CERTIFICATE_TENANT)
    return named.popitem()
