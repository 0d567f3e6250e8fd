"""
Counts the tokens of every request in a worker's API server, so that one whose client left can be charged.

The middleware begins a count for each HTTP request and stores it in a context variable; whatever vLLM's
handler starts for that request inherits it, and the engine's states of its sequences report to it.  That
covers every route, several prompts or answers, and answers in one piece.  Nothing is done for a single token.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ENDING_SECONDS = 8.0
"""
Maximum time that a reader waits for a request to end: vLLM aborts one after the step in which its client
left, which may hold long prompts.  Less than the gateway waits for the answer.
"""
KEPT = 1024
"""Counts of ended requests that wait for their gateway to read them."""
MAX_LIVE = 256
"""States held before those that have ended are added up: a beam search makes some for each token."""
MAX_ID_CHARACTERS = 64
_COUNT: ContextVar["TokenCount | None"] = ContextVar("appliance_token_count", default=None)


class TokenCount:
    """Tokens of one HTTP request."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.is_whole = True
        """False once a sequence could not be counted: the gateway then estimates."""
        self._prompts: dict[str, int] = {}
        self._live: list[Any] = []
        self._added_up = 0

    def add(self, state: Any, states: dict[str, Any]) -> None:  # noqa: ANN401 - of vLLM's output processor
        """Count another sequence; `states` are those that the engine still computes."""
        # Answers to one prompt share its id, and each step of a beam search extends that of its prompt.
        prompt, is_beam, _ = state.external_req_id.partition("-beam-")
        self._prompts.setdefault(prompt.rpartition("-")[0] if is_beam else prompt, state.prompt_len)
        _generated(state)  # fails here if it ever does, and not when the request ends
        if len(self._live) >= MAX_LIVE:
            ended = [old for old in self._live if states.get(old.request_id) is not old]
            self._added_up += sum(map(_generated, ended))
            self._live = [old for old in self._live if states.get(old.request_id) is old]
        self._live.append(state)

    def end(self) -> None:
        """Release the states: they hold the prompts."""
        self._added_up += sum(map(_generated, self._live))
        self._live = []
        self.ended.set()

    def usage(self) -> dict[str, int] | None:
        """Prompt and completion tokens; None if they are not known."""
        if not self.is_whole or not self._prompts:
            return None
        completion = self._added_up + sum(map(_generated, self._live))
        return {"prompt_tokens": sum(self._prompts.values()), "completion_tokens": completion}


class TokenCounts:
    """By request id, as the gateway sent it: running requests, and the last that ended."""

    def __init__(self) -> None:
        self._running: dict[str, TokenCount] = {}
        self._ended: dict[str, TokenCount] = {}

    @contextmanager
    def counting(self, request_id: str) -> Iterator[None]:
        if not 0 < len(request_id) <= MAX_ID_CHARACTERS:
            yield
            return
        count = self._running[request_id] = TokenCount()
        token = _COUNT.set(count)
        try:
            yield
        finally:
            _COUNT.reset(token)
            count.end()
            if self._running.get(request_id) is count:
                del self._running[request_id]
            self._ended[request_id] = count
            if len(self._ended) > KEPT:
                del self._ended[next(iter(self._ended))]

    async def read(self, request_id: str) -> dict[str, int] | None:
        """The tokens of a request once it has ended; None if they are not known."""
        count = self._running.get(request_id) or self._ended.get(request_id)
        if count is None:
            return None
        try:
            async with asyncio.timeout(ENDING_SECONDS):
                await count.ended.wait()
        except TimeoutError:
            pass  # it still runs: what it has generated so far
        return count.usage()


def count_sequences(processor_class: Any) -> None:  # noqa: ANN401 - a class of vLLM
    """
    Report each sequence to the count of its HTTP request.

    `v1/engine/output_processor.py`, `add_request`: runs in the API server, in the context of the request.
    """
    original = getattr(processor_class, "add_request", None)
    if original is None or hasattr(original, "appliance_counts"):
        return  # vLLM may load plugins more than once in a process

    def add_request(processor: Any, request: Any, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        original(processor, request, *arguments, **named)
        count = _COUNT.get()
        if count is None:
            return
        try:
            states = processor.request_states
            count.add(states[request.request_id], states)
        except Exception:  # noqa: BLE001 - an engine of another structure; it must serve the request
            count.is_whole = False

    add_request.appliance_counts = True  # type: ignore[attr-defined]
    processor_class.add_request = add_request


def _generated(state: Any) -> int:  # noqa: ANN401 - of vLLM's output processor
    """0 for a sequence that generates no text, as an embedding."""
    return 0 if state.detokenizer is None else int(state.detokenizer.num_output_tokens())
