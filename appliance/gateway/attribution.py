"""
Whose traffic makes the draft fail: acceptance by tenant, model, prompt template and context length.

No content is kept, only the labels of `appliance.serving.template`.  A label means the same for as
long as the hash key is the same: for the life of a process, unless it is given one that was kept.

Memory is bounded: beyond so many keys the one not seen for longest is added to `(other)`.  It fails
open: requests a worker said nothing of are left out, and none fails for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from appliance.infra.json_members import Member
from appliance.serving.template import template_of

OTHER = "(other)"
"""Stands in every aspect of what was folded together; no tenant can be called that."""
SMALLEST_CONTEXT, LARGEST_CONTEXT = 1, 128
"""In units of 1024 tokens."""


class Aspect(StrEnum):
    """What acceptance can be broken down by."""

    TENANT = "tenant"
    MODEL = "model"
    TEMPLATE = "template"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Traffic that is counted together."""

    tenant: str
    model: str
    template: str
    """A label of `serving.template`."""
    context: str
    """A label of `context_bucket`."""

    def of(self, aspect: Aspect) -> str:
        """The value of one aspect."""
        return str(getattr(self, aspect.value))


EVERYTHING_ELSE = Key(tenant=OTHER, model=OTHER, template=OTHER, context=OTHER)


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of some requests."""

    requests: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: "Tally") -> None:
        """Count another tally's requests as well."""
        self.requests += other.requests
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.completion_tokens += other.completion_tokens

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per draft with the bonus token; 1.0 for no drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per draft token, 0..1."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def wasted_draft_tokens(self) -> int:
        """Draft tokens the target did not accept."""
        return max(0, self.draft_tokens - self.accepted_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What drafting for some requests came to."""

    requests: int
    completion_tokens: int
    drafts: int
    acceptance_length: float
    acceptance_rate: float
    wasted_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Figures):
    """The part of the traffic that has one value of an aspect."""

    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender(Figures):
    """The traffic of one key."""

    tenant: str
    model: str
    template: str
    context: str


@dataclass(slots=True)
class _Generations:
    """One key's counts in the window that runs and in the one before it."""

    current: Tally = field(default_factory=Tally)
    previous: Tally = field(default_factory=Tally)

    def total(self) -> Tally:
        total = Tally()
        total.add(self.current)
        total.add(self.previous)
        return total


class Attribution:
    """
    Acceptance by key over the last one to two windows.  Owned by one event loop.

    Args:
        label_key: secret of 16 to 64 bytes that template labels are made with.
        clock: reading in seconds that never goes backwards.
        window_seconds: what is younger than this is always counted, what is twice as old never.
        largest_keys: keys that are told apart; the least recently seen beyond them become `(other)`.
        min_drafts: below so many drafts a key is not called an offender: it may be chance.
    """

    def __init__(
        self,
        *,
        label_key: bytes,
        clock: Callable[[], float],
        window_seconds: float = 600.0,
        largest_keys: int = 512,
        min_drafts: int = 50,
    ) -> None:
        self._label_key = label_key
        self._clock = clock
        self._window_seconds = window_seconds
        self._largest_keys = largest_keys
        self._min_drafts = min_drafts
        self._began = clock()
        self._counts: OrderedDict[Key, _Generations] = OrderedDict()
        self._other = _Generations()

    def template_of(self, route: str, members: Mapping[str, Member]) -> str:
        """The template label of a request, made with the key given at the start."""
        return template_of(route, members, key=self._label_key)

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
        """Count one request that was drafted for."""
        self._turn()
        key = Key(tenant=tenant, model=model, template=template, context=context)
        self._counts.setdefault(key, _Generations()).current.add(
            Tally(
                requests=1,
                drafts=drafts,
                draft_tokens=draft_tokens,
                accepted_tokens=accepted_tokens,
                completion_tokens=completion_tokens,
            )
        )
        self._counts.move_to_end(key)
        while len(self._counts) > self._largest_keys:
            _, folded = self._counts.popitem(last=False)
            self._other.current.add(folded.current)
            self._other.previous.add(folded.previous)

    def overall(self) -> Tally:
        """All traffic together."""
        total = Tally()
        for tally in self._totals().values():
            total.add(tally)
        return total

    def offenders(self, limit: int) -> tuple[Offender, ...]:
        """
        The keys that waste most: first those with an acceptance length below the overall one.

        They are ordered by wasted draft tokens times how far the acceptance length falls short;
        those that do not fall short follow, by wasted draft tokens.
        """
        overall = self.overall().acceptance_length

        def order(item: tuple[Key, Tally]) -> tuple[float, int, tuple[str, ...]]:
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

    def by(self, aspect: Aspect) -> tuple[Share, ...]:
        """All traffic by one aspect, the most wasteful value first; `(other)` is what was folded."""
        tallies: dict[str, Tally] = {}
        for key, tally in self._totals().items():
            tallies.setdefault(key.of(aspect), Tally()).add(tally)
        shares = (Share(value=value, **_figures(tally)) for value, tally in tallies.items())
        return tuple(sorted(shares, key=lambda share: (-share.wasted_draft_tokens, share.value)))

    def _totals(self) -> dict[Key, Tally]:
        self._turn()
        totals = {key: counts.total() for key, counts in self._counts.items()}
        other = self._other.total()
        if other.requests:
            totals[EVERYTHING_ELSE] = other
        return totals

    def _turn(self) -> None:
        """Begin a new window where the last one is over, and forget the one before it."""
        windows = int((self._clock() - self._began) // self._window_seconds)
        if windows < 1:
            return
        self._began += windows * self._window_seconds
        for counts in (*self._counts.values(), self._other):
            counts.previous = counts.current if windows == 1 else Tally()
            counts.current = Tally()
        self._counts = OrderedDict(
            (key, counts) for key, counts in self._counts.items() if counts.previous.requests
        )


def context_bucket(prompt_tokens: int) -> str:
    """The range of context lengths a prompt falls into: `0-1k`, `1k-2k`, doubling up to `128k+`."""
    if prompt_tokens < SMALLEST_CONTEXT * 1024:
        return f"0-{SMALLEST_CONTEXT}k"
    if prompt_tokens >= LARGEST_CONTEXT * 1024:
        return f"{LARGEST_CONTEXT}k+"
    first = 1 << (prompt_tokens // 1024).bit_length() - 1
    return f"{first}k-{2 * first}k"


def _figures(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "completion_tokens": tally.completion_tokens,
        "drafts": tally.drafts,
        "acceptance_length": tally.acceptance_length,
        "acceptance_rate": tally.acceptance_rate,
        "wasted_draft_tokens": tally.wasted_draft_tokens,
    }
