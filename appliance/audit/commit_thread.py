"""The thread that the log's commits run in: an executor costs as much per call as the commit of an entry."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Self, TypeVar

T = TypeVar("T")


class CommitThread:
    """Runs the calls of one event loop, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()

    @classmethod
    @contextmanager
    def open(cls, name: str) -> Iterator[Self]:
        """Run calls until the block ends; calls submitted by then are completed."""
        made = cls()
        thread = threading.Thread(target=made._work, name=name)
        thread.start()
        try:
            yield made
        finally:
            made._calls.put(None)
            thread.join()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((call, future))
        return future

    def _work(self) -> None:
        while (given := self._calls.get()) is not None:
            call, future = given
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_succeed, future, result)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
