"""
What is remembered of a worker's speculation between two looks at it, and how a look is taken in.

Values only; `appliance.monitor` decides on them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from appliance.speculation.goodput import NO_COSTS, Costs, borrowed, deepest, jump
from appliance.speculation.values import (
    NO_DRAFTS,
    DraftTokenTable,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    bucket_of,
    buckets_up_to,
    draft_tokens_at,
    table_of,
)

WINDOWS_REMEMBERED = 8
"""How many windows long the memory is that small losses are found in."""
SHORT_WINDOW = 2
"""So many times the fewest drafts that give a verdict: what it takes to stop."""
JUMPS_REMEMBERED = 32
"""Pairs of neighbouring short windows from which unlikeness is told."""
LEAST_JUMPS = 12
USUAL_JUMP = 1.323
"""What a quarter of short windows exceed by chance alone: the upper quartile of chi square."""
MOST_UNLIKENESS = 16.0
DIPS_REMEMBERED = 16
ONE_KIND = 2.2
"""Up to which one kind of traffic may seem to differ."""
SHARE_OF_USUAL = 0.2
"""Of the usual gain over 1.0 that must be left, or the draft has collapsed."""
REMEMBERED_FLIPS_SECONDS = 1800.0
"""How long it tells something that speculation was stopped or resumed."""
STANDING = frozenset({Reason.NOT_CONTROLLABLE, Reason.OPERATOR_OVERRIDE, Reason.DRAFT_LINT_FAILED})
"""Reasons that hold whatever is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorPolicy:
    """Sizes in drafts, so that a quiet hour and a busy second weigh the same evidence alike."""

    window_drafts: int
    """Drafts that acceptance is told of; small losses are looked for in eight times as many."""
    min_drafts: int
    """Fewer drafts give no verdict, and it takes twice as many to stop."""
    collapsed_below: float
    """Acceptance length under which drafts are as good as useless."""
    margin: float = 0.03
    """Payoff on either side of break-even in which speculation is neither stopped nor resumed."""
    cooldown_seconds: float = 2.0
    """Least time between two changes of mode."""
    probe_share: float = 0.02
    """Most steps that go into probes and sweeps, after the first ones of each batch bucket."""
    probe_drafts: int = 12
    """Drafts of a first probe: few, so that an engine of 30 steps a second can pay for one in 20 seconds."""
    probe_seconds: float = 5.0
    """From a fallback to the first probe; doubles with each probe that fails."""
    probe_longest_seconds: float = 20.0
    """Most time between two probes of a draft that has paid on this worker before."""
    probe_hopeless_seconds: float = 900.0
    """Likewise of one that never has."""
    hold_longest_seconds: float = 600.0
    """Most time until the first probe where speculation keeps stopping."""
    switch_margin: float = 0.01
    """Gain for which one number of draft tokens is exchanged for another; nothing stops, so a small one."""
    sweep_soonest_seconds: float = 5.0
    """From a sweep to the next as long as costs are not known to within the margin: one sweep of a noisy
    machine can be wrong by a tenth, and the wrong number of draft tokens costs that much for good."""
    sweep_seconds: float = 20.0
    """From a sweep of costs to the next at that batch size once they are; doubles up to the longest."""
    sweep_longest_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What is known of one batch bucket."""

    draft_tokens: int
    costs: Costs = NO_COSTS
    doubts: int = 0
    """Ticks in a row that found no number of draft tokens to pay."""
    sweeps: int = 0
    sweep_at: float = 0.0
    tries: int = 0
    try_at: float = 0.0
    """When a better text may be tried with the most draft tokens again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A probe or sweep under way."""

    parts: tuple[tuple[int, int], ...]
    """Draft tokens and steps of each part."""
    base: EngineReading
    """The reading it started from."""
    recovers: bool
    """Whether it is to find out if speculation pays again; a sweep only measures costs."""

    @property
    def step_count(self) -> int:
        """Steps it takes."""
        return sum(steps for _k, steps in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is remembered of one worker between two ticks, and what it should do now."""

    mode: SpeculationMode
    reason: Reason = Reason.TOO_FEW_DRAFTS
    """Why it is in this mode, or why nothing could be said at this tick."""
    basis: Reason = Reason.TOO_FEW_DRAFTS
    """The reason of the last decision."""
    verdict: Reason | None = None
    """`collapsed` or `below_break_even` while speculation is stopped for it, through all its probes."""
    samples: tuple[SpecDecodeCounters, ...] = ()
    """Readings of drafts, oldest first; the window reaches from the first to the last."""
    history: tuple[SpecDecodeCounters, ...] = ()
    """Readings a window apart, oldest first, for what is too small to be seen in one window."""
    marks: tuple[SpecDecodeCounters, ...] = ()
    """Where the last short window began and ended; one as large as speculation could stop for."""
    jumps: tuple[float, ...] = ()
    """How much each short window differed from the one before, squared, in variances."""
    dip: int = 0
    """Drafts of the short windows that lately looked collapsed, one after the other."""
    dips: tuple[int, ...] = ()
    """Of former ones that ended by themselves, newest last: what looks collapsed now may be no more."""
    last: EngineReading | None = None
    largest_batch: int = 1
    choices: tuple[int, ...] = (0,)
    buckets: Mapping[int, Bucket] = field(default_factory=lambda: MappingProxyType({}))
    probe: Probe | None = None
    starts_probe: bool = False
    """Whether the probe is to be started now."""
    probes_failed: int = 0
    unclear: int = 0
    """Probes in a row that showed too little; each makes the next one larger."""
    next_probe_at: float = 0.0
    hold_seconds: float = 0.0
    """Least time between two probes since speculation last stopped."""
    stopped_for: SpecDecodeCounters = NO_DRAFTS
    """The drafts for which speculation last stopped."""
    probed: tuple[SpecDecodeCounters, ...] = ()
    """What each probe since speculation last stopped drafted, newest last."""
    probed_steps: int = 0
    free_steps: int = 0
    """How many of these were first sweeps, which count for no share."""
    ordered: int | None = None
    """Draft tokens an operator insists on, at every batch size."""
    kept: "Watch | None" = None
    """What had been decided when an operator broke in."""
    draft: str = ""
    """Digest of the draft this is about; empty where the worker never said."""
    has_paid: bool = False
    """Whether speculation with this draft has paid on this worker."""
    usual_length: float | None = None
    """Acceptance length while it paid; what the draft's record promises, until it has paid here."""
    avoid: bool = False
    """Whether other workers should be preferred, because this one cannot be told to stop."""
    since: float = 0.0
    """When the mode last changed."""
    flips: tuple[float, ...] = ()
    """When speculation was stopped or resumed lately."""

    @property
    def window(self) -> SpecDecodeCounters:
        """Counts between the oldest and the newest reading kept."""
        return span(self.samples)

    @property
    def long_window(self) -> SpecDecodeCounters:
        """Counts over several windows."""
        return span((*self.history[:1], *self.samples[-1:]))

    @property
    def windows(self) -> tuple[SpecDecodeCounters, ...]:
        """The windows that the long one consists of, without what has been seen of the next."""
        return tuple(
            difference
            for earlier, later in pairwise(self.history)
            if (difference := later.since(earlier)) is not None
        )

    @property
    def unlikeness(self) -> float:
        """
        So many times more one short window differs from the next than chance would have it.

        Requests of several kinds at once make each of them different; one kind after the other makes
        few, which the upper quartile does not see.  1.0 for all that may well be one kind.
        """
        if len(self.jumps) < LEAST_JUMPS:
            return 1.0
        quartile = sorted(self.jumps)[len(self.jumps) * 3 // 4]
        return 1.0 if quartile <= ONE_KIND * USUAL_JUMP else min(MOST_UNLIKENESS, quartile / USUAL_JUMP)

    def flips_lately(self, now: float) -> tuple[float, ...]:
        """When speculation was stopped or resumed, not too long ago."""
        return tuple(flip for flip in self.flips if now - flip < REMEMBERED_FLIPS_SECONDS)

    def newest(self, drafts: int) -> SpecDecodeCounters | None:
        """Counts of the newest readings that span so many drafts, or None where none do."""
        for counters in (span(tail(self.samples, drafts)), self.long_window):
            if counters.drafts >= drafts:
                return counters
        return None

    @property
    def table(self) -> DraftTokenTable:
        """The draft-token table the worker should follow; empty where none can be set."""
        if self.last is None or not self.last.controllable:
            return ()
        chosen = {bucket: self.draft_tokens(bucket) for bucket in buckets_up_to(self.largest_batch)}
        return table_of(chosen, self.largest_batch)

    def draft_tokens(self, bucket: int) -> int:
        """
        Draft tokens for a batch bucket, probes apart.

        A bucket that was never measured does as the nearest smaller one that was: the larger the
        batch, the less a draft is worth.
        """
        if self.mode is not SpeculationMode.SPECULATIVE:
            return 0
        if self.ordered is not None:
            return self.ordered
        smaller = [known for known in self.buckets if known <= bucket]
        return self.buckets[max(smaller)].draft_tokens if smaller else max(self.choices)

    def costs(self, bucket: int) -> Costs:
        """Costs at a batch bucket, or the nearest one's as a guess."""
        known = {name: entry.costs for name, entry in self.buckets.items() if entry.costs.is_known()}
        if bucket in known:
            return known[bucket]
        if not known:
            return NO_COSTS
        return borrowed(known[min(known, key=lambda name: (abs(name - bucket), name))])


def observe(watch: Watch, reading: EngineReading | None, policy: MonitorPolicy) -> Watch:
    """
    Take one reading's drafts into the window, and decide nothing.

    Args:
        watch: what was known before.
        reading: what the worker says, or None when it could not be asked.
        policy: window size and thresholds.
    """
    if reading is None:
        # A probe that was ordered is not ordered twice.
        return replace(watch, reason=Reason.SCRAPE_FAILED, starts_probe=False)
    counters = reading.drafting
    if watch.last is None or watch.last.epoch != reading.epoch:
        restarted = _adopt(watch, reading)
        return restarted if watch.last is None else replace(restarted, reason=Reason.COUNTER_RESET)
    watch = replace(watch, starts_probe=False)
    if watch.samples and counters.since(watch.samples[-1]) is None:
        reset = replace(watch, samples=(counters,), history=(counters,), probed=(), probe=None)
        return replace(reset, reason=Reason.COUNTER_RESET)
    if not watch.samples or counters != watch.samples[-1]:
        history = watch.history
        if not history or counters.drafts - history[-1].drafts >= policy.window_drafts:
            history = (*history, counters)[-1 - WINDOWS_REMEMBERED :]
        samples = tail((*watch.samples, counters), policy.window_drafts)
        watch = _with_mark(replace(watch, samples=samples, history=history), counters, policy)
    return replace(watch, reason=_shown(watch, policy))


def _with_mark(watch: Watch, counters: SpecDecodeCounters, policy: MonitorPolicy) -> Watch:
    """The watch after another short window, if one has ended; probes are too far apart to be compared."""
    if watch.mode is not SpeculationMode.SPECULATIVE:
        return replace(watch, marks=(), dip=0)
    if watch.marks and counters.drafts - watch.marks[-1].drafts < SHORT_WINDOW * policy.min_drafts:
        return watch
    before = span(watch.marks)
    latest = counters.since(watch.marks[-1]) if watch.marks else None
    marked = replace(watch, marks=(*watch.marks[-1:], counters))
    if latest is None:
        return marked
    seen = jump(before, latest) if before.drafts else None
    jumps = watch.jumps if seen is None else (*watch.jumps, seen)[-JUMPS_REMEMBERED:]
    if latest.acceptance_length < collapse_limit(watch, policy, deepest(latest, policy.min_drafts)):
        return replace(marked, jumps=jumps, dip=watch.dip + latest.drafts)
    dips = (*watch.dips, watch.dip)[-DIPS_REMEMBERED:] if watch.dip else watch.dips
    return replace(marked, jumps=jumps, dip=0, dips=dips)


def collapse_limit(watch: Watch, policy: MonitorPolicy, draft_tokens: int) -> float:
    """
    Acceptance length under which the draft is as good as useless, or nothing like its usual self.

    Args:
        watch: what is known.
        policy: thresholds.
        draft_tokens: how many the drafts in question had, as far as they are judged by.
    """
    if watch.usual_length is None or not watch.has_paid:
        # Told by a record, not seen: it may raise the alarm sooner, and never keep one down.
        return max(policy.collapsed_below, least_promised(watch, draft_tokens))
    usual = watch.usual_length - 1.0
    # A cheap draft may pay with less than what elsewhere is a collapse.
    return max(1.0 + SHARE_OF_USUAL * usual, min(policy.collapsed_below, 1.0 + usual / 2.0))


def least_promised(watch: Watch, draft_tokens: int) -> float:
    """
    Acceptance length under which a draft is not the one its record tells of; 1.0 where none counts.

    A promise for the most draft tokens holds for fewer by their share (`Expectation.at`).
    """
    if watch.has_paid or watch.usual_length is None:
        return 1.0
    share = min(1.0, draft_tokens / max((1, *watch.choices)))
    return 1.0 + SHARE_OF_USUAL * share * (watch.usual_length - 1.0)


def follow(watch: Watch, reading: EngineReading | None, policy: MonitorPolicy) -> Watch:
    """
    What is known by one who looks on while another decides: the worker says what it was told, and why.

    Args:
        watch: what was known before.
        reading: what the worker says, or None when it could not be asked.
        policy: window size and thresholds.
    """
    seen = observe(watch, reading, policy)
    if reading is None:
        return seen
    seen = replace(seen, last=reading, probe=None, buckets=_told(reading))
    if reading.mode is None or reading.reason is None:
        return seen
    return replace(seen, mode=reading.mode, basis=reading.reason, reason=reading.reason)


def _adopt(watch: Watch, reading: EngineReading) -> Watch:
    """
    Start on a new engine, with what its worker was last told to do and what is known of the draft.

    Whoever set a table before us may be gone; the worker kept it, and we go on from there.  An engine with
    another draft starts with what that one's record promises: nothing was learnt of it.
    """
    if watch.draft and reading.draft and reading.draft != watch.draft:
        watch = Watch(mode=watch.mode, since=watch.since)
    if reading.controllable and reading.reason is Reason.OPERATOR_OVERRIDE and reading.mode is not None:
        # If it is still in force it is found again; if not, the next decision resumes from here.
        return _fresh(watch, reading, reading.mode, Reason.OPERATOR_OVERRIDE, None)
    stopped = reading.controllable and reading.mode in {SpeculationMode.TARGET_ONLY, SpeculationMode.PROBING}
    mode = watch.mode if not reading.controllable else SpeculationMode.SPECULATIVE
    verdict = None
    if stopped:
        mode = SpeculationMode.TARGET_ONLY
        verdict = Reason.BELOW_BREAK_EVEN if reading.reason is Reason.BELOW_BREAK_EVEN else Reason.COLLAPSED
    basis = verdict or (Reason.TOO_FEW_DRAFTS if reading.controllable else Reason.NOT_CONTROLLABLE)
    return _fresh(watch, reading, mode, basis, verdict)


def _fresh(
    watch: Watch, reading: EngineReading, mode: SpeculationMode, basis: Reason, verdict: Reason | None
) -> Watch:
    return Watch(
        mode=mode,
        reason=basis,
        basis=basis,
        verdict=verdict,
        samples=(reading.drafting,),
        history=(reading.drafting,),
        last=reading,
        largest_batch=reading.largest_batch,
        choices=reading.choices,
        buckets=_told(reading),
        draft=reading.draft or watch.draft,
        has_paid=watch.has_paid,
        usual_length=watch.usual_length if watch.has_paid else reading.expected_length,
        jumps=watch.jumps,
        dips=watch.dips,
        since=watch.since,
        flips=watch.flips,
    )


def _told(reading: EngineReading) -> Mapping[int, Bucket]:
    """The draft tokens that a worker was told to use at each batch size, if anybody told it."""
    if not reading.controllable or reading.mode is not SpeculationMode.SPECULATIVE:
        return MappingProxyType({})
    starts = {bucket_of(first) for first, _last, _k in reading.table}
    return MappingProxyType(
        {bucket: Bucket(draft_tokens=draft_tokens_at(reading.table, bucket)) for bucket in starts}
    )


def span(samples: tuple[SpecDecodeCounters, ...]) -> SpecDecodeCounters:
    """Counts between the first and the last of some readings."""
    if len(samples) < 2:  # noqa: PLR2004 - a difference needs two
        return NO_DRAFTS
    return samples[-1].since(samples[0]) or NO_DRAFTS


def tail(samples: tuple[SpecDecodeCounters, ...], drafts: int) -> tuple[SpecDecodeCounters, ...]:
    """The fewest newest readings that still span so many drafts; all of them if none do."""
    if len(samples) <= 2:  # noqa: PLR2004 - fewer span nothing
        return samples
    enough = bisect_right(samples, samples[-1].drafts - drafts, key=lambda sample: sample.drafts)
    return samples[max(0, min(enough - 1, len(samples) - 2)) :]


def joined(parts: Iterable[SpecDecodeCounters]) -> SpecDecodeCounters:
    """Counts of several spans of one engine together."""
    spans = tuple(parts)
    return SpecDecodeCounters(
        drafts=sum(part.drafts for part in spans),
        draft_tokens=sum(part.draft_tokens for part in spans),
        accepted_tokens=sum(part.accepted_tokens for part in spans),
        accepted_per_position=_added(part.accepted_per_position for part in spans),
        drafted_per_position=_added(part.drafted_per_position for part in spans),
    )


def _added(positions: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(counts) for counts in zip(*positions, strict=True))


def _shown(watch: Watch, policy: MonitorPolicy) -> Reason:
    """The reason as of this tick: while drafting, whether enough was seen to say anything."""
    if watch.mode is not SpeculationMode.SPECULATIVE or watch.basis in STANDING:
        return watch.basis
    if watch.window.drafts < policy.min_drafts:
        return Reason.TOO_FEW_DRAFTS
    if watch.basis is Reason.RECOVERED and watch.window.drafts < policy.window_drafts:
        return Reason.RECOVERED
    return Reason.HEALTHY
