"""
Keeps tests on this machine: an audit hook that refuses every other address.

Standard library only, so that the clients' own environments can use it too.
"""

import errno
import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress

GET_FLAGS, SET_FLAGS = 0x8913, 0x8914
UP = 1
"""`SIOCGIFFLAGS`, `SIOCSIFFLAGS` and `IFF_UP` of Linux."""

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
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        host = arguments[0]
    else:
        return
    if not _is_here(host):
        raise PermissionError(errno.EPERM, f"tests stay on this machine, and something asked for {host}")


def raise_loopback() -> None:
    """Bring `lo` up where it is down, as in a new network namespace, if we may."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(asked, GET_FLAGS, request))
        if not flags & UP:
            fcntl.ioctl(asked, SET_FLAGS, struct.pack("16sH14x", b"lo", flags | UP))
