"""
The town's clock moves by waiting alone, so nothing may happen beside it: what goes to a thread stays here.

A thread would have to wait for its turn beside a loop that never rests, while the days of the town go by.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do at once, in the same thread, what would be given to another."""

    async def at_once(function: Callable[..., Any], /, *arguments: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments, **more)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
