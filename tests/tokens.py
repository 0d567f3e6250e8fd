"""
PKCS#11 tokens of SoftHSM: real ones, with keys that were generated in them.

Where SoftHSM or OpenSC is not installed the test is skipped, loudly: `deploy/debian-packages.txt` names both.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

MODULES = [Path(at) for at in ("/usr/lib/softhsm/libsofthsm2.so", "/usr/lib64/pkcs11/libsofthsm2.so")]
SPY = next(Path("/usr/lib").glob("*/pkcs11-spy.so"), None) or next(
    Path("/usr/lib").glob("*/pkcs11/pkcs11-spy.so"), None
)
TOOLS = ("softhsm2-util", "pkcs11-tool")
CALLS = Path(tempfile.gettempdir()) / f"pkcs11-calls-{os.getpid()}"
"""Where OpenSC's spy writes, which opens its file once in a process."""
PIN, WRONG = "246810", "135791"


@dataclass(frozen=True)
class Tokens:
    """Tokens in a directory of their own, and the PIN in a file."""

    directory: Path
    module: Path

    @classmethod
    def make(cls, directory: Path) -> "Tokens":
        module = next((path for path in MODULES if path.exists()), None)
        if module is None or SPY is None or not all(shutil.which(tool) for tool in TOOLS):
            pytest.skip("SOFTHSM OR OPENSC IS NOT INSTALLED: no key in a token is tested (softhsm2, opensc)")
        tokens = cls(directory, module)
        tokens.store.mkdir(parents=True)
        tokens.configuration.write_text(
            f"directories.tokendir = {tokens.store}\nobjectstore.backend = file\nlog.level = ERROR\n"
        )
        tokens.write_pin(PIN)
        return tokens

    @property
    def store(self) -> Path:
        return self.directory / "tokens"

    @property
    def configuration(self) -> Path:
        return self.directory / "softhsm2.conf"

    @property
    def pin(self) -> Path:
        return self.directory / "pin"

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that uses them."""
        return {
            "SOFTHSM2_CONF": str(self.configuration),
            "PKCS11SPY": str(self.module),
            "PKCS11SPY_OUTPUT": str(CALLS),
        }

    def write_pin(self, pin: str) -> None:
        self.pin.unlink(missing_ok=True)
        self.pin.touch(mode=0o600)
        self.pin.write_text(f"{pin}\n")

    def create(self, token: str, *objects: str) -> None:
        """Initialise a token, and generate key pairs in it."""
        self._run(
            *("softhsm2-util", "--init-token", "--free", "--label", token, "--so-pin", "0000", "--pin", PIN)
        )
        for label in objects:
            self.generate(token, label)
        forget()

    def generate(self, token: str, label: str) -> None:
        self.tool(token, "--keypairgen", "--key-type", "EC:edwards25519", "--label", label)

    def tool(self, token: str, *arguments: str) -> str:
        return self._run(
            *("pkcs11-tool", "--module", str(self.module), "--token-label", token, "--login", "--pin", PIN),
            *arguments,
        )

    def uri(self, token: str, label: str, *, spied: bool = False) -> str:
        module = SPY if spied else self.module
        return f"pkcs11:token={token};object={label}?module-path={module}&pin-source={self.pin}"

    def lose(self) -> None:
        """Remove every token, as if the device was unplugged."""
        self.store.rename(self.directory / "unplugged")
        self.store.mkdir()

    def restore(self) -> None:
        self.store.rmdir()
        (self.directory / "unplugged").rename(self.store)

    def logins(self) -> int:
        """Number of logins that spied processes have tried; compare two."""
        text = CALLS.read_text(errors="replace") if CALLS.exists() else ""
        return text.count(": C_Login\n")

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def use(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> Tokens:
    """Let modules in this process find these tokens."""
    for name, value in tokens.environment.items():
        monkeypatch.setenv(name, value)
    forget()
    return tokens


def forget() -> None:
    """Let modules in this process read settings and tokens again; every session ends."""
    if loaded := sys.modules.get("pkcs11"):
        for library in loaded._loaded.values():
            if library.initialized:
                library.finalize()
