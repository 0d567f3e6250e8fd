"""
Suspect answers: acceptance further from the usual than all that a tenant and prompt template had before.

    request ─► log-odds that its drafts' first token is rejected ─► alone, and pooled in a block ─► low, high

Rejection at the first position does not depend on the number of draft tokens, so control may change it.  A
request, or a block of successive requests to one worker, is suspect if it is `REACH` times as far from the
median as the extreme of the history on that side.  The history holds real traffic, sessions of similar
requests and rare kinds included, so no distribution is assumed.  What was suspect becomes history at once:
each new level is reported a few times at most, and is ordinary from then on.

A second history, of blocks of different tenants and templates of a model, finds a worker that fails for all
of them before one of them has a history of its own; one tenant's new traffic is an eighth of such a block.

Nothing of a text is read.  It fails open: requests without reported drafts are ignored, and a key without
enough history is never suspect.
"""

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from appliance.serving.worker import WorkerId

LEAST_DRAFTS = 8  # of a request; with fewer, chance explains any acceptance
BLOCK_REQUESTS = 8  # pooled: a fault fills a block within 15 requests
LEAST_BLOCKS = 32  # of a history that judges: 256 requests, about ten sessions of similar ones
HISTORY_BLOCKS = 256  # remembered: 2,048 requests, so that kinds of traffic that return are known
REACH = 1.5  # times the largest distance so far; 1 would report each new record, of which there are many
MAX_KEYS = 512  # histories in memory, at most 4 KiB of numbers each; the least recently used is dropped

Key = tuple[str, str, str]  # tenant, model and template


class Suspicion(StrEnum):
    """The field `answer_suspect` of an outcome, and the metric label."""

    LOW = "low"  # drafts were accepted far less often than ever: the answer may be garbled
    HIGH = "high"  # far more often: it may repeat itself


@dataclass(slots=True)
class _Range:
    lowest: float = math.inf
    centre: float = 0.0
    highest: float = -math.inf

    def judge(self, value: float) -> Suspicion | None:
        if value - self.centre > REACH * (self.highest - self.centre):
            return Suspicion.LOW
        return Suspicion.HIGH if value - self.centre < REACH * (self.lowest - self.centre) else None


@dataclass(slots=True)
class _History:
    lowest: "array[float]" = field(default_factory=lambda: array("f"))  # of each block's requests
    medians: "array[float]" = field(default_factory=lambda: array("f"))
    highest: "array[float]" = field(default_factory=lambda: array("f"))
    blocks: "array[float]" = field(default_factory=lambda: array("f"))
    of_requests: _Range = field(default_factory=_Range)
    of_blocks: _Range = field(default_factory=_Range)
    open_blocks: dict[WorkerId, dict[object, tuple[int, int]]] = field(default_factory=dict)

    def judge_request(self, drafts: int, rejected: int) -> Suspicion | None:
        value, known = log_odds(drafts, rejected), self.of_requests
        found = known.judge(value) if self._judges else None
        known.lowest, known.highest = min(known.lowest, value), max(known.highest, value)
        return found

    def judge_block(self, worker: WorkerId, name: object, drafts: int, rejected: int) -> Suspicion | None:
        """Add a request to the worker's open block; the one that fills it is judged for all of it."""
        block = self.open_blocks.setdefault(worker, {})
        block[name] = (drafts, rejected)
        if len(block) < BLOCK_REQUESTS:
            if len(self.open_blocks) > HISTORY_BLOCKS:  # of workers that have left
                del self.open_blocks[next(iter(self.open_blocks))]
            return None
        del self.open_blocks[worker]
        value = log_odds(*map(sum, zip(*block.values(), strict=True)))
        found = self.of_blocks.judge(value) if self._judges else None
        alone = [log_odds(*counts) for counts in block.values()]
        added = (min(alone), median(alone), max(alone), value)
        for kept, one in zip((self.lowest, self.medians, self.highest, self.blocks), added, strict=True):
            kept.append(one)
            del kept[:-HISTORY_BLOCKS]
        self.of_requests = _Range(min(self.lowest), median(self.medians), max(self.highest))
        self.of_blocks = _Range(min(self.blocks), median(self.blocks), max(self.blocks))
        return found

    @property
    def _judges(self) -> bool:
        return len(self.blocks) >= LEAST_BLOCKS


def log_odds(drafts: int, rejected: int) -> float:
    return math.log((rejected + 0.5) / (drafts - rejected + 0.5))


class SuspectAnswers:
    """Owned by one event loop."""

    def __init__(self) -> None:
        self._histories: OrderedDict[Key | str, _History] = OrderedDict()
        self._count = 0

    def judge(
        self, *, tenant: str, model: str, template: str, worker: WorkerId, drafts: int, rejected: int
    ) -> Suspicion | None:
        """`rejected` are the drafts of which not one token was accepted."""
        if drafts < LEAST_DRAFTS:
            return None
        key = (tenant, model, template)
        own, shared = self._history(key), self._history(model)
        self._count += 1
        alone = own.judge_request(drafts, rejected)
        block = own.judge_block(worker, self._count, drafts, rejected)
        of_all = shared.judge_block(worker, key, drafts, rejected)
        return alone or block or of_all

    def _history(self, key: Key | str) -> _History:
        history = self._histories.setdefault(key, _History())
        self._histories.move_to_end(key)
        while len(self._histories) > MAX_KEYS:
            self._histories.popitem(last=False)
        return history
