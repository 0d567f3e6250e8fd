"""
What is measured, in which order: cells of traffic and concurrency, and the modes of a round.

Values only.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    CODE = "code"
    CHAT = "chat"
    LONG = "long"
    GERMAN = "german"
    JSON = "json"
    BASE64 = "base64"
    TURNS = "turns"

    @property
    def label(self) -> str:
        return LABELS[self]


LABELS = {
    Kind.CODE: "code",
    Kind.CHAT: "chat, template changed",
    Kind.LONG: "long context",
    Kind.GERMAN: "German prose",
    Kind.JSON: "JSON",
    Kind.BASE64: "base64",
    Kind.TURNS: "code and base64 by turns",
}


class Control(StrEnum):
    """What sets the draft tokens."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    control: Control
    draft_tokens: int | None = None
    """K, where it is fixed."""

    @property
    def name(self) -> str:
        return str(self.control) if self.draft_tokens is None else f"K={self.draft_tokens}"


ADAPTIVE = Mode(control=Control.ADAPTIVE)


def fixed(draft_tokens: int) -> Mode:
    return Mode(control=Control.FIXED, draft_tokens=draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load: everything in it is compared."""

    kind: Kind
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.kind} c={self.concurrency}"


def parse_cell(row: Mapping[str, Any]) -> Cell:
    return Cell(kind=Kind(row["kind"]), concurrency=row["concurrency"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All rounds of one file of results agree in these."""

    seconds: float = 1.5
    """Measured time of a segment."""
    turn_seconds: float = 4.0
    """Time until traffic by turns changes; its segments have two turns, and those of long prompts, whose
    prefill takes up to half a second, have one."""
    learn: float = 20.0
    """Time the monitor has with a cell's traffic before the first round of a sitting."""
    answer_tokens: int = 96
    """Mean length of an answer."""
    draft_tokens: int = 3
    """The largest K."""

    def window(self, kind: Kind) -> float:
        turns = {Kind.TURNS: 2, Kind.LONG: 1}.get(kind)
        return self.seconds if turns is None else turns * self.turn_seconds


def order_of(modes: Sequence[Mode], cell: Cell, number: int) -> tuple[Mode, ...]:
    """The modes of one round in random order: the same whenever it is asked for."""
    shuffled = list(modes)
    random.Random(f"{cell.name} {number}").shuffle(shuffled)
    return tuple(shuffled)
