"""
Which tokens are trained on in which step: pure, and the same for the same seed.

A text longer than a window is cut into pieces.  Each piece is trained on once in a pass over the data and
has text of a quarter of a window before it, which is seen but not trained on again.  In every pass but the
first the cuts fall elsewhere.  Windows of similar length share a step, so that little of it is padding.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.errors import DraftRefusedError

LEAD = 4
"""The text before a piece is one part in so many of a window."""
GROUP = 16
"""Steps whose windows are sorted by length among themselves."""
FIRST_PREDICTED = 2
"""A draft reads the target's state at one token and the next token itself; it predicts the one after."""


class Text(Protocol):
    """What is trained on: an exchange, or general text."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and answer."""
        ...

    @property
    def loss_mask(self) -> Sequence[bool]:
        """Of each token, whether a draft should learn to predict it."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """A part of one text."""

    text: int
    """Which one."""
    start: int
    """Place of its first token in the text, which is also the token's position when it is served."""
    stop: int
    """Place after its last token."""
    first: int
    """Place of the first token that is trained on."""

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a feed stands."""

    epoch: int = 0
    """Passes over the data that are done."""
    index: int = 0
    """Steps of the present one that are done."""


def cut(text: Text, number: int, *, window: int, shift: int = 0) -> list[Window]:
    """
    Cut one text into windows that together train on each answer token once.

    Args:
        text: any text; one without an answer gives no window.
        number: which text it is.
        window: most tokens of a window.
        shift: by how much the cuts move towards the beginning, less than the length of a piece.
    """
    answer = [place for place, counts in enumerate(text.loss_mask) if counts and place >= FIRST_PREDICTED]
    if not answer:
        return []
    end, piece = answer[-1] + 1, window - window // LEAD
    if end <= window:
        return [Window(number, 0, end, 0)]
    found = []
    for first in range(max(0, answer[0] - shift), end, piece):
        stop = min(first + piece, end)
        if any(text.loss_mask[max(first, FIRST_PREDICTED) : stop]):
            found.append(Window(number, max(0, stop - window), stop, first))
    return found


def plan_epoch(
    texts: Sequence[Text], *, batch: int, window: int, seed: int, epoch: int
) -> list[tuple[Window, ...]]:
    """Plan one pass over the data, as the steps it takes; each has up to `batch` windows."""
    chance = random.Random(f"{seed}/{epoch}")  # noqa: S311 - it has to come out the same again
    piece = window - window // LEAD
    windows: list[Window] = []
    for number, text in enumerate(texts):
        shift = chance.randrange(piece)
        windows.extend(cut(text, number, window=window, shift=shift if epoch else 0))
    chance.shuffle(windows)
    steps: list[tuple[Window, ...]] = []
    for begin in range(0, len(windows), GROUP * batch):
        group = sorted(windows[begin : begin + GROUP * batch], key=lambda found: found.length)
        steps.extend(tuple(group[at : at + batch]) for at in range(0, len(group), batch))
    chance.shuffle(steps)
    return steps


class Feed:
    """Endless steps over some texts, from wherever an earlier process stopped."""

    def __init__(
        self, texts: Sequence[Text], *, batch: int, window: int, seed: int, place: Place | None = None
    ) -> None:
        """
        Start at `place`, which is one that a feed of the same texts and numbers has given.

        Raises:
            DraftRefusedError: nothing in the texts can be trained on.
        """
        self._texts, self._batch, self._window, self._seed = texts, batch, window, seed
        self._place = place or Place()
        self._steps = self._plan(self._place.epoch)
        if not self._steps:
            raise DraftRefusedError("no sample has an answer to learn from: harvest more")

    @property
    def place(self) -> Place:
        """Where it stands: what `next_step` has not given yet begins there."""
        return self._place

    def next_step(self) -> tuple[Window, ...]:
        """Return the windows of the next step."""
        epoch, index = self._place.epoch, self._place.index
        if index == len(self._steps):
            epoch, index = epoch + 1, 0
            self._steps = self._plan(epoch)
        self._place = Place(epoch=epoch, index=index + 1)
        return self._steps[index]

    def _plan(self, epoch: int) -> list[tuple[Window, ...]]:
        return plan_epoch(self._texts, batch=self._batch, window=self._window, seed=self._seed, epoch=epoch)
