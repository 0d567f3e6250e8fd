"""
The prompts of each kind of traffic, the same in the same order for every mode.
"""

import json
import random
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.acceptance import GERMAN, NAMES
from benchmarks.speculation.plan import Kind
from demo.training.corpus import Corpus, held_out_prompts

PROMPTS = 64
LONG_PROMPTS = 16
CHARACTERS_PER_TOKEN = 2.2
"""Fewer than code has with most tokenizers, so that a first cut is seldom too long."""
FILLED = 0.95
"""How much of the context limit a long prompt should fill."""
RANDOM_BYTES = 225
TASKS = ("Write a Python function", "Write the method", "Show an example of", "Write a test for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request's text."""

    text: str

    def body(self, *, model: str, max_tokens: int, temperature: float, salt: str) -> dict[str, Any]:
        """The request; `salt` keeps it apart in the prefix cache: no mode reads what another computed."""
        return {
            "model": model,
            "prompt": self.text,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Prompts of one kind, repeated in a circle."""

    prompts: tuple[Prompt, ...]
    others: tuple[Prompt, ...] = ()
    """The other kind of traffic by turns."""
    turn_seconds: float = 1.0

    def at(self, number: int, elapsed: float) -> Prompt:
        """The prompt of request `number`, sent `elapsed` seconds after the segment began."""
        is_other = self.others and int(elapsed / self.turn_seconds) % 2
        of = self.others if is_other else self.prompts
        return of[number % len(of)]


def prompts_of(kind: Kind, corpus: Corpus) -> tuple[Prompt, ...]:
    """The prompts of any kind but `long`, which have to be cut to a model's limit, and `turns`."""
    noise = random.Random(7)
    match kind:
        case Kind.CODE:  # only text that the demo pair was not trained on
            return _plain(held_out_prompts(corpus, count=PROMPTS))
        case Kind.CHAT:  # another template than the one the draft was trained on
            return _plain([f"### Instruction:\n{ask}\n\n### Response:\n" for ask in _questions()])
        case Kind.GERMAN:
            return _plain([(GERMAN * 3)[start : start + 500] for start in range(0, 3 * PROMPTS, 3)])
        case Kind.JSON:
            return _plain([json.dumps([_record(noise) for _ in range(6)], indent=1) for _ in range(PROMPTS)])
        case Kind.BASE64:
            return _plain([b64encode(noise.randbytes(RANDOM_BYTES)).decode() for _ in range(PROMPTS)])
        case Kind.LONG | Kind.TURNS:
            message = f"{kind} has no prompts of its own"
            raise ValueError(message)


def traffic_of(
    kind: Kind, corpus: Corpus, *, turn_seconds: float = 1.0, long: Sequence[Prompt] = ()
) -> Traffic:
    """The traffic of any kind; `long` are the prompts of that kind."""
    if kind is Kind.TURNS:
        code, noise = prompts_of(Kind.CODE, corpus), prompts_of(Kind.BASE64, corpus)
        return Traffic(prompts=code, others=noise, turn_seconds=turn_seconds)
    return Traffic(prompts=tuple(long) if kind is Kind.LONG else prompts_of(kind, corpus))


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


def _record(noise: random.Random) -> dict[str, Any]:
    ward, bed = noise.choice(("north", "south", "surgery")), noise.randrange(400)
    values = [round(noise.uniform(30, 200), 1) for _ in range(3)]
    return {"id": noise.getrandbits(32), "ward": ward, "bed": bed, "values": values, "checked": bed % 3 == 0}


def _plain(texts: Sequence[str]) -> tuple[Prompt, ...]:
    return tuple(Prompt(text=text) for text in texts)
