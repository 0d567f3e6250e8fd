"""
Clients that keep a gateway busy, and note when tokens arrive.
"""

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import aiohttp

from benchmarks.speculation.traffic import (
    CHARACTERS_PER_TOKEN,
    Prompt,
    Traffic,
    fitted_characters,
    long_texts,
)
from demo.training.corpus import Corpus

REQUEST_SECONDS = 300.0
STRIDE = 37
"""From the length of one answer to that of the next."""
ROUTE = "/v1/completions"
COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')


class BenchmarkError(Exception):
    """Measuring cannot continue; one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    url: str
    key: str
    model: str


class Stream:
    """Clients that keep a gateway busy without a pause while modes, traffic and concurrency change."""

    def __init__(self, target: Target, traffic: Traffic, *, concurrency: int, answer_tokens: int) -> None:
        self._target = target
        self._traffic = traffic
        self._concurrency = concurrency
        self._answer_tokens = answer_tokens
        self._prompts, self._salts = count(), count()
        self._clients: dict[int, asyncio.Task[None]] = {}
        self._start: Callable[[int], asyncio.Task[None]]
        self._began = time.perf_counter()
        self._times: list[float] = []
        self._tokens: list[int] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """
        Send requests within the context.

        Raises:
            BenchmarkError: a request failed.
        """
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                asyncio.TaskGroup() as group,
            ):
                self._start = lambda seat: group.create_task(self._send_all(seat, session))
                self.change()
                yield
                for task in self._clients.values():
                    task.cancel()
        except ExceptionGroup as failures:
            failure = first_of(failures)
            if isinstance(failure, aiohttp.ClientError | OSError | TimeoutError):
                message = f"a request failed: {type(failure).__name__} {failure}"
                raise BenchmarkError(message) from failure
            raise failure from None

    def change(self, *, traffic: Traffic | None = None, concurrency: int | None = None) -> None:
        """Send other traffic, or more or fewer requests at once; running requests end as they are."""
        self._traffic = traffic or self._traffic
        self._concurrency = concurrency or self._concurrency
        for seat in range(self._concurrency):
            if seat not in self._clients or self._clients[seat].done():
                self._clients[seat] = self._start(seat)

    def mark(self, first_prompt: int | None = None) -> None:
        """
        Begin a segment: forget what arrived before, and begin with the first of two turns.

        If `first_prompt` is given, its requests have the prompts from that number on.
        """
        if first_prompt is not None:
            self._prompts = count(first_prompt)
        self._began = time.perf_counter()
        self._times.clear()
        self._tokens.clear()

    def tokens(self, begins: float, ends: float) -> int:
        """Tokens that arrived in a span since the mark, by `time.perf_counter`."""
        first, end = (bisect_left(self._times, at) for at in (begins, ends))
        return sum(self._tokens[first:end])

    async def _send_all(self, seat: int, session: aiohttp.ClientSession) -> None:
        while seat < self._concurrency:
            number, salt = next(self._prompts), f"stream-{next(self._salts)}"
            prompt = self._traffic.at(number, time.perf_counter() - self._began)
            tokens = length_of(number, self._answer_tokens)
            body = prompt.body(model=self._target.model, max_tokens=tokens, temperature=0.0, salt=salt)
            await ask(session, self._target, body, self._arrived)

    def _arrived(self, tokens: int) -> None:
        self._times.append(time.perf_counter())
        self._tokens.append(tokens)


def length_of(number: int, mean: int) -> int:
    """
    Tokens of an answer: between half and one and a half of the mean.

    Answers of one length, once they began together, would begin and end together for good.
    """
    return max(1, mean // 2 + number * STRIDE % (mean + 1))


async def ask(
    session: aiohttp.ClientSession,
    target: Target,
    body: dict[str, Any],
    arrived: Callable[[int], None] = lambda _tokens: None,
) -> None:
    """
    Stream one answer to its end; `arrived` is told how many tokens each frame brings.

    Raises:
        BenchmarkError: it was refused, or broke off.
    """
    headers = {"Authorization": f"Bearer {target.key}"}
    async with session.post(target.url + ROUTE, json=body, headers=headers) as response:
        if response.status != 200:
            text = (await response.text())[:300]
            message = f"{target.url}{ROUTE} answered {response.status}: {text}"
            raise BenchmarkError(message)
        tokens = 0
        async for line in response.content:
            counted = completion_tokens(line)
            if counted > tokens:
                arrived(counted - tokens)
                tokens = counted
    if not tokens:
        message = f"{target.url}{ROUTE} answered without tokens or without usage"
        raise BenchmarkError(message)


async def ask_once(target: Target, text: str) -> int | None:
    """
    Tokens of a prompt as the worker counts them, or None where it is too long.

    Raises:
        BenchmarkError: the request failed for another reason.
    """
    body = {"model": target.model, "prompt": text, "max_tokens": 1}
    headers = {"Authorization": f"Bearer {target.key}"}
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(target.url + ROUTE, json=body, headers=headers) as response,
        ):
            if response.status == 400:
                return None
            content = await response.text()
            if response.status != 200:
                message = f"{target.url}{ROUTE} answered {response.status}: {content[:300]}"
                raise BenchmarkError(message)
            return int(json.loads(content)["usage"]["prompt_tokens"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        message = f"a request failed: {type(error).__name__} {error}"
        raise BenchmarkError(message) from error


async def long_prompts(target: Target, limit: int, corpus: Corpus) -> tuple[Prompt, ...]:
    """
    Code of nearly `limit` tokens, cut by what the worker itself counts.

    Raises:
        BenchmarkError: no prompt could be cut to that.
    """
    kept = []
    first = int(limit * CHARACTERS_PER_TOKEN)
    for short, whole in zip(long_texts(corpus, first), long_texts(corpus, 8 * limit), strict=True):
        tokens = await ask_once(target, short)
        fitted = whole[: fitted_characters(len(short), tokens or 2 * limit, limit)]
        count = await ask_once(target, fitted)
        if count is not None and count <= limit:
            kept.append(Prompt(text=fitted))
    if not kept:
        message = "no prompt could be cut to the context limit: leave --kinds long out"
        raise BenchmarkError(message)
    return tuple(kept)


def completion_tokens(line: bytes) -> int:
    """
    Tokens of the answer up to this line of a stream; 0 if it does not count them.

    Raises:
        BenchmarkError: it brings an error.
    """
    if line.startswith(b'data: {"error"'):
        message = f"a stream broke off: {line[:300].decode(errors='replace').strip()}"
        raise BenchmarkError(message)
    # In text, the quotes would be escaped.
    found = COUNT.search(line)
    return int(found[1]) if found else 0


def first_of(failures: ExceptionGroup) -> Exception:
    """The first single error in a group of groups."""
    found = failures.exceptions[0]
    return first_of(found) if isinstance(found, ExceptionGroup) else found
