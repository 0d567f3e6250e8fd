"""
Acceptance of drafts: counts of the present text, shared by all batch sizes.

Counts are kept in spans, one for each reading.  If the newest spans differ from those before, the text has
changed, and the older ones are dropped.  Drafts of one request are alike, so requests of several kinds at
once make one window of drafts differ from the next by more than chance; so many times fewer drafts count
(*overdispersion*).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from appliance.speculation.goodput import CORRELATED, Estimate
from appliance.speculation.values import NO_DRAFTS, SpecDecodeCounters

CHANGED, SUSPECTED = 4.0, 2.0
"""Standard deviations from the newest drafts to those before at which the text has, or may have, changed."""
SPANS = 64
"""Beyond so many spans the older half is merged."""
SCORES = 64
"""Pairs of neighbouring windows that overdispersion is computed from."""
CHI_SQUARE_UPPER_QUARTILE = 1.323
"""A quarter of squared z-scores exceed this by chance alone (one degree of freedom)."""
MAXIMUM_OVERDISPERSION = 16.0
NO_PAIR = (NO_DRAFTS, NO_DRAFTS)
NO_SPLIT = (0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    spans: tuple[SpecDecodeCounters, ...] = ()
    """Oldest first."""
    total: SpecDecodeCounters = NO_DRAFTS
    """Their sum: the drafts of the present text."""
    newest: SpecDecodeCounters = NO_DRAFTS
    """The newest of them alone, if the text may have changed with them; else all."""
    is_mixed: bool = False
    """Whether the oldest span may also hold drafts of the text before."""
    pair: tuple[SpecDecodeCounters, SpecDecodeCounters] = NO_PAIR
    """The last complete window, and the one that is being counted."""
    scores: tuple[float, ...] = ()
    """Squared z-scores of neighbouring windows."""
    newest_score: float | None = None
    """The next one: it counts unless the text is found to have changed with its later window."""
    was_drafted: bool = False
    """Whether the present text had drafts by the table, and not by exploration alone."""

    @property
    def overdispersion(self) -> float:
        """How many times more one window differs from the next than by chance; 1.0 or more."""
        # As long as there are fewer than half of them, the missing ones count as small.
        rank = max(len(self.scores), SCORES // 2) // 4
        if len(self.scores) < rank:
            return 1.0
        ratio = sorted(self.scores)[-rank] / CHI_SQUARE_UPPER_QUARTILE
        return min(MAXIMUM_OVERDISPERSION, max(1.0, ratio))

    def counted(
        self, drafts: SpecDecodeCounters, *, memory: int, least: int, are_probes: bool = False
    ) -> tuple["Acceptance", bool]:
        """
        The evidence with the drafts of one reading, and whether the text has or may have changed with them.

        `memory` is the maximum of effective drafts kept, `least` the minimum for a verdict; `are_probes` says
        that the table does not draft.
        """
        if not drafts.drafts:
            return self, False
        window = 2 * least
        after = self._with_score(drafts, window)
        spans, few, is_mixed = (*self.spans, drafts), max(1, least // 4), self.is_mixed
        z, start = max(_splits(spans, few, after.overdispersion), default=NO_SPLIT)
        has_changed = z > CHANGED
        if has_changed:
            older, newer = total_of(spans[:start]), total_of(spans[start:])
            # No score compares two texts, except the end of one that was no longer than a window: requests of
            # several kinds take turns like that.  But a text that stopped drafting always has few drafts.
            scores = self._scores_before(newer.drafts, self.pair[1].drafts + drafts.drafts)
            if older.drafts <= window and not (are_probes and self.was_drafted):
                scores = (*scores, _score(older, newer))
            after = replace(self, pair=NO_PAIR, scores=scores[-SCORES:], newest_score=None, was_drafted=False)
            spans, is_mixed = spans[start:], True
        if is_mixed and sum(span.drafts for span in spans[1:]) >= least:
            spans, is_mixed = spans[1:], False
        most = memory * after.overdispersion
        if len(spans) > SPANS:
            spans = (*_merged(spans[: SPANS // 2], most / SPANS * 4), *spans[SPANS // 2 :])
        kept = sum(span.drafts for span in spans)
        while len(spans) > 1 and kept - spans[0].drafts >= most:
            kept -= spans[0].drafts
            spans = spans[1:]
        total = newest = total_of(spans)
        # The fewest newest drafts that can be judged.
        z, start = next(_splits(spans, few, after.overdispersion), NO_SPLIT)
        if z > SUSPECTED:
            newest, has_changed = total_of(spans[start:]), True
        was_drafted = after.was_drafted or not are_probes
        after = replace(
            after, spans=spans, total=total, newest=newest, is_mixed=is_mixed, was_drafted=was_drafted
        )
        return after, has_changed

    def _with_score(self, drafts: SpecDecodeCounters, window: int) -> "Acceptance":
        last, current = self.pair
        current = total_of((current, drafts)) if current.drafts else drafts
        if current.drafts < window:
            return replace(self, pair=(last, current))
        newest, scores = self.newest_score, self.scores
        if last.drafts:
            scores = self._scores_before(0, 0)[-SCORES:]
            newest = _score(last, current)
        return replace(self, pair=(current, NO_DRAFTS), scores=scores, newest_score=newest)

    def _scores_before(self, changed: int, ago: int) -> tuple[float, ...]:
        """The scores of windows before the newest so many drafts; the last window ended `ago` drafts ago."""
        if self.newest_score is None or ago < changed:
            return self.scores
        return (*self.scores, self.newest_score)

    def length(self, k: int) -> Estimate:
        """Acceptance length of K draft tokens."""
        gain = self.gain(k, 0)
        mean = math.exp(gain.mean)
        return Estimate(mean=mean, variance=gain.variance * mean**2)

    def gain(self, k: int, instead_of: int) -> Estimate:
        """Logarithm of AL(K) over that of another K; what both share cancels."""
        if k < instead_of:
            found = self.gain(instead_of, k)
            return Estimate(mean=-found.mean, variance=found.variance)
        total = self.total
        rates = _rates(total, k)
        counts = reached(total)
        base, more = 1.0 + sum(rates[:instead_of]), sum(rates[instead_of:])
        share = more / base
        variance = _variance(rates[instead_of:], counts, k)
        variance += share**2 * _variance(rates[:instead_of], counts, instead_of)
        return Estimate(mean=math.log1p(share), variance=self.overdispersion * variance / (base + more) ** 2)


NO_ACCEPTANCE = Acceptance()


def deepest(counters: SpecDecodeCounters, drafts: float) -> int:
    """The largest number of draft tokens that at least this many drafts had."""
    return sum(count >= drafts for count in reached(counters))


def reached(counters: SpecDecodeCounters) -> tuple[int, ...]:
    """Drafts that had each position, of those positions that both counts have."""
    positions = len(counters.accepted_per_position)
    return (counters.drafted_per_position or (counters.drafts,) * positions)[:positions]


def _rates(counters: SpecDecodeCounters, k: int) -> list[float]:
    """
    Acceptance rate of each of the first K positions.

    One imagined draft, with each position as likely as the one before made it, stands for what is unknown.
    """
    counts = reached(counters)
    rates: list[float] = []
    for position in range(k):
        before = rates[-1] if rates else 1.0
        earlier = rates[-2] if len(rates) > 1 else 1.0
        guess = before**2 / earlier if rates else 0.5
        drafts = counts[position] if position < len(counts) else 0
        accepted = counters.accepted_per_position[position] if drafts > 0 else 0
        rates.append(min(before, max(1e-6, (accepted + guess) / (max(0, drafts) + 1))))
    return rates


def _variance(rates: list[float], counts: tuple[int, ...], k: int) -> float:
    """Variance of the mean number of tokens accepted at some positions, of which K is the last."""
    if not rates:
        return 0.0
    square = sum((2 * position + 1) * rate for position, rate in enumerate(rates))
    drafts = max(0, counts[k - 1]) if k <= len(counts) else 0
    return CORRELATED * max(0.0, square - sum(rates) ** 2) / (drafts + 1)


def _splits(
    spans: tuple[SpecDecodeCounters, ...], least: int, overdispersion: float
) -> Iterator[tuple[float, int]]:
    """
    By how many standard deviations the spans from a place on differ from those before, and that place.

    The latest first, of those with at least so many drafts on both sides.
    """
    total = total_of(spans)
    newer = 0
    counts, accepted = list(reached(total)), list(total.accepted_per_position)
    old, new = (counts, accepted), ([0] * len(counts), [0] * len(accepted))
    for start in range(len(spans) - 1, 0, -1):
        span = spans[start]
        newer += span.drafts
        for kept, moved, added in zip(old, new, (reached(span), span.accepted_per_position), strict=True):
            for position, count in enumerate(added):
                kept[position] -= count
                moved[position] += count
        if newer < least:
            continue
        if total.drafts - newer < least:
            return
        few = max(1, min(newer, total.drafts - newer) // 2)
        yield abs(_z(*old, *new, few, overdispersion)), start


def _score(earlier: SpecDecodeCounters, later: SpecDecodeCounters) -> float:
    few = max(1, min(earlier.drafts, later.drafts) // 2)
    of_earlier, of_later = ((reached(each), each.accepted_per_position) for each in (earlier, later))
    return _z(*of_earlier, *of_later, few, 1.0) ** 2


def _z(
    before: Sequence[int],
    old: Sequence[int],
    after: Sequence[int],
    new: Sequence[int],
    few: int,
    overdispersion: float,
) -> float:
    """
    Difference of acceptance in standard deviations, if both were of one text.

    By position: drafts that had it `before` and `after`, and the `old` and `new` accepted tokens.  Positions
    that fewer than `few` had do not count.
    """
    difference = square = mean = share = 0.0
    for position, (had, has) in enumerate(zip(before, after, strict=True)):
        if had < few or has < few:
            break
        then, now = old[position], new[position]
        difference += now / has - then / had
        rate = (then + now + 0.5) / (had + has + 1)
        square += (2 * position + 1) * rate
        mean += rate
        share = 1 / had + 1 / has
    variance = CORRELATED * overdispersion * max(1e-9, square - mean**2) * share
    return difference / math.sqrt(variance) if variance else 0.0


def total_of(spans: Iterable[SpecDecodeCounters]) -> SpecDecodeCounters:
    """Sum of several spans of one engine."""
    parts = tuple(spans)
    return SpecDecodeCounters(
        drafts=sum([part.drafts for part in parts]),
        draft_tokens=sum([part.draft_tokens for part in parts]),
        accepted_tokens=sum([part.accepted_tokens for part in parts]),
        accepted_per_position=_added([part.accepted_per_position for part in parts]),
        drafted_per_position=_added([part.drafted_per_position for part in parts]),
    )


def _merged(spans: Iterable[SpecDecodeCounters], most: float) -> Iterable[SpecDecodeCounters]:
    """Neighbouring spans together, up to so many drafts."""
    merged: list[SpecDecodeCounters] = []
    for span in spans:
        if merged and merged[-1].drafts + span.drafts <= most:
            merged[-1] = total_of((merged[-1], span))
        else:
            merged.append(span)
    return merged


def _added(positions: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple([sum(counts) for counts in zip(*positions, strict=True)])
