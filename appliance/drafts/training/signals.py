"""
What interrupts a training: answered once it can be, for as long as a training lasts.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal, a service manager, and a terminal that is gone."""


@contextmanager
def answering(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` for each of these signals instead of ending; afterwards they are as they were."""

    def answer(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, answer) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
