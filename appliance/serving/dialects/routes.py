"""The routes that clients may call, and their paths at a worker; no other path is forwarded."""

from collections.abc import Container
from dataclasses import dataclass
from types import MappingProxyType

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    path: str
    """Path for clients; also in audit log and metrics."""
    worker_path: str
    dialect: Dialect
    needs: tuple[tuple[str, ...], ...]
    """Sets of members, one of which must be complete."""
    carriers: tuple[str, ...] = ()
    """Members that may contain images, sound or video."""
    caches: bool = True
    """Whether the worker keeps the prompt in its prefix cache."""

    def missing(self, members: Container[str]) -> str | None:
        """The first member that a body lacks; None if it has all of some set."""
        if any(all(name in members for name in names) for names in self.needs):
            return None
        return next(name for name in self.needs[0] if name not in members)


def _route(
    path: str,
    dialect: Dialect,
    *needs: tuple[str, ...],
    carriers: tuple[str, ...] = (),
    worker_path: str = "",
    caches: bool = True,
) -> Route:
    return Route(
        path=path,
        worker_path=worker_path or path,
        dialect=dialect,
        needs=needs,
        carriers=carriers,
        caches=caches,
    )


_SIDES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))
ROUTES = MappingProxyType(
    {
        route.path: route
        for route in (
            _route("/v1/chat/completions", CHAT, ("messages",), carriers=("messages",)),
            _route("/v1/completions", CHAT, ("prompt",)),
            _route("/v1/responses", RESPONSES, ("input",), carriers=("input",)),
            _route("/v1/messages", MESSAGES, ("messages",), carriers=("messages", "system")),
            _route(
                "/v1/messages/count_tokens",
                MESSAGE_TOKENS,
                ("messages",),
                carriers=("messages", "system"),
                caches=False,
            ),
            _route("/v1/embeddings", POOLING, ("input",), ("messages",), carriers=("input", "messages")),
            # vLLM writes a warning to its log for each request that has `/v1` in front of these.
            *(
                _route(
                    path,
                    POOLING,
                    ("query", "documents"),
                    carriers=("query", "documents"),
                    worker_path="/rerank",
                )
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
            *(
                _route(path, POOLING, *PAIRS, carriers=_SIDES, worker_path="/score")
                for path in ("/score", "/v1/score")
            ),
            _route("/tokenize", TOKENS, ("prompt",), ("messages",), carriers=("messages",), caches=False),
            _route("/detokenize", TOKENS, ("tokens",), caches=False),
        )
    }
)
"""Every path that accepts a body; a path that is not listed is not served."""


def dialect_at(path: str) -> Dialect:
    """The dialect whose errors a client of this path parses, whether there is a route or not."""
    return MESSAGES if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/") else CHAT
