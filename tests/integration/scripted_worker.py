"""
A scripted worker in a separate process, so that it can be killed as a machine dies.

    python -m tests.integration.scripted_worker '{"pause_seconds": 0.05}'

It says its URL, then serves until it is killed.  A request may hold back its own answer: `hold_seconds`.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes import FakeWorker

ROOT = Path(__file__).parents[2]


class Scripted(FakeWorker):
    """A worker that holds back the answers to requests that ask for it."""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, with a delay if configured."""
        await asyncio.sleep(json.loads(await request.read()).get("hold_seconds", 0.0))
        return await super().completions(request)


class ScriptedProcess:
    """One such process, where the fixtures expect a worker."""

    def __init__(self, **script: Any) -> None:
        self.script = script
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedProcess"]:
        """Run it for as long as the context lasts, or until it is killed."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.scripted_worker", json.dumps(self.script)),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            self.url = (await self._process.stdout.readline()).decode().strip()
        try:
            yield self
        finally:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    async def kill(self) -> None:
        """End it at once, without closing connections."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()


async def main(script: str) -> None:
    """Serve until killed."""
    async with Scripted(**json.loads(script)).serving() as worker:
        print(worker.url, flush=True)  # noqa: T201 - the parent reads it
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
