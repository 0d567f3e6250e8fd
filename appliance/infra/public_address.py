"""
Whether a destination is outside the enclave: the internet routes its address (`ipaddress`'s `is_global`).

A name that does not resolve is not public: nothing can be sent to it.  Callers check again before they send.
"""

import socket
from collections.abc import Callable
from ipaddress import ip_address

Resolve = Callable[[str], list[str]]  # addresses of a host; raises `OSError` if there are none


def resolve_host(host: str) -> list[str]:
    """By this machine's resolver; blocks."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def public_address_of(host: str, resolve: Resolve = resolve_host) -> str | None:
    """The first public address of a host, if it has one; blocks."""
    try:
        found = resolve(host)
    except OSError:
        return None
    return next((text for text in found if ip_address(text.partition("%")[0]).is_global), None)
