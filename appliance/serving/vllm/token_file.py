"""The tokens that a worker's listeners accept, read from files that may change."""

import hmac
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from appliance.serving.vllm.redaction import LOGGER
from appliance.tenancy.identity.files import stamp

SILENT_SECONDS = 60.0
"""Time between two log lines about refused requests."""


class TokenFile:
    """
    The tokens in a file, one a line: two while they are being rotated.

    Raises OSError if it cannot be read, ValueError if it is empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = stamp([path])
        self._expected = self._read()

    def accepts(self, authorization: bytes) -> bool:
        self._renew()
        # All of them, so that the time does not depend on which one it is.
        return sum(hmac.compare_digest(authorization, expected) for expected in self._expected) > 0

    def _renew(self) -> None:
        now = stamp([self._path])
        if now == self._stamp:
            return
        self._stamp = now
        with suppress(OSError, ValueError):  # half-written: the tokens that were read stay valid
            self._expected = self._read()

    def _read(self) -> list[bytes]:
        lines = self._path.read_bytes().splitlines()
        expected = [b"Bearer " + line.strip() for line in lines if line.strip()]
        if not expected:
            message = f"the token file {self._path} is empty: put a random word in it"
            raise ValueError(message)
        return expected


class Refusals:
    """Logs how many requests were refused, at most once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._last: float | None = None

    def add(self) -> None:
        self._count += 1
        now = self._clock()
        if self._last is None or now - self._last >= SILENT_SECONDS:
            logger = logging.getLogger(LOGGER)  # noqa: TID251 - the worker's log
            logger.warning("refused %d requests without a valid token", self._count)
            self._count, self._last = 0, now
