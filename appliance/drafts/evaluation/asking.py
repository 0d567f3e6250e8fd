"""
Ask one worker for completions of token ids, and read what it says about drafts.

Content goes to a worker on this machine's loopback and is never logged.  Whatever is not an answer of
the kind that was asked for ends the evaluation: a comparison with holes would be none.
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
from appliance.drafts.evaluation.trail import Candidate
from appliance.errors import WorkerFailedError
from appliance.serving.usage import count_of, object_of

OK = 200
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 3600.0
"""For a whole answer: longer than any takes whose worker is alive."""
LIKELIEST = 5
"""Tokens asked for at each position of the target's own answer: two, and room for several that tie."""
TOKEN_PREFIX = "token_id:"  # noqa: S105 - what vLLM writes for a token's text where ids are asked for

Asked = TypeVar("Asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer."""

    token_ids: tuple[int, ...]
    drafts: int = 0
    draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    """For each draft position, drafts of which this token and all before it were accepted."""
    choices: tuple[tuple[Candidate, ...], ...] = ()
    """For each position the likeliest tokens, where they were asked for."""

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.accepted_at)


class Asker:
    """Sends prompts to one worker."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, max_tokens: int) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self._max_tokens = max_tokens

    @classmethod
    @asynccontextmanager
    async def open(cls, *, url: str, model: str, max_tokens: int) -> AsyncIterator["Asker"]:
        """
        Make ready to ask; leaving the context aborts what is under way.

        Every request has a connection of its own: one that was kept might just have been closed.
        """
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, url, model, max_tokens)

    async def ask(
        self, prompt: Prompt, mode: Mode, *, max_tokens: int | None = None, likeliest: bool = False
    ) -> Completion:
        """
        Have a prompt answered.

        Args:
            prompt: what is asked.
            mode: how tokens are chosen.
            max_tokens: longest answer; default: the one given at the start.
            likeliest: whether to report the likeliest tokens at each position.

        Raises:
            WorkerFailedError: the worker did not answer, or not what was asked for.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt.token_ids),
            "max_tokens": max_tokens or self._max_tokens,
            "temperature": 0.0 if mode is Mode.GREEDY else TEMPERATURE,
            "seed": prompt.seed,
            "return_token_ids": True,
        }
        if likeliest:
            body |= {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        try:
            async with self._session.post(self._url, json=body, allow_redirects=False) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            message = f"the worker did not answer: {type(error).__name__}"
            raise WorkerFailedError(message) from error
        # What the worker says of an error may repeat the prompt, so only its status is told.
        if status != OK:
            raise WorkerFailedError(f"the worker answered {status}; its log is in the evaluation's directory")
        return parse_completion(text, likeliest=likeliest)


def parse_completion(text: str, *, likeliest: bool = False) -> Completion:
    """
    Read an answer.

    Raises:
        WorkerFailedError: it lacks token ids, or the likeliest tokens where they were asked for.
    """
    try:
        content = json.loads(text)
        choice = content["choices"][0]
        token_ids = tuple(int(token) for token in choice["token_ids"])
        choices = tuple(_likeliest(row) for row in choice["logprobs"]["top_logprobs"]) if likeliest else ()
        if likeliest and len(choices) != len(token_ids):
            message = "as many positions as tokens"
            raise ValueError(message)  # noqa: TRY301 - one answer to all that is wrong
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
    ask: Callable[[Prompt], Awaitable[Asked]], prompts: Sequence[Prompt], *, at_once: int
) -> list[Asked]:
    """
    Ask for every prompt, some at once; the answers come in the order of the prompts.

    When one fails, or the caller is cancelled, all that are under way are given up.
    """
    answers: dict[int, Asked] = {}
    waiting = iter(enumerate(prompts))

    async def lane() -> None:
        for place, prompt in waiting:
            answers[place] = await ask(prompt)

    lanes = [asyncio.ensure_future(lane()) for _ in range(max(1, at_once))]
    try:
        await asyncio.gather(*lanes)
    finally:
        for each in lanes:
            each.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return [answers[place] for place in range(len(prompts))]


def _accepted_at(histogram: object) -> tuple[int, ...]:
    """From drafts by number of accepted tokens to drafts by position that was accepted."""
    if histogram is None:
        return ()
    if not isinstance(histogram, list):
        message = "a histogram is a list"
        raise TypeError(message)
    counts = [int(count) for count in histogram]
    return tuple(sum(counts[position:]) for position in range(1, len(counts)))


def _likeliest(row: dict[str, Any]) -> tuple[Candidate, ...]:
    """The likeliest tokens of one position; the first is the likeliest."""
    said = {int(name.removeprefix(TOKEN_PREFIX)): float(logarithm) for name, logarithm in row.items()}
    if not said or not all(map(math.isfinite, said.values())):
        message = "no token is that likely"
        raise ValueError(message)
    best = max(said.values())
    ordered = sorted(said.items(), key=lambda item: -item[1])
    return tuple(Candidate(token_id=token, gap=best - logarithm) for token, logarithm in ordered)
