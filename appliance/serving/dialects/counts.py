"""
Routes that generate no text: embeddings, reranking, scores, and counting tokens.

Their answers may be megabytes of numbers, so only the one member that is needed is searched for.
"""

import json
from collections.abc import Mapping
from typing import Any

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, value_of
from appliance.serving.dialects.dialect import Dialect, ParsedAnswer
from appliance.serving.error_text import ErrorText, anthropic_error, encode_error
from appliance.serving.usage import Usage, count_of, object_of

_DECODER = json.JSONDecoder()
USAGE = '"usage":'
ENCODING = "encoding_format"


class Pooling(Dialect):
    """Embeddings, reranking and scores: prompt tokens and no completion tokens."""

    def check(self, members: Mapping[str, Member]) -> None:
        """Only encodings that are JSON; vLLM has others."""
        form = value_of(members, ENCODING)
        if form is not None and form not in ("float", "base64"):
            raise InvalidRequestError(f"`{ENCODING}` must be `float` or `base64`.", param=ENCODING)

    def read_answer(self, text: str, *, wants_metrics: bool) -> ParsedAnswer:  # noqa: ARG002 - it has none
        """The prompt tokens; an answer without them counts as not reported."""
        usage = _usage(text)
        prompt_tokens = count_of(usage.get("prompt_tokens"))
        return ParsedAnswer(
            text=text, usage=Usage(prompt_tokens=prompt_tokens or 0, estimated=prompt_tokens is None)
        )


class Tokens(Dialect):
    """Tokenize and detokenize: no model runs, so nothing is counted."""

    def read_answer(self, text: str, *, wants_metrics: bool) -> ParsedAnswer:  # noqa: ARG002 - it has none
        return ParsedAnswer(text=text, usage=Usage())


class MessageTokens(Tokens):
    def error_body(self, error: ErrorText) -> str:
        return encode_error(anthropic_error(error))


def _usage(text: str) -> dict[str, Any]:
    # Quotes inside a string are escaped: the first bare one is the member, ahead of any document's own.
    at = text.find(USAGE)
    if at < 0:
        return {}
    start = at + len(USAGE)
    while text[start : start + 1].isspace():
        start += 1
    try:
        value, _ = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return {}
    return dict(object_of(value))
