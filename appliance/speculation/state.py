"""
The monitor's memory of one worker, and how a reading updates it.

Values only.  `appliance.monitor` decides on them; the control loop holds one `MonitorState` for each worker.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from appliance.speculation.goodput import (
    NO_COSTS,
    Costs,
    SpeculationFigures,
    costs_at,
    deepest,
    squared_z_score,
)
from appliance.speculation.values import (
    NO_DRAFTS,
    Decision,
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

WINDOWS_KEPT = 8
"""Length of the long window, in windows; small losses are found in it."""
SHORT_WINDOW = 2
"""Length of a short window, in multiples of `min_drafts`: the drafts it takes to stop speculation."""
Z_SCORES_KEPT = 32
"""Pairs of neighbouring short windows that overdispersion is computed from."""
MINIMUM_Z_SCORES = 12
CHI_SQUARE_UPPER_QUARTILE = 1.323
"""A quarter of squared z-scores exceed this by chance alone (one degree of freedom)."""
MAXIMUM_OVERDISPERSION = 16.0
OVERDISPERSION_OF_ONE_KIND = 2.2
"""Overdispersion up to which traffic may be of one kind."""
DIPS_KEPT = 16
COLLAPSE_SHARE = 0.2
"""Share of the baseline's gain over 1.0 under which the draft has collapsed."""
FLIPS_KEPT_SECONDS = 1800.0
"""How long a stop or a resumption of speculation counts as recent."""
UNCONDITIONAL_REASONS = frozenset(
    {Reason.NOT_CONTROLLABLE, Reason.OPERATOR_OVERRIDE, Reason.DRAFT_LINT_FAILED}
)
"""Reasons that hold whatever is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorPolicy:
    """Sizes are in drafts, so that a quiet hour and a busy second weigh the same evidence alike."""

    window_drafts: int
    """Drafts in the window of acceptance; the long window has eight times as many."""
    min_drafts: int
    """Fewer drafts give no verdict; it takes twice as many to stop."""
    collapsed_below: float
    """Acceptance length under which drafts are as good as useless."""
    margin: float = 0.03
    """Payoff on either side of break-even in which speculation is neither stopped nor resumed."""
    cooldown_seconds: float = 2.0
    """Minimum time between two changes of mode."""
    probe_share: float = 0.02
    """Maximum share of steps in probes and sweeps, after the first ones of each batch bucket."""
    probe_drafts: int = 12
    """Drafts of a first probe: few, so that an engine of 30 steps a second has the budget in 20 seconds."""
    probe_seconds: float = 5.0
    """From a fallback to the first probe; doubles with each probe that fails."""
    probe_longest_seconds: float = 20.0
    """Maximum time between two probes of a draft that has paid on this worker before."""
    probe_hopeless_seconds: float = 900.0
    """Likewise of a draft that never has."""
    hold_longest_seconds: float = 600.0
    """Maximum time until the first probe if speculation stops repeatedly."""
    switch_margin: float = 0.01
    """Gain for which one number of draft tokens replaces another; small, because nothing stops."""
    sweep_soonest_seconds: float = 5.0
    """Time between sweeps until costs are known to within the margin: one sweep of a noisy machine can be
    wrong by a tenth, and the wrong number of draft tokens costs that much for good."""
    sweep_seconds: float = 20.0
    """Time from a sweep to the next at that batch size once they are; doubles up to the maximum."""
    sweep_longest_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What the monitor knows of one batch bucket."""

    draft_tokens: int
    costs: Costs = NO_COSTS
    doubts: int = 0
    """Consecutive ticks at which no number of draft tokens paid."""
    sweeps: int = 0
    sweep_at: float = 0.0
    tries: int = 0
    try_at: float = 0.0
    """Earliest time to try the maximum of draft tokens on a better text again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A probe or sweep in flight."""

    parts: tuple[tuple[int, int], ...]
    """Draft tokens and steps of each part."""
    base: EngineReading
    """The reading it started from."""
    recovers: bool
    """Whether it tests if speculation pays again; a sweep only measures costs."""

    @property
    def step_count(self) -> int:
        return sum(steps for _k, steps in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """The monitor's memory of one worker, from one tick to the next, with what it decided last."""

    mode: SpeculationMode
    reason: Reason = Reason.TOO_FEW_DRAFTS
    """Why the worker is in this mode, or why this tick gave no evidence."""
    basis: Reason = Reason.TOO_FEW_DRAFTS
    """The reason of the last decision."""
    verdict: Reason | None = None
    """`collapsed` or `below_break_even` while speculation is stopped for it, through all its probes."""
    samples: tuple[SpecDecodeCounters, ...] = ()
    """Readings of drafts, oldest first; the window reaches from the first to the last."""
    history: tuple[SpecDecodeCounters, ...] = ()
    """Readings a window apart, oldest first: the long window, for losses too small for one window."""
    marks: tuple[SpecDecodeCounters, ...] = ()
    """Start and end of the last short window."""
    squared_z_scores: tuple[float, ...] = ()
    """Of each short window against the one before."""
    dip: int = 0
    """Drafts of the latest consecutive short windows under the collapse limit."""
    dips: tuple[int, ...] = ()
    """Drafts of earlier dips that ended without a stop, newest last: the current one may be no more."""
    last: EngineReading | None = None
    largest_batch: int = 1
    choices: tuple[int, ...] = (0,)
    buckets: Mapping[int, Bucket] = field(default_factory=lambda: MappingProxyType({}))
    probe: Probe | None = None
    starts_probe: bool = False
    """Whether the worker has to start the probe now."""
    probes_failed: int = 0
    unclear: int = 0
    """Consecutive probes with too little evidence; each makes the next one larger."""
    next_probe_at: float = 0.0
    hold_seconds: float = 0.0
    """Minimum time between two probes since speculation last stopped."""
    stopped_for: SpecDecodeCounters = NO_DRAFTS
    """The drafts for which speculation last stopped."""
    probed: tuple[SpecDecodeCounters, ...] = ()
    """The drafts of each probe since speculation last stopped, newest last."""
    probed_steps: int = 0
    free_steps: int = 0
    """Those of first sweeps, which do not count against the budget."""
    override_draft_tokens: int | None = None
    """Draft tokens of the operator's override, at every batch size."""
    before_override: "MonitorState | None" = None
    draft: str = ""
    """Digest of the draft; empty if the worker never reported it."""
    has_paid: bool = False
    """Whether speculation with this draft has paid on this worker."""
    baseline_length: float | None = None
    """Acceptance length while it paid; until it has paid, the length that the draft's record promises."""
    avoid: bool = False
    """Whether the router should prefer other workers, because this one cannot be controlled."""
    since: float = 0.0
    """When the mode last changed."""
    flips: tuple[float, ...] = ()
    """When speculation recently stopped or resumed."""

    @property
    def window(self) -> SpecDecodeCounters:
        """Counts between the oldest and the newest sample."""
        return span(self.samples)

    @property
    def long_window(self) -> SpecDecodeCounters:
        return span((*self.history[:1], *self.samples[-1:]))

    @property
    def windows(self) -> tuple[SpecDecodeCounters, ...]:
        """The complete windows of the long window."""
        return tuple(
            difference
            for earlier, later in pairwise(self.history)
            if (difference := later.since(earlier)) is not None
        )

    @property
    def overdispersion(self) -> float:
        """
        How many times more one short window differs from the next than by chance.

        Requests of several kinds at once make every window differ; one kind after the other makes few
        differ, which the upper quartile ignores.  1.0 if the traffic may be of one kind.
        """
        scores = self.squared_z_scores
        if len(scores) < MINIMUM_Z_SCORES:
            return 1.0
        ratio = sorted(scores)[len(scores) * 3 // 4] / CHI_SQUARE_UPPER_QUARTILE
        return 1.0 if ratio <= OVERDISPERSION_OF_ONE_KIND else min(MAXIMUM_OVERDISPERSION, ratio)

    def recent_flips(self, now: float) -> tuple[float, ...]:
        return tuple(flip for flip in self.flips if now - flip < FLIPS_KEPT_SECONDS)

    def newest(self, drafts: int) -> SpecDecodeCounters | None:
        """Counts of the newest readings that span this many drafts, or None if none do."""
        for counters in (span(tail(self.samples, drafts)), self.long_window):
            if counters.drafts >= drafts:
                return counters
        return None

    @property
    def table(self) -> DraftTokenTable:
        """The draft-token table for the worker; empty if it cannot be set."""
        if self.last is None or not self.last.controllable:
            return ()
        chosen = {bucket: self.draft_tokens(bucket) for bucket in buckets_up_to(self.largest_batch)}
        return table_of(chosen, self.largest_batch)

    def draft_tokens(self, bucket: int) -> int:
        """
        Draft tokens for a batch bucket, probes apart.

        A bucket that was never measured takes those of the nearest smaller one that was: the larger the
        batch, the less a draft is worth.
        """
        if self.mode is not SpeculationMode.SPECULATIVE:
            return 0
        if self.override_draft_tokens is not None:
            return self.override_draft_tokens
        smaller = [known for known in self.buckets if known <= bucket]
        return self.buckets[max(smaller)].draft_tokens if smaller else max(self.choices)

    def costs(self, bucket: int) -> Costs:
        """Costs at a batch bucket, or the nearest one's as a guess."""
        return costs_at({name: entry.costs for name, entry in self.buckets.items()}, bucket)

    @property
    def decision(self) -> Decision:
        return Decision(
            mode=self.mode,
            reason=self.reason,
            basis=self.basis,
            verdict=self.verdict,
            table=self.table,
            probe=self.probe.parts if self.probe is not None else (),
            starts_probe=self.starts_probe,
            avoid=self.avoid,
        )

    @property
    def figures(self) -> SpeculationFigures:
        is_waiting = self.verdict is not None or any(
            not entry.draft_tokens for entry in self.buckets.values()
        )
        return SpeculationFigures(
            window=self.window,
            since=self.since,
            choices=self.choices,
            draft_tokens=MappingProxyType({bucket: self.draft_tokens(bucket) for bucket in self.buckets}),
            costs=MappingProxyType({bucket: entry.costs for bucket, entry in self.buckets.items()}),
            probes_failed=self.probes_failed,
            probed_steps=self.probed_steps,
            next_probe_at=self.next_probe_at if is_waiting else None,
        )


def observe(state: MonitorState, reading: EngineReading | None, policy: MonitorPolicy) -> MonitorState:
    """Add one reading's drafts to the windows; None if the worker did not answer.  Decides nothing."""
    if reading is None:
        # A probe that was started is not started twice.
        return replace(state, reason=Reason.SCRAPE_FAILED, starts_probe=False)
    counters = reading.drafting
    if state.last is None or state.last.epoch != reading.epoch:
        restarted = _adopt(state, reading)
        return restarted if state.last is None else replace(restarted, reason=Reason.COUNTER_RESET)
    state = replace(state, starts_probe=False)
    if state.samples and counters.since(state.samples[-1]) is None:
        reset = replace(state, samples=(counters,), history=(counters,), probed=(), probe=None)
        return replace(reset, reason=Reason.COUNTER_RESET)
    if not state.samples or counters != state.samples[-1]:
        history = state.history
        if not history or counters.drafts - history[-1].drafts >= policy.window_drafts:
            history = (*history, counters)[-1 - WINDOWS_KEPT :]
        samples = tail((*state.samples, counters), policy.window_drafts)
        state = _with_mark(replace(state, samples=samples, history=history), counters, policy)
    return replace(state, reason=_current_reason(state, policy))


def _with_mark(state: MonitorState, counters: SpecDecodeCounters, policy: MonitorPolicy) -> MonitorState:
    """The state after another short window, if one has ended; probes are too far apart to be compared."""
    if state.mode is not SpeculationMode.SPECULATIVE:
        return replace(state, marks=(), dip=0)
    if state.marks and counters.drafts - state.marks[-1].drafts < SHORT_WINDOW * policy.min_drafts:
        return state
    before = span(state.marks)
    latest = counters.since(state.marks[-1]) if state.marks else None
    marked = replace(state, marks=(*state.marks[-1:], counters))
    if latest is None:
        return marked
    score = squared_z_score(before, latest) if before.drafts else None
    scores = state.squared_z_scores if score is None else (*state.squared_z_scores, score)[-Z_SCORES_KEPT:]
    marked = replace(marked, squared_z_scores=scores)
    if latest.acceptance_length < collapse_limit(state, policy, deepest(latest, policy.min_drafts)):
        return replace(marked, dip=state.dip + latest.drafts)
    dips = (*state.dips, state.dip)[-DIPS_KEPT:] if state.dip else state.dips
    return replace(marked, dip=0, dips=dips)


def collapse_limit(state: MonitorState, policy: MonitorPolicy, draft_tokens: int) -> float:
    """Acceptance length of drafts of this many tokens under which the draft has collapsed."""
    if state.baseline_length is None or not state.has_paid:
        # A record's promise is not a measurement: it may raise the alarm sooner, and never suppress one.
        return max(policy.collapsed_below, minimum_promised_length(state, draft_tokens))
    baseline = state.baseline_length - 1.0
    # A cheap draft may pay with less than what elsewhere is a collapse.
    return max(1.0 + COLLAPSE_SHARE * baseline, min(policy.collapsed_below, 1.0 + baseline / 2.0))


def minimum_promised_length(state: MonitorState, draft_tokens: int) -> float:
    """
    Acceptance length under which the draft contradicts its record; 1.0 without a record.

    A promise for the most draft tokens holds for fewer by their share (`Expectation.at`).
    """
    if state.has_paid or state.baseline_length is None:
        return 1.0
    share = min(1.0, draft_tokens / max((1, *state.choices)))
    return 1.0 + COLLAPSE_SHARE * share * (state.baseline_length - 1.0)


def follow(state: MonitorState, reading: EngineReading) -> MonitorState:
    """The state with the mode and table that another gateway commanded, as the worker reports them."""
    state = replace(state, last=reading, probe=None, buckets=_buckets_in_table(reading))
    if reading.mode is None or reading.reason is None:
        return state
    return replace(state, mode=reading.mode, basis=reading.reason, reason=reading.reason)


def _adopt(state: MonitorState, reading: EngineReading) -> MonitorState:
    """
    Start on a new engine, with what its worker was last commanded and what is known of the draft.

    The gateway that set the worker's table may be gone; the worker kept it, and this gateway continues.
    An engine with another draft starts with what that one's record promises: nothing was measured of it.
    """
    if state.draft and reading.draft and reading.draft != state.draft:
        state = MonitorState(mode=state.mode, since=state.since)
    if reading.controllable and reading.reason is Reason.OPERATOR_OVERRIDE and reading.mode is not None:
        # If it is still in force it is found again; if not, the next decision resumes from here.
        return _fresh(state, reading, reading.mode, Reason.OPERATOR_OVERRIDE, None)
    stopped = reading.controllable and reading.mode in {SpeculationMode.TARGET_ONLY, SpeculationMode.PROBING}
    mode = state.mode if not reading.controllable else SpeculationMode.SPECULATIVE
    verdict = None
    if stopped:
        mode = SpeculationMode.TARGET_ONLY
        verdict = Reason.BELOW_BREAK_EVEN if reading.reason is Reason.BELOW_BREAK_EVEN else Reason.COLLAPSED
    basis = verdict or (Reason.TOO_FEW_DRAFTS if reading.controllable else Reason.NOT_CONTROLLABLE)
    return _fresh(state, reading, mode, basis, verdict)


def _fresh(
    state: MonitorState, reading: EngineReading, mode: SpeculationMode, basis: Reason, verdict: Reason | None
) -> MonitorState:
    return MonitorState(
        mode=mode,
        reason=basis,
        basis=basis,
        verdict=verdict,
        samples=(reading.drafting,),
        history=(reading.drafting,),
        last=reading,
        largest_batch=reading.largest_batch,
        choices=reading.choices,
        buckets=_buckets_in_table(reading),
        draft=reading.draft or state.draft,
        has_paid=state.has_paid,
        baseline_length=state.baseline_length if state.has_paid else reading.expected_length,
        squared_z_scores=state.squared_z_scores,
        dips=state.dips,
        since=state.since,
        flips=state.flips,
    )


def _buckets_in_table(reading: EngineReading) -> Mapping[int, Bucket]:
    """The draft tokens at each batch size of the table that a gateway set; empty if none did."""
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
    """The fewest newest readings that span this many drafts; all of them if none do."""
    if len(samples) <= 2:  # noqa: PLR2004 - fewer span nothing
        return samples
    enough = bisect_right(samples, samples[-1].drafts - drafts, key=lambda sample: sample.drafts)
    return samples[max(0, min(enough - 1, len(samples) - 2)) :]


def total_of(spans: Iterable[SpecDecodeCounters]) -> SpecDecodeCounters:
    """Sum of several spans of one engine."""
    parts = tuple(spans)
    return SpecDecodeCounters(
        drafts=sum(part.drafts for part in parts),
        draft_tokens=sum(part.draft_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
        accepted_per_position=_added(part.accepted_per_position for part in parts),
        drafted_per_position=_added(part.drafted_per_position for part in parts),
    )


def _added(positions: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(counts) for counts in zip(*positions, strict=True))


def _current_reason(state: MonitorState, policy: MonitorPolicy) -> Reason:
    """The reason as of this tick: in speculative mode, whether there is enough evidence."""
    if state.mode is not SpeculationMode.SPECULATIVE or state.basis in UNCONDITIONAL_REASONS:
        return state.basis
    if state.window.drafts < policy.min_drafts:
        return Reason.TOO_FEW_DRAFTS
    if state.basis is Reason.RECOVERED and state.window.drafts < policy.window_drafts:
        return Reason.RECOVERED
    return Reason.HEALTHY
