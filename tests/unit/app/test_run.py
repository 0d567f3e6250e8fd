"""What happens to the parts of a process when one fails or a signal comes."""

import asyncio
import io

import pytest

from appliance.app.announcer import Announcer
from appliance.app.run import _until_stopped


class Parts:
    """Two parts that run until they are cancelled, or fail when told; records what happened, in order."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fails = asyncio.Event()

    async def part(self, name: str) -> None:
        try:
            await self.fails.wait()
            raise OSError(name)
        except asyncio.CancelledError:
            self.happened.append(f"{name} ended")
            raise

    async def forever(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.happened.append("other ended")

    async def drain(self) -> None:
        self.happened.append("drained")

    async def run(self, stop: asyncio.Event) -> None:
        announcer = Announcer(io.StringIO())
        await _until_stopped(stop, announcer, self.part("one"), self.forever(), drain=self.drain)


async def test_the_failure_of_a_part_stops_all_of_them():
    """Requests drain first, and the process ends with the failure."""
    parts = Parts()
    running = asyncio.ensure_future(parts.run(asyncio.Event()))
    await asyncio.sleep(0)
    parts.fails.set()
    with pytest.raises(OSError, match="one"):
        await running
    assert parts.happened == ["drained", "other ended"]


async def test_a_signal_stops_all_parts():
    parts, stop = Parts(), asyncio.Event()
    running = asyncio.ensure_future(parts.run(stop))
    await asyncio.sleep(0)
    stop.set()
    await running
    assert parts.happened == ["drained", "one ended", "other ended"]
