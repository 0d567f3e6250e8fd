"""
The tokens that each step trains on.  Pure: the same seed gives the same steps.

A text longer than a window is cut into pieces.  Each piece is trained on once per pass and is preceded by a
quarter of a window of context that is not trained on again.  Every later pass shifts the cuts.  Windows of
similar length share a step, to reduce padding.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.errors import DraftRefusedError

LEAD = 4
"""The context before a piece is this fraction of a window."""
GROUP = 16
"""Steps whose windows are sorted by length together."""
FIRST_PREDICTED = 2
"""A draft reads the target's state at one token and the next token itself; it predicts the one after."""


class Text(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def loss_mask(self) -> Sequence[bool]:
        """Of each token, whether a draft should learn to predict it."""
        ...


@dataclass(frozen=True, slots=True)
class TextWindow:
    text: int
    """Index of the text."""
    start: int
    """Index of its first token in the text, which is also the token's position when served."""
    stop: int
    first: int
    """Index of the first token that is trained on."""

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPosition:
    epoch: int = 0
    """Completed passes over the data."""
    index: int = 0
    """Completed steps of the current pass."""


def cut(text: Text, number: int, *, window: int, shift: int = 0) -> list[TextWindow]:
    """Cut one text into windows that train on each answer token once; `shift` moves all cuts to the left."""
    answer = [place for place, counts in enumerate(text.loss_mask) if counts and place >= FIRST_PREDICTED]
    if not answer:
        return []
    end, piece = answer[-1] + 1, window - window // LEAD
    if end <= window:
        return [TextWindow(number, 0, end, 0)]
    found = []
    for first in range(max(0, answer[0] - shift), end, piece):
        stop = min(first + piece, end)
        if any(text.loss_mask[max(first, FIRST_PREDICTED) : stop]):
            found.append(TextWindow(number, max(0, stop - window), stop, first))
    return found


def plan_epoch(
    texts: Sequence[Text], *, batch: int, window: int, seed: int, epoch: int
) -> list[tuple[TextWindow, ...]]:
    chance = random.Random(f"{seed}/{epoch}")  # noqa: S311 - it has to come out the same again
    piece = window - window // LEAD
    windows: list[TextWindow] = []
    for number, text in enumerate(texts):
        shift = chance.randrange(piece)
        windows.extend(cut(text, number, window=window, shift=shift if epoch else 0))
    chance.shuffle(windows)
    steps: list[tuple[TextWindow, ...]] = []
    for begin in range(0, len(windows), GROUP * batch):
        group = sorted(windows[begin : begin + GROUP * batch], key=lambda found: found.length)
        steps.extend(tuple(group[at : at + batch]) for at in range(0, len(group), batch))
    chance.shuffle(steps)
    return steps


class Feed:
    """Endless steps over some texts, resumable at a position."""

    def __init__(
        self, texts: Sequence[Text], *, batch: int, window: int, seed: int, place: FeedPosition | None = None
    ) -> None:
        """`place` is a position of a feed of the same texts; raises DraftRefusedError without an answer."""
        self._texts, self._batch, self._window, self._seed = texts, batch, window, seed
        self.place = place or FeedPosition()
        """Position of the next step."""
        self._steps = self._plan(self.place.epoch)
        if not self._steps:
            raise DraftRefusedError("no sample has an answer to learn from: harvest more")

    def next_step(self) -> tuple[TextWindow, ...]:
        epoch, index = self.place.epoch, self.place.index
        if index == len(self._steps):
            epoch, index = epoch + 1, 0
            self._steps = self._plan(epoch)
        self.place = FeedPosition(epoch=epoch, index=index + 1)
        return self._steps[index]

    def _plan(self, epoch: int) -> list[tuple[TextWindow, ...]]:
        return plan_epoch(self._texts, batch=self._batch, window=self._window, seed=self._seed, epoch=epoch)
