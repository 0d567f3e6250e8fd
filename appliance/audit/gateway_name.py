"""
The name a gateway writes the log under: made once, kept in its data directory, held while it runs.

Two gateways under one name would each end what the other began.  The file is locked for as long as
the name is held, so two processes cannot use one data directory.  Fails closed: without a name of
its own a gateway does not start.
"""

import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Self, TextIO

from appliance.audit.keys import sync_directory
from appliance.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class GatewayName:
    """A name that nobody else with this data directory can have; given back by `release`."""

    def __init__(self, name: str, file: TextIO) -> None:
        self.name = name
        self._file = file

    @classmethod
    def hold(
        cls,
        path: Path,
        configured: str | None = None,
        *,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> Self:
        """
        Take the name kept in `path`, or the configured one; make one at the first start.

        Args:
            path: file that keeps it and is locked.
            configured: a name chosen by the operator, used instead.
            random_bytes: source of randomness for a new name.

        Raises:
            ConfigurationError: another gateway runs on this directory, or the name cannot be used.
        """
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot use {path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = configured or _kept(file, path, random_bytes)
        except BlockingIOError as error:
            file.close()
            message = f"another gateway runs on {path.parent}: give each a data directory of its own"
            raise ConfigurationError(message) from error
        except (OSError, UnicodeDecodeError) as error:
            file.close()
            raise ConfigurationError(f"cannot use {path}: {error}") from error
        if not _NAME.fullmatch(name):
            file.close()
            message = f"{name!r} is no name for a gateway: use at most 63 letters, digits, '.', '_' and '-'"
            raise ConfigurationError(message)
        return cls(name, file)

    def release(self) -> None:
        """Let the next process have the name."""
        self._file.close()


def _kept(file: TextIO, path: Path, random_bytes: Callable[[int], bytes]) -> str:
    file.seek(0)
    name = file.read().strip()
    if not name:
        name = f"gw-{random_bytes(8).hex()}"
        file.write(f"{name}\n")
        file.flush()
        # A name that a power cut takes back would leave its requests to be ended by others.
        os.fsync(file.fileno())
        sync_directory(path.parent)
    return name
