"""
Clients that keep a gateway busy, and note when each frame arrives.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import aiohttp

from appliance.speculation.values import EngineReading
from benchmarks.speculation.figures import Figures, Trace, figures_of
from benchmarks.speculation.plan import Cell
from benchmarks.speculation.traffic import Prompt, Traffic

REQUEST_SECONDS = 300.0
PREFIX = b"data: "


class BenchmarkError(Exception):
    """Measuring cannot continue; one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    url: str
    key: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The clients' load during one segment."""

    cell: Cell
    traffic: Traffic
    first: int
    """Number of the first prompt: the same in each mode of a round."""
    warm_up: float
    seconds: float
    max_tokens: int
    name: str
    """Differs from segment to segment."""


async def drive(target: Target, load: Load, read: Callable[[], Awaitable[EngineReading | None]]) -> Figures:
    """
    Keep as many requests in flight as the cell requires, and measure the answers.

    Args:
        target: the gateway.
        load: what to send, and how long.
        read: the worker's own counts, asked for where the measured part begins and ends.

    Raises:
        BenchmarkError: a request failed, or nothing arrived while it was measured.
    """
    begins = time.perf_counter() + load.warm_up
    ends = begins + load.seconds
    numbers = count(load.first)
    traces: list[Trace] = []

    async def client(seat: int, session: aiohttp.ClientSession) -> None:
        # The first answers differ in length, or all requests would end, and begin, at once for good.
        tokens = max(1, load.max_tokens * (seat + 1) // load.cell.concurrency)
        while (now := time.perf_counter()) < ends:
            number = next(numbers)
            prompt = load.traffic.at(number, now - begins)
            body = prompt.body(
                model=target.model,
                max_tokens=tokens,
                temperature=load.cell.temperature,
                salt=f"{load.name}-{number}",
            )
            traces.append(await ask(session, target, prompt, body))
            tokens = load.max_tokens

    async def edges() -> tuple[EngineReading | None, EngineReading | None]:
        await asyncio.sleep(begins - time.perf_counter())
        before = await read()
        await asyncio.sleep(ends - time.perf_counter())
        return before, await read()

    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            reading = group.create_task(edges())
            for seat in range(load.cell.concurrency):
                group.create_task(client(seat, session))
        return figures_of(traces, begins, ends, *reading.result())
    except ExceptionGroup as failures:
        failure = first_of(failures)
        if isinstance(failure, aiohttp.ClientError | OSError | TimeoutError):
            message = f"a request failed: {type(failure).__name__} {failure}"
            raise BenchmarkError(message) from failure
        raise failure from None
    except ValueError as failure:
        raise BenchmarkError(str(failure)) from None


async def ask(session: aiohttp.ClientSession, target: Target, prompt: Prompt, body: dict[str, Any]) -> Trace:
    """
    Stream one answer to its end.

    Raises:
        BenchmarkError: it was refused, or broke off.
    """
    headers = {"Authorization": f"Bearer {target.key}"}
    sent = time.perf_counter()
    frames: list[float] = []
    tokens = 0
    async with session.post(target.url + prompt.route, json=body, headers=headers) as response:
        if response.status != 200:
            text = (await response.text())[:300]
            message = f"{target.url}{prompt.route} answered {response.status}: {text}"
            raise BenchmarkError(message)
        async for line in response.content:
            arrived = time.perf_counter()
            counted = completion_tokens(line)
            if counted:
                tokens = counted
            elif is_content(line):
                frames.append(arrived)
    if not frames or not tokens:
        message = f"{target.url}{prompt.route} answered without text or without usage"
        raise BenchmarkError(message)
    return Trace(sent=sent, frames=tuple(frames), tokens=tokens)


async def ask_once(target: Target, prompt: Prompt) -> int | None:
    """
    Tokens of a prompt as the worker counts them, or None where it is too long.

    Raises:
        BenchmarkError: the request failed for another reason.
    """
    body = {"model": target.model, "prompt": prompt.text, "max_tokens": 1}
    headers = {"Authorization": f"Bearer {target.key}"}
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(target.url + prompt.route, json=body, headers=headers) as response,
        ):
            if response.status == 400:
                return None
            text = await response.text()
            if response.status != 200:
                message = f"{target.url}{prompt.route} answered {response.status}: {text[:300]}"
                raise BenchmarkError(message)
            return int(json.loads(text)["usage"]["prompt_tokens"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        message = f"a request failed: {type(error).__name__} {error}"
        raise BenchmarkError(message) from error


def is_content(line: bytes) -> bool:
    """
    Whether a line of a stream brings tokens.

    Raises:
        BenchmarkError: it brings an error.
    """
    if not line.startswith(PREFIX) or line.startswith(b"data: [DONE]"):
        return False
    if line.startswith(b'data: {"error"'):
        message = f"a stream broke off: {line[:300].decode(errors='replace').strip()}"
        raise BenchmarkError(message)
    # The first frame of a chat names the role and brings nothing.
    return b'"delta":{"role"' not in line and b'"choices":[]' not in line


def completion_tokens(line: bytes) -> int | None:
    """The counts of a usage frame, or None for any other line."""
    if not line.startswith(PREFIX) or b'"choices":[]' not in line:
        return None
    usage = json.loads(line.removeprefix(PREFIX)).get("usage") or {}
    return int(usage.get("completion_tokens") or 0) or None


def first_of(failures: ExceptionGroup) -> Exception:
    """The first single error in a group of groups."""
    found = failures.exceptions[0]
    return first_of(found) if isinstance(found, ExceptionGroup) else found
