"""
Client of an evaluation's worker: completions of token ids, with what it reports about drafts.

Content goes to a worker on loopback and is never logged.  A reply that is not the expected one ends the
evaluation: a comparison with gaps would be worthless.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from appliance.drafts.evaluation.arms import TEMPERATURE, Mode, Prompt
from appliance.drafts.evaluation.equality import LikelyToken
from appliance.errors import WorkerFailedError
from appliance.serving.usage import count_of, object_of

OK = 200
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 3600.0
"""Longer than any answer of a live worker takes."""
LIKELIEST = 5
"""Tokens requested at each position of the target's own answer: two, and room for ties."""
TOKEN_PREFIX = "token_id:"  # noqa: S105 - what vLLM writes for a token's text where ids are asked for

Asked = TypeVar("Asked")
Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    token_ids: tuple[int, ...]
    drafts: int = 0
    draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    choices: tuple[tuple[LikelyToken, ...], ...] = ()

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)


@dataclass(frozen=True, slots=True)
class CompletionClient:
    session: aiohttp.ClientSession
    url: str
    model: str
    max_tokens: int

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, url: str, model: str, max_tokens: int, token: str
    ) -> AsyncIterator["CompletionClient"]:
        """Open a client; leaving the context aborts requests in flight."""
        async with aiohttp.ClientSession(
            # Every request has its own connection: a kept one may just have been closed by the worker.
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, url, model, max_tokens)

    async def ask(
        self, prompt: Prompt, mode: Mode, *, max_tokens: int | None = None, likeliest: bool = False
    ) -> Completion:
        """Complete a prompt; raises `WorkerFailedError`, also if the reply is not as requested."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt.token_ids),
            "max_tokens": max_tokens or self.max_tokens,
            "temperature": 0.0 if mode is Mode.GREEDY else TEMPERATURE,
            "seed": prompt.seed,
            "return_token_ids": True,
        }
        if likeliest:
            body |= {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        return parse_completion(await self.post("/v1/completions", body), likeliest=likeliest)

    async def post(self, path: str, body: dict[str, Any]) -> str:
        """Send a request and return the reply; raises `WorkerFailedError` unless its status is 200."""
        try:
            async with self.session.post(self.url + path, json=body, allow_redirects=False) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            raise WorkerFailedError(f"the worker did not answer: {type(error).__name__}") from error
        # The body of an error may repeat the prompt, so only its status is reported.
        if status != OK:
            raise WorkerFailedError(f"the worker answered {status}; its log is in the evaluation's directory")
        return text


def parse_completion(text: str, *, likeliest: bool = False) -> Completion:
    """Parse a reply; raises `WorkerFailedError`, without its content, if anything requested is missing."""
    try:
        content = json.loads(text)
        choice = content["choices"][0]
        token_ids = tuple(int(token) for token in choice["token_ids"])
        choices = tuple(_likeliest(row) for row in choice["logprobs"]["top_logprobs"]) if likeliest else ()
        if likeliest and len(choices) != len(token_ids):
            raise ValueError("there are not as many positions as tokens")  # noqa: TRY301 - one handler
        drafting = object_of(object_of(content.get("metrics")).get("speculative_decoding"))
        return Completion(
            token_ids=token_ids,
            drafts=count_of(drafting.get("num_spec_steps")) or 0,
            draft_tokens=count_of(drafting.get("num_draft_tokens")) or 0,
            accepted_at=_accepted_at(drafting.get("acceptance_histogram")),
            choices=choices,
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        message = "the worker's answer is not what vLLM 0.32 answers to a completion by token ids"
        raise WorkerFailedError(message) from error


async def ask_all(
    ask: Callable[[Asked], Awaitable[Reply]], prompts: Sequence[Asked], *, at_once: int
) -> list[Reply]:
    """
    Ask all prompts, `at_once` at a time; return the answers in the order of the prompts.

    If one fails, or the caller is cancelled, the requests in flight are cancelled.
    """
    answers: dict[int, Reply] = {}
    waiting = iter(enumerate(prompts))

    async def ask_next() -> None:
        for place, prompt in waiting:
            answers[place] = await ask(prompt)

    tasks = [asyncio.ensure_future(ask_next()) for _ in range(max(1, at_once))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [answers[place] for place in range(len(prompts))]


def _accepted_at(histogram: object) -> tuple[int, ...]:
    """Drafts by accepted position, from drafts by number of accepted tokens."""
    if histogram is None:
        return ()
    if not isinstance(histogram, list):
        raise TypeError("the histogram is not a list")
    counts = [int(count) for count in histogram]
    return tuple(sum(counts[position:]) for position in range(1, len(counts)))


def _likeliest(row: dict[str, Any]) -> tuple[LikelyToken, ...]:
    found = {int(name.removeprefix(TOKEN_PREFIX)): float(logarithm) for name, logarithm in row.items()}
    if not found or not all(map(math.isfinite, found.values())):
        raise ValueError("a log probability is not finite")
    best = max(found.values())
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return tuple(LikelyToken(token_id=token, gap=best - logarithm) for token, logarithm in ordered)
