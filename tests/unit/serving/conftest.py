"""What tests of HTTP and processes need of the machine."""

import fcntl
import socket
import struct

import pytest

from appliance.serving.vllm import middleware, redaction


@pytest.fixture(autouse=True)
def redactions(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often this process would have been redacted: that changes Python itself, and cannot be undone."""
    asked: list[None] = []
    for module in (middleware, redaction):
        monkeypatch.setattr(module, "redact_logs", lambda: asked.append(None))
    return asked


@pytest.fixture(scope="session")
def loopback():
    """A fresh network namespace, which `make unit` runs in, has its loopback switched off."""
    name, get_flags, set_flags, up = b"lo", 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(probe, get_flags, struct.pack("16s24x", name)))
        if not flags & up:
            fcntl.ioctl(probe, set_flags, struct.pack("16sh22x", name, flags | up))
