"""No test reaches another machine."""

import socket

import pytest

OUTSIDE = ("192.0.2.1", 443)
"""An address that nobody has (RFC 5737)."""
WAYS = {
    "connect": lambda made: made.connect(OUTSIDE),
    "sendto": lambda made: made.sendto(b"x", OUTSIDE),
    "sendmsg": lambda made: made.sendmsg([b"x"], [], 0, OUTSIDE),
    "getaddrinfo": lambda _: socket.getaddrinfo("outside.example", 443),
    "gethostbyname": lambda _: socket.gethostbyname("outside.example"),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_machine_is_refused(way):
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made,
        pytest.raises(PermissionError, match="tests stay on this machine"),
    ):
        WAYS[way](made)
