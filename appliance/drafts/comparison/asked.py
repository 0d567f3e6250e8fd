"""
The plan of a comparison: what it asks of which methods.  Pure.

Every prompt is asked at each number of draft tokens under another `cache_salt`: a prefix cached by one number
would save the next one its prefill.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any, get_args

from appliance.errors import ConfigurationError
from appliance.infra.settings import METHODS_WITH_DRAFT, WorkerSettings

WITHOUT_DRAFT = ("ngram", "suffix", "mtp")
"""Methods that need no weights of their own."""
NO_METHOD = "none"
NOT_SENT = frozenset({"stream", "stream_options", "n", "max_completion_tokens", "tool_choice"})
"""Members of a request that do not apply here; the worker has no parser of tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCandidate:
    method: str
    """As `worker.method`."""
    draft: Path | None = None
    """None if the method reads none, or for the draft in service."""

    @property
    def name(self) -> str:
        return self.method if self.draft is None else f"{self.method}={self.draft}"


def choose_candidates(named: Sequence[str], settings: WorkerSettings) -> tuple[MethodCandidate, ...]:
    """
    Parse `METHOD` or `METHOD=DRAFT`; raises ConfigurationError.

    By default the method of the settings and all that need no weights of their own.
    """
    own = () if settings.method == NO_METHOD else (settings.method,)
    found = [_parse_method(text, settings) for text in named or (*own, *WITHOUT_DRAFT)]
    return tuple(dict.fromkeys(found))


def _parse_method(text: str, settings: WorkerSettings) -> MethodCandidate:
    method, _, draft = text.partition("=")
    offered = [*get_args(WorkerSettings.model_fields["method"].annotation)]
    offered.remove(NO_METHOD)  # K=0 of every method
    if method not in offered:
        raise ConfigurationError(f"--method {method} is not one of {', '.join(offered)}")
    if method not in METHODS_WITH_DRAFT and draft:
        raise ConfigurationError(f"--method {text}: {method} reads no draft")
    if method in METHODS_WITH_DRAFT and not draft and method != settings.method:
        raise ConfigurationError(f"--method {method} needs a draft: --method {method}=DIRECTORY")
    return MethodCandidate(method=method, draft=Path(draft).absolute() if draft else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRequest:
    line: int
    """Of the file, from 1."""
    path: str
    body: Mapping[str, Any]
    """As in the file; content, never written to disk or log."""

    def body_with(self, *, model: str, max_tokens: int, salt: str) -> dict[str, Any]:
        kept = {name: value for name, value in self.body.items() if name not in NOT_SENT}
        own = self.body.get("max_completion_tokens", self.body.get("max_tokens"))
        kept |= {"model": model, "cache_salt": salt}
        kept["max_tokens"] = min(own, max_tokens) if isinstance(own, int) and own > 0 else max_tokens
        return kept | ({"tool_choice": "none"} if "tools" in kept else {})


def parse_requests(text: str, *, most: int) -> tuple[ComparedRequest, ...]:
    """
    Parse lines of a JSON object each: a request body, or a line of a batch; choose at most `most` by chance.

    Raises ConfigurationError, which names the line and none of its content.
    """
    found = [_parse_request(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise ConfigurationError("the file of prompts has no line: write one request body a line")
    return tuple(_chance().sample(found, min(most, len(found))))


def _parse_request(number: int, line: str) -> ComparedRequest:
    try:
        body = json.loads(line)
        body = body.get("body", body)
        if isinstance(body.get("messages"), list):
            return ComparedRequest(line=number, path="/v1/chat/completions", body=body)
        if isinstance(body.get("prompt"), str):
            return ComparedRequest(line=number, path="/v1/completions", body=body)
    except (ValueError, AttributeError, RecursionError):
        pass
    message = f"line {number} of the prompts is not a JSON object with `messages` or `prompt`"
    raise ConfigurationError(f"{message}: write one request body, or one line of a batch, a line")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    requests: tuple[ComparedRequest, ...]
    rounds: int
    concurrency: tuple[int, ...]
    max_tokens: int

    def check(self, settings: WorkerSettings) -> None:
        """Raises ConfigurationError if so many requests at once cannot be measured."""
        largest = max(self.concurrency)
        if largest > len(self.requests):
            message = f"--concurrency {largest} needs at least as many prompts, and there are"
            raise ConfigurationError(f"{message} {len(self.requests)}: add prompts, or lower it")
        if largest > settings.max_num_seqs:
            message = f"--concurrency {largest} is more than worker.max_num_seqs ({settings.max_num_seqs})"
            raise ConfigurationError(f"{message}: requests would wait")

    def split(self) -> Iterator[tuple[ComparedRequest, ...]]:
        """
        The requests of each round: other ones as far as there are enough, and never one twice.

        Then an interval over rounds also tells what other prompts of this kind would do.
        """
        size = max(*self.concurrency, ceil(len(self.requests) / self.rounds))
        requests = cycle(self.requests)
        return (tuple(islice(requests, size)) for _ in range(self.rounds))

    def order(self, name: str, draft_tokens: Sequence[int]) -> list[tuple[int, list[int]]]:
        """For each concurrency of round `name`, the numbers of draft tokens by chance."""
        chance = _chance(name)
        return [(at_once, chance.sample(draft_tokens, len(draft_tokens))) for at_once in self.concurrency]


def _chance(name: str = "") -> random.Random:
    return random.Random(f"comparison {name}")  # noqa: S311 - it has to come out the same again
