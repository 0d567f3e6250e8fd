"""
The name a gateway writes the log under: created once, kept in its data directory, locked while it runs.

Two gateways with one name would each end the other's requests.  The file stays locked while the gateway runs,
so two processes cannot use one data directory.  Fails closed: without a name of its own a gateway does not
start.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self

from appliance.errors import ConfigurationError
from appliance.infra.files import open_locked, sync_directory, sync_file

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class GatewayName:
    """A name that is held exclusively until `release`."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self._file = file

    @classmethod
    def hold(
        cls, path: Path, configured: str | None = None, *, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> Self:
        """
        Lock `path` and return the name in it, or the configured one; create one at the first start.

        Raises ConfigurationError if another gateway runs on this directory, or the name cannot be used.
        """
        try:
            file = open_locked(path, mode=0o666)
        except BlockingIOError as error:
            message = f"another gateway runs on {path.parent}: give each a data directory of its own"
            raise ConfigurationError(message) from error
        except OSError as error:
            raise ConfigurationError(f"cannot use {path}: {error.strerror}") from error
        try:
            name = configured or _kept(file, path, random_bytes)
        except (OSError, UnicodeDecodeError) as error:
            file.close()
            raise ConfigurationError(f"cannot use {path}: {error}") from error
        if not _NAME.fullmatch(name):
            file.close()
            message = f"{name!r} cannot name a gateway: use at most 63 letters, digits, '.', '_' and '-'"
            raise ConfigurationError(message)
        return cls(name, file)

    def release(self) -> None:
        self._file.close()


def _kept(file: BinaryIO, path: Path, random_bytes: Callable[[int], bytes]) -> str:
    name = file.read().decode().strip()
    if not name:
        name = f"gw-{random_bytes(8).hex()}"
        file.write(f"{name}\n".encode())
        # If a power cut took the name back, others would have to end its requests.
        sync_file(file)
        sync_directory(path.parent)
    return name
