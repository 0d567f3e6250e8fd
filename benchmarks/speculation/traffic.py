"""
The prompts of each kind of traffic, the same in the same order for every mode.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.acceptance import GERMAN, NAMES, PROSE
from benchmarks.speculation.plan import Kind, is_code
from demo.training.corpus import Corpus, held_out_prompts

PROMPTS = 64
LONG_PROMPTS = 16
CHARACTERS_PER_TOKEN = 2.2
"""Fewer than code has with most tokenizers, so that a first cut is seldom too long."""
FILLED = 0.95
"""How much of the context limit a long prompt should fill."""
HEX_BYTES = 150
TASKS = ("Write a Python function", "Write the method", "Show an example of", "Write a test for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request's text; a chat is wrapped in the model's own template by the worker."""

    text: str
    is_chat: bool = False

    @property
    def route(self) -> str:
        """Where it is sent."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, *, model: str, max_tokens: int, temperature: float, salt: str) -> dict[str, Any]:
        """
        The request.

        Args:
            model: name of the model.
            max_tokens: how many tokens it makes; none ends it earlier.
            temperature: of sampling.
            salt: kept apart in the worker's prefix cache, so that no mode reads what another computed.
        """
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": self.text}]} if self.is_chat else {"prompt": self.text}
        )
        return {
            "model": model,
            **content,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Prompts of one kind, to be gone round."""

    prompts: tuple[Prompt, ...]
    others: tuple[Prompt, ...] = ()
    """The kind of traffic after a shift."""
    shift_seconds: float = 1.0

    def at(self, number: int, elapsed: float) -> Prompt:
        """The prompt of a request: its number in this segment, and seconds since measuring began."""
        of = self.prompts if not self.others or is_code(elapsed, self.shift_seconds) else self.others
        return of[number % len(of)]


def prompts_of(kind: Kind, corpus: Corpus, *, long: Sequence[Prompt] = ()) -> tuple[Prompt, ...]:
    """
    The prompts of one kind.

    Args:
        kind: any but `shift`, which has two.
        corpus: where code comes from; only text that the demo pair was not trained on.
        long: prompts of the kind `long`, which have to be cut to a model's measure.
    """
    match kind:
        case Kind.CODE:
            return _plain(held_out_prompts(corpus, count=PROMPTS))
        case Kind.CHAT:
            # Another template than the model's own, written out: a draft knows the one it was trained on.
            return _plain([f"### Instruction:\n{ask}\n\n### Response:\n" for ask in _questions()])
        case Kind.OWN_CHAT:
            return tuple(Prompt(text=ask, is_chat=True) for ask in _questions())
        case Kind.LONG:
            return tuple(long)
        case Kind.HEX:
            noise = random.Random(7)
            return _plain([noise.randbytes(HEX_BYTES).hex() for _ in range(PROMPTS)])
        case Kind.MIXED:
            parts = (
                *(prompts_of(Kind.CODE, corpus), prompts_of(Kind.CHAT, corpus)),
                *(_plain(_prose()), prompts_of(Kind.HEX, corpus)),
            )
            return tuple(prompt for group in zip(*parts, strict=False) for prompt in group)
        case Kind.SHIFT:
            message = "shifting traffic has two kinds of prompts"
            raise ValueError(message)


def traffic_of(kind: Kind, corpus: Corpus, *, shift_seconds: float, long: Sequence[Prompt] = ()) -> Traffic:
    """The traffic of any kind."""
    if kind is Kind.SHIFT:
        code, noise = prompts_of(Kind.CODE, corpus), prompts_of(Kind.HEX, corpus)
        return Traffic(prompts=code, others=noise, shift_seconds=shift_seconds)
    return Traffic(prompts=prompts_of(kind, corpus, long=long))


def long_texts(corpus: Corpus, characters: int, *, count: int = LONG_PROMPTS) -> tuple[str, ...]:
    """Pieces of held-out code that long, from places spread evenly over all of it."""
    text = "\n\n".join(document for document in corpus.held_out if document)
    # It wraps around: a limit may be longer than all held-out code.
    around = text * (2 + characters // max(1, len(text)))
    return tuple(around[at : at + characters] for at in range(0, len(text), max(1, len(text) // count)))[
        :count
    ]


def fitted_characters(characters: int, tokens: int, limit: int) -> int:
    """How long to cut a text of which so many characters made so many tokens, to fill the limit."""
    return int(characters * FILLED * limit / max(1, tokens))


def _questions() -> list[str]:
    asked = [f"{task} `{name}`." for task in TASKS for name in NAMES]
    return asked[:PROMPTS]


def _prose() -> list[str]:
    return [
        text[start:] + text
        for start in range(0, 2 * PROMPTS, 4)
        for text in (PROSE, GERMAN)
    ]  # fmt: skip


def _plain(texts: Sequence[str]) -> tuple[Prompt, ...]:
    return tuple(Prompt(text=text) for text in texts)
