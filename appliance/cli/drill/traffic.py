"""
The traffic of a drill: a few completions at a time, greedy, one after the other.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

OK = 200
REQUEST_SECONDS = 60.0
PAUSE_SECONDS = 0.5
"""After a request that failed: a gateway in trouble is not made worse."""
FINISH_SECONDS = 10.0
"""How long requests under way may take to end when the traffic stops; then they are given up."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the requests."""

    requests: int = 0
    """Answered, well or not."""
    drafts: int = 0
    accepted_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per draft with the bonus token; 1.0 for no drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0


class Traffic:
    """
    Requests to one gateway, with the key of a tenant.

    Args:
        session: connections to use.
        base: base URL of the gateway.
        key: a tenant's key.
        model: the model to ask.
        concurrency: requests at a time.
        prompt: gives the next prompt.
        max_tokens: tokens of each answer.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        base: str,
        key: str,
        model: str,
        concurrency: int,
        prompt: Callable[[], str],
        max_tokens: int = 64,
    ) -> None:
        self.tally = Tally()
        self.prompt = prompt
        """May be replaced while the traffic runs; requests under way keep theirs."""
        self._session = session
        self._url = f"{base}/v1/completions"
        # The worker's own counts, which the gateway keeps to itself unless asked.
        self._headers = {"Authorization": f"Bearer {key}", "X-Appliance-Metrics": "on"}
        self._concurrency = concurrency
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Tally]:
        """Send for as long as the context lasts; requests under way then may end."""
        self._stopping = False
        tasks = [asyncio.create_task(self._send_on()) for _ in range(self._concurrency)]
        try:
            yield self.tally
            self._stopping = True
            await asyncio.wait(tasks, timeout=FINISH_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_on(self) -> None:
        while not self._stopping:
            failure = await self._send()
            self.tally.requests += 1
            if failure is not None:
                self.tally.failures.append(failure)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _send(self) -> str | None:
        """Send one request; what was wrong with its answer, if anything."""
        try:
            async with self._session.post(
                self._url,
                json={**self._body, "prompt": self.prompt()},
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            ) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return f"no answer ({type(error).__name__})"
        try:
            content = json.loads(text)
            if status != OK:
                return f"{status} {content['error']['code']}"
            counts = (content.get("metrics") or {}).get("speculative_decoding") or {}
            self.tally.drafts += int(counts.get("num_spec_steps", 0))
            self.tally.accepted_tokens += int(counts.get("num_accepted_draft_tokens", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{status} with an answer that cannot be read"
        return None
