"""The routes that clients may call, and their paths at a worker; no other path is forwarded."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from appliance.infra.json_members import MAX_NUMBERS, Member, count_of, value_of
from appliance.serving.dialects.chat import Chat
from appliance.serving.dialects.counts import MessageTokens, Pooling, Tokens
from appliance.serving.dialects.dialect import Dialect
from appliance.serving.dialects.messages import Messages
from appliance.serving.dialects.responses import Responses

CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()
POOLING, TOKENS, MESSAGE_TOKENS = Pooling(), Tokens(), MessageTokens()
ANTHROPIC = "/v1/messages"
PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""Names that vLLM accepts for the two sides of a score."""
ANSWERS = ("n", "best_of")
"""How many answers to each input; with beam search also the width of the beam."""
MAX_GENERATED, MAX_POOLED = 128, 2048
"""Sequences of one request: the worker starts all of them at once, ahead of other tenants' requests."""


@dataclass(frozen=True, slots=True)
class Route:
    path: str
    """Path for clients; also in audit log and metrics."""
    dialect: Dialect
    needs: tuple[tuple[str, ...], ...]
    """Sets of members, one of which must be complete."""
    carriers: tuple[str, ...] = ()
    """Members that may contain images, sound or video."""
    other_path: str = ""
    """Path at the worker; empty for the same."""
    inputs: tuple[str, ...] = ()
    """Members that may list several inputs, each computed as a sequence of its own."""
    caches: bool = True
    """Whether the worker keeps the prompt in its prefix cache."""
    takes_tokens: bool = False
    """Whether a prompt may be a list of numbers, one for each token."""

    @property
    def worker_path(self) -> str:
        return self.other_path or self.path

    @property
    def max_sequences(self) -> int:
        return MAX_GENERATED if self.dialect.generates else MAX_POOLED

    @property
    def max_numbers(self) -> int:
        return MAX_NUMBERS if self.takes_tokens else 0

    def sequences(self, members: Mapping[str, Member]) -> int:
        """Sequences that the worker computes for one request: inputs times answers."""
        inputs = max((_length(value_of(members, name)) for name in self.inputs), default=1)
        if not self.dialect.generates:
            return inputs
        return inputs * max([count_of(members, name) or 1 for name in ANSWERS if name in members], default=1)

    def missing(self, members: Container[str]) -> str | None:
        """The first member that a body lacks; None if it has all of some set."""
        if any(all(name in members for name in names) for names in self.needs):
            return None
        return next(name for name in self.needs[0] if name not in members)


def _length(value: Any) -> int:  # noqa: ANN401 - decoded JSON
    """How many inputs a member lists; a list of numbers is one input, as tokens."""
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return 1
    return len(value)


_MESSAGES, _INPUT, _PROMPT, _RERANKED = ("messages",), ("input",), ("prompt",), ("query", "documents")
_SIDES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))
_ROUTES = (
    Route("/v1/chat/completions", CHAT, (_MESSAGES,), _MESSAGES),
    Route("/v1/completions", CHAT, (_PROMPT,), inputs=_PROMPT, takes_tokens=True),
    Route("/v1/responses", RESPONSES, (_INPUT,), _INPUT),
    Route("/v1/messages", MESSAGES, (_MESSAGES,), ("messages", "system")),
    Route("/v1/messages/count_tokens", MESSAGE_TOKENS, (_MESSAGES,), ("messages", "system"), caches=False),
    Route(
        "/v1/embeddings",
        POOLING,
        (_INPUT, _MESSAGES),
        ("input", "messages"),
        inputs=_INPUT,
        takes_tokens=True,
    ),
    # vLLM writes a warning to its log for each request that has `/v1` in front of these.
    Route("/rerank", POOLING, (_RERANKED,), _RERANKED, inputs=_RERANKED),
    Route("/v1/rerank", POOLING, (_RERANKED,), _RERANKED, "/rerank", _RERANKED),
    Route("/v2/rerank", POOLING, (_RERANKED,), _RERANKED, "/rerank", _RERANKED),
    Route("/score", POOLING, PAIRS, _SIDES, inputs=_SIDES),
    Route("/v1/score", POOLING, PAIRS, _SIDES, "/score", _SIDES),
    Route("/tokenize", TOKENS, (_PROMPT, _MESSAGES), _MESSAGES, caches=False),
    Route("/detokenize", TOKENS, (("tokens",),), caches=False, takes_tokens=True),
)
ROUTES = MappingProxyType({route.path: route for route in _ROUTES})
"""Every path that accepts a body; a path that is not listed is not served."""


def dialect_at(path: str) -> Dialect:
    """The dialect whose errors a client of this path parses, whether there is a route or not."""
    return MESSAGES if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/") else CHAT
