"""Pace large reads: a socket that stopped being read is read again in its turn of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

READS_PER_TURN = 1
"""Paused sockets read from in one turn of the event loop, after which others are served."""


class ReadTurns:
    """Lets a few connections at a time read on, so that many large bodies do not fill a turn of the loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, resume: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.append(resume)

    def _next(self) -> None:
        for _ in range(min(len(self._waiting), READS_PER_TURN)):
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
