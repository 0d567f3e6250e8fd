"""
How long a worker may stay silent while it answers.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from appliance.errors import WorkerTimeoutError
from appliance.serving.client import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limits on silence, in seconds; an answer that goes on may take as long as it likes."""

    keep_alive_seconds: float
    """Silence after which whoever waits is told that the answer goes on."""
    silence_seconds: float

    async def read(self, answer: Answer, keep_alive: Callable[[], Awaitable[None]]) -> bytes:
        """
        One network read; empty at the end.

        Raises:
            WorkerTimeoutError: nothing came for too long.
        """
        silent = 0.0
        step = min(self.keep_alive_seconds, self.silence_seconds)
        while True:
            try:
                return await answer.read_any(step)
            except TimeoutError as error:
                silent += step
                if silent >= self.silence_seconds:
                    raise self.lost() from error
                await keep_alive()

    async def read_all(self, answer: Answer) -> bytes:
        """
        The whole answer.

        Raises:
            WorkerTimeoutError: nothing came for too long.
        """
        pieces: list[bytes] = []
        while True:
            try:
                piece = await answer.read_any(self.silence_seconds)
            except TimeoutError as error:
                raise self.lost() from error
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)

    def lost(self) -> WorkerTimeoutError:
        """The error for a worker that was silent for too long."""
        return WorkerTimeoutError(
            f"The worker sent nothing for {self.silence_seconds:g} seconds. Try a shorter request."
        )
