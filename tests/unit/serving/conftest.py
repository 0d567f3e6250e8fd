"""What tests of HTTP and processes need of the machine."""

import fcntl
import socket
import struct

import pytest


@pytest.fixture(scope="session")
def loopback():
    """A fresh network namespace, which `make unit` runs in, has its loopback switched off."""
    name, get_flags, set_flags, up = b"lo", 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(probe, get_flags, struct.pack("16s24x", name)))
        if not flags & up:
            fcntl.ioctl(probe, set_flags, struct.pack("16sh22x", name, flags | up))
