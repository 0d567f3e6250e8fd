"""
The traffic of a drill: greedy completions of source code, which a code draft predicts well, or of noise.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

import aiohttp

from appliance.errors import ConfigurationError

PIECE_CHARACTERS = 600
MODULES = (
    *("argparse", "configparser", "csv", "difflib", "fractions"),
    *("shutil", "statistics", "textwrap", "zipfile"),
)
"""Modules of the standard library whose source is read, not imported."""
MAX_TOKENS = 64
REQUEST_SECONDS = 60.0
PAUSE_SECONDS = 0.5
"""After a failed request, to spare a gateway in trouble."""
FINISH_SECONDS = 10.0
"""Time for running requests to end when the traffic stops; then they are cancelled."""


@dataclass(slots=True, kw_only=True)
class TrafficTally:
    requests: int = 0
    """Answered or failed."""
    drafts: int = 0
    failures: list[str] = field(default_factory=list)


class Traffic:
    """Requests of one tenant to one gateway."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        base: str,
        key: str,
        model: str,
        concurrency: int,
        prompt: Callable[[], str],
    ) -> None:
        self.tally = TrafficTally()
        self.prompt = prompt
        """May be replaced while the traffic runs; running requests keep theirs."""
        self._session, self._url, self._concurrency = session, f"{base}/v1/completions", concurrency
        # The gateway returns the worker's draft counts only on request.
        self._headers = {"Authorization": f"Bearer {key}", "X-Appliance-Metrics": "on"}
        self._body = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[TrafficTally]:
        """Send requests within the context; at its end running ones may finish."""
        self._stopping = False
        tasks = [asyncio.create_task(self._send_all()) for _ in range(self._concurrency)]
        try:
            yield self.tally
            self._stopping = True
            await asyncio.wait(tasks, timeout=FINISH_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self) -> None:
        while not self._stopping:
            failure = await self._send()
            self.tally.requests += 1
            if failure is not None:
                self.tally.failures.append(failure)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _send(self) -> str | None:
        """Send one request; returns what failed, if anything."""
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
            if status != HTTPStatus.OK:
                return f"{status} {content['error']['code']}"
            counts = (content.get("metrics") or {}).get("speculative_decoding") or {}
            self.tally.drafts += int(counts.get("num_spec_steps", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{status} with a malformed answer"
        return None


def code_prompts() -> tuple[str, ...]:
    """
    Pieces of the standard library's source, each from the start of a line.

    Raises:
        ConfigurationError: this Python has no source files.
    """
    pieces = [piece for name in MODULES for piece in cut(_source(name))]
    if not pieces:
        raise ConfigurationError("this Python has no source of its standard library: use --prompts")
    return tuple(pieces)


def file_prompts(path: Path) -> tuple[str, ...]:
    """
    Prompts from a file, one per line: a JSON string, or the line as it is.

    Raises:
        ConfigurationError: it cannot be read, or has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the prompts {path}: {error}") from error
    prompts = tuple(prompt for line in lines if (prompt := _line(line)).strip())
    if not prompts:
        raise ConfigurationError(f"the file {path} has no prompts: write one per line")
    return prompts


def cut(text: str) -> tuple[str, ...]:
    """Cut a text into pieces of whole lines, each at least `PIECE_CHARACTERS` long."""
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE_CHARACTERS:
            pieces.append(piece)
            piece = ""
    return tuple(pieces)


def in_turn(prompts: Sequence[str]) -> Callable[[], str]:
    """Give the prompts in a cycle."""
    turn = cycle(prompts)
    return lambda: next(turn)


def noise() -> str:
    """Random hexadecimal digits: unpredictable, and without a prefix that could be cached."""
    return secrets.token_hex(PIECE_CHARACTERS // 2)


def _line(line: str) -> str:
    try:
        value = json.loads(line) if line.startswith('"') else line
    except ValueError:
        return line
    return value if isinstance(value, str) else line


def _source(name: str) -> str:
    spec = find_spec(name)
    loader = spec.loader if spec is not None else None
    return (loader.get_source(name) if isinstance(loader, SourceFileLoader) else None) or ""
