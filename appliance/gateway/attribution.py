"""
Acceptance by tenant, model, prompt template and context length: on whose traffic the draft fails.

No content is kept, only the labels of `appliance.serving.template`.  Labels are comparable for as long as the
hash key is the same, which is the life of a process unless the caller gives a stored key.

Memory is bounded: beyond the maximum number of keys the least recently used one is folded into `(other)`.
It fails open: requests without reported drafts are ignored, and no request fails because of attribution.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from appliance.speculation.values import acceptance_length_of

OTHER = "(other)"  # of every aspect of folded keys; no tenant can have this name
SMALLEST_CONTEXT, LARGEST_CONTEXT = 1, 128  # in units of 1024 tokens


class Aspect(StrEnum):
    TENANT = "tenant"
    MODEL = "model"
    TEMPLATE = "template"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficKey:
    tenant: str
    model: str
    template: str  # a label of `serving.template`
    context: str  # a label of `context_bucket`

    def of(self, aspect: Aspect) -> str:
        return str(getattr(self, aspect.value))


EVERYTHING_ELSE = TrafficKey(tenant=OTHER, model=OTHER, template=OTHER, context=OTHER)


@dataclass(slots=True, kw_only=True)
class DraftTally:
    requests: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: "DraftTally") -> None:
        self.requests += other.requests
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.completion_tokens += other.completion_tokens

    @property
    def acceptance_length(self) -> float:
        return acceptance_length_of(self.drafts, self.accepted_tokens)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def wasted_draft_tokens(self) -> int:
        return max(0, self.draft_tokens - self.accepted_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    requests: int
    completion_tokens: int
    drafts: int
    acceptance_length: float
    acceptance_rate: float
    wasted_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficShare(DraftFigures):
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender(DraftFigures):
    tenant: str
    model: str
    template: str
    context: str


@dataclass(slots=True)
class _Generations:
    """The current window and the one before it."""

    current: DraftTally = field(default_factory=DraftTally)
    previous: DraftTally = field(default_factory=DraftTally)

    def total(self) -> DraftTally:
        total = replace(self.current)
        total.add(self.previous)
        return total


class Attribution:
    """
    Acceptance by key over the last one to two windows.  Owned by one event loop.

    `label_key` is a secret of 16 to 64 bytes; `clock` gives monotonic seconds.  Requests younger than
    `window_seconds` are always counted, those twice as old never.  A key with fewer than `min_drafts` drafts
    is no offender, because chance explains it.
    """

    def __init__(
        self,
        *,
        label_key: bytes,
        clock: Callable[[], float],
        window_seconds: float = 600.0,
        max_keys: int = 512,
        min_drafts: int = 50,
    ) -> None:
        self.label_key = label_key
        self._clock = clock
        self._window_seconds = window_seconds
        self._max_keys = max_keys
        self._min_drafts = min_drafts
        self._began = clock()
        self._counts: OrderedDict[TrafficKey, _Generations] = OrderedDict()
        self._other = _Generations()

    def record(
        self,
        *,
        tenant: str,
        model: str,
        template: str,
        context: str,
        drafts: int,
        draft_tokens: int,
        accepted_tokens: int,
        completion_tokens: int,
    ) -> None:
        self._rotate()
        key = TrafficKey(tenant=tenant, model=model, template=template, context=context)
        self._counts.setdefault(key, _Generations()).current.add(
            DraftTally(
                requests=1,
                drafts=drafts,
                draft_tokens=draft_tokens,
                accepted_tokens=accepted_tokens,
                completion_tokens=completion_tokens,
            )
        )
        self._counts.move_to_end(key)
        while len(self._counts) > self._max_keys:
            _, folded = self._counts.popitem(last=False)
            self._other.current.add(folded.current)
            self._other.previous.add(folded.previous)

    def overall(self) -> DraftTally:
        total = DraftTally()
        for tally in self._totals().values():
            total.add(tally)
        return total

    def offenders(self, limit: int) -> tuple[Offender, ...]:
        """
        The keys that waste most draft tokens; first those with an acceptance length below the overall one.

        These are ordered by wasted draft tokens times the shortfall of their acceptance length.
        """
        overall = self.overall().acceptance_length

        def order(item: tuple[TrafficKey, DraftTally]) -> tuple[float, int, tuple[str, ...]]:
            key, tally = item
            shortfall = max(0.0, overall - tally.acceptance_length)
            names = tuple(key.of(aspect) for aspect in Aspect)
            return -tally.wasted_draft_tokens * shortfall, -tally.wasted_draft_tokens, names

        enough = (
            (key, tally)
            for key, tally in self._totals().items()
            if tally.drafts >= self._min_drafts and key != EVERYTHING_ELSE
        )
        worst = sorted(enough, key=order)[:limit]
        return tuple(Offender(**asdict(key), **_figures(tally)) for key, tally in worst)

    def by(self, aspect: Aspect) -> tuple[TrafficShare, ...]:
        """The most wasteful value first; `(other)` has the folded keys."""
        tallies: dict[str, DraftTally] = {}
        for key, tally in self._totals().items():
            tallies.setdefault(key.of(aspect), DraftTally()).add(tally)
        shares = (TrafficShare(value=value, **_figures(tally)) for value, tally in tallies.items())
        return tuple(sorted(shares, key=lambda share: (-share.wasted_draft_tokens, share.value)))

    def _totals(self) -> dict[TrafficKey, DraftTally]:
        self._rotate()
        totals = {key: counts.total() for key, counts in self._counts.items()}
        other = self._other.total()
        if other.requests:
            totals[EVERYTHING_ELSE] = other
        return totals

    def _rotate(self) -> None:
        windows = int((self._clock() - self._began) // self._window_seconds)
        if windows < 1:
            return
        self._began += windows * self._window_seconds
        for counts in (*self._counts.values(), self._other):
            counts.previous = counts.current if windows == 1 else DraftTally()
            counts.current = DraftTally()
        self._counts = OrderedDict(
            (key, counts) for key, counts in self._counts.items() if counts.previous.requests
        )


def context_bucket(prompt_tokens: int) -> str:
    """`0-1k`, `1k-2k`, doubling up to `128k+`."""
    if prompt_tokens < SMALLEST_CONTEXT * 1024:
        return f"0-{SMALLEST_CONTEXT}k"
    if prompt_tokens >= LARGEST_CONTEXT * 1024:
        return f"{LARGEST_CONTEXT}k+"
    first = 1 << (prompt_tokens // 1024).bit_length() - 1
    return f"{first}k-{2 * first}k"


def _figures(tally: DraftTally) -> dict[str, Any]:
    return {each.name: getattr(tally, each.name) for each in fields(DraftFigures)}
