"""
What keeps tests on this machine: an audit hook that refuses every other address.

Standard library only, so that the clients' own environments can use it too.
"""

import errno
import ipaddress

HERE = {"localhost", "", None}


def _is_here(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in HERE:
        return True
    try:
        address = ipaddress.ip_address(str(host))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def stay_here(event: str, arguments: tuple) -> None:
    """Refuse to look up or connect to anything but loopback, whichever library tries."""
    if event in {"socket.connect", "socket.sendto"}:
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        host = arguments[0]
    else:
        return
    if not _is_here(host):
        raise PermissionError(errno.EPERM, f"tests stay on this machine, and something asked for {host}")
