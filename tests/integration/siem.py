"""
A SIEM's collector for tests: rsyslog from Debian, on loopback, over mutual TLS, storing a message a line.
"""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from cryptography import x509

from tests.certificates import LOOPBACK, Authority

PATIENCE_SECONDS = 60
MISSING = (
    "RSYSLOG OR ITS TLS DRIVER IS NOT INSTALLED, SO NOTHING IS SHOWN ABOUT A REAL COLLECTOR: "
    "install the Debian packages `rsyslog` and `rsyslog-openssl` (`make setup-dev` as root does)"
)
DRIVERS = "/usr/lib/*/rsyslog/lmnsd_ossl.so"
CONFIGURATION = """\
global(workDirectory="{directory}" maxMessageSize="16k" defaultNetstreamDriver="ossl"
       defaultNetstreamDriverCAFile="{directory}/ca.pem"
       defaultNetstreamDriverCertFile="{certificate}" defaultNetstreamDriverKeyFile="{key}")
module(load="imtcp")
template(name="whole" type="string" string="%rawmsg%\\n")
ruleset(name="store") {{
  action(type="omfile" file="{directory}/stored" template="whole" asyncWriting="off" flushOnTXEnd="on")
}}
input(type="imtcp" port="{port}" address="127.0.0.1" ruleset="store"
      streamDriver.name="ossl" streamDriver.mode="1" streamDriver.authMode="x509/name"
      permittedPeer=["gateway.test"])
"""


class Rsyslog:
    """One collector; `start` again after `kill` listens on the same port."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("rsyslogd") is None or not any(Path("/").glob(DRIVERS.lstrip("/"))):
            pytest.skip(MISSING)
        self.directory = directory
        self.authority = Authority("siem authority")
        (directory / "ca.pem").write_text(self.authority.pem)
        self._server = self.authority.issue(directory, "siem.test", *LOOPBACK)
        self.client = self.authority.issue(directory, "gateway.test", x509.DNSName("gateway.test"))
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def start(self) -> "Rsyslog":
        (self.directory / "pid").unlink(missing_ok=True)  # of a killed one
        configuration = self.directory / "rsyslog.conf"
        configuration.write_text(
            CONFIGURATION.format(
                directory=self.directory,
                certificate=self._server.certificate,
                key=self._server.key,
                port=self.port,
            )
        )
        with (self.directory / "rsyslog.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["rsyslogd", "-n", "-f", str(configuration), "-i", str(self.directory / "pid")],
                stdout=log,
                stderr=log,
            )
        wait_until(self._listens, self.said)
        return self

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """End it in order, so that all it has read is stored."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self.kill(signal.SIGTERM)

    @property
    def stored(self) -> Path:
        return self.directory / "stored"

    @property
    def destination(self) -> str:
        return f"localhost:{self.port}"

    @property
    def lines(self) -> list[bytes]:
        return self.stored.read_bytes().splitlines() if self.stored.exists() else []

    def said(self) -> str:
        """Its own messages, for a test that fails."""
        return (self.directory / "rsyslog.log").read_text(errors="replace")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def wait_until(holds, why=lambda: "") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
