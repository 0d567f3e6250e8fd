"""
What `test_no_egress` runs in an empty network namespace: the appliance, its clients, hostile requests.

    unshare --net python -m tests.integration.enclave DIRECTORY

Leaves in the directory `REPORT`, what happened, and `trace`, what the appliance connected to.
"""

import errno
import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from demo.process import ApplianceProcess
from tests import leaks

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
"""`SIOCGIFFLAGS`, `SIOCSIFFLAGS` and `IFF_UP` of `linux/sockios.h` and `linux/if.h`."""
OUTSIDE = ("192.0.2.1", 443)
"""An address that no host has (RFC 5737)."""
MODEL = "demo-coder"
TURN = {"role": "user", "content": "Write a Python function `read_chart`."}
IMAGE = "http://outside.example/cat.png"
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
    ),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 8,
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": IMAGE}}]}
            ],
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
    ),
}
"""A picture by URL, in each dialect."""
TRACER_SECONDS = 60.0
REPORT = "report.json.kept-by-the-client"
"""It has the answers."""


def raise_loopback() -> None:
    """Switch `lo` on; a new namespace has it switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(asking, GET_FLAGS, request))[1]
        fcntl.ioctl(asking, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | UP))


def reach_outside() -> str:
    """How a connection to an address outside ends here."""
    try:
        socket.create_connection(OUTSIDE, 5).close()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "connected"


def ask(appliance: ApplianceProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of an answer."""
    headers = {"Authorization": f"Bearer {appliance.key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps({"model": MODEL, **body}).encode()
    request = urllib.request.Request(appliance.admin_url + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def command(data: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command of the appliance."""
    ended = subprocess.run(
        [sys.executable, "-m", "appliance", *arguments, "--data", str(data)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ended.returncode, ended.stdout + ended.stderr


def wait_for_tracer(trace: Path, pid: int) -> None:
    """Return once the tracer has seen the appliance end."""
    deadline = time.monotonic() + TRACER_SECONDS
    while not any(
        line.startswith(f"{pid}<") and "+++ " in line for line in trace.read_text().splitlines()[-50:]
    ):
        assert time.monotonic() < deadline, "the tracer did not end"
        time.sleep(0.1)


def main(directory: Path) -> None:
    """Run everything, and write down what happened."""
    raise_loopback()
    leaks.watch_clients(leaks.LEAKS, pytest.MonkeyPatch())
    report: dict[str, Any] = {
        "outside": reach_outside(),
        "up": [name for _, name in socket.if_nameindex() if _is_up(name)],
    }
    data, trace = directory / "data", directory / "trace"
    environment = {"TRACED_TO": str(trace)}
    with ApplianceProcess(
        "up", data=data, environment=environment, module="tests.integration.traced"
    ) as appliance:
        report["chat"] = ask(appliance, "/v1/chat/completions", {"messages": [TURN], "max_tokens": 16})
        report["stream"] = ask(
            appliance, "/v1/chat/completions", {"messages": [TURN], "max_tokens": 16, "stream": True}
        )
        report["hostile"] = {name: ask(appliance, path, body) for name, (path, body) in HOSTILE.items()}
        report["metrics"] = ask(appliance, "/metrics")
        report["status"] = command(data, "status", "--once", "--url", appliance.admin_url)
        report["verify"] = command(data, "audit", "verify")
        report["url"] = appliance.url
    report["output"] = "".join(appliance.output)
    report["exit"] = appliance.process.returncode
    wait_for_tracer(trace, appliance.process.pid)
    (directory / REPORT).write_text(json.dumps(report), encoding="utf-8")


def _is_up(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, GET_FLAGS, struct.pack("16sh14x", name.encode(), 0))
    return bool(struct.unpack("16sh14x", answer)[1] & UP)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
