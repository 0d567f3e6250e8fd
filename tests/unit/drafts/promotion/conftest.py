"""The cluster's clock advances only when a task sleeps, so no test may wait for a thread."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `asyncio.to_thread` calls in the event loop's thread."""

    async def at_once(function: Callable[..., Any], /, *arguments: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments, **more)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
