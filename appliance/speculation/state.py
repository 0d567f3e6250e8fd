"""
The monitor's memory of one worker, and how a reading updates it.

Values only.  `appliance.monitor` decides on them; the control loop holds one `MonitorState` for each worker.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.speculation.costs import AGE_OF_TEXT, NO_MEASUREMENT, CostModel
from appliance.speculation.evidence import NO_ACCEPTANCE, Acceptance
from appliance.speculation.goodput import Estimate
from appliance.speculation.values import (
    NO_STEPS,
    SETTLE_SECONDS,
    Decision,
    DraftTokenTable,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    StepCounters,
    buckets_up_to,
    draft_tokens_at,
    table_of,
)

BUDGET_SECONDS = 600.0
"""Engine time over which the price of exploration is averaged."""
LOAN_SECONDS = 60.0
"""Engine time whose earnings the bank may lend."""
MOST_REPAID = 0.35
"""Share of its earnings with which the bank repays at most: the rest notices that a text has returned."""
COLLAPSE_SHARE = 0.2
"""Share of the gain over 1.0 that the draft's record promises under which the draft has collapsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorPolicy:
    """Evidence is counted in drafts, so that a quiet hour and a busy second weigh alike."""

    min_drafts: int
    """Drafts; fewer give no verdict."""
    collapsed_below: float
    """Acceptance length under which drafts are as good as useless."""
    exploration_share: float = 0.01
    """Share of engine time that steps with another number of draft tokens may cost."""
    memory_drafts: int = 3200
    """Effective drafts of the present text that are kept: its acceptance length is known to 1 or 2 %."""
    sure: float = 2.0
    """Standard deviations of a gain that it takes to switch: one switch in fifty is for nothing."""
    switch_gain: float = 0.02
    """Share of tokens per second; less is not worth a switch."""
    recent_seconds: float = 10.0
    """Time that the batch bucket in use, a mode without a new table, and borrowing refer to."""
    cost_spread: float = 0.4
    """Standard deviation of log S(K)/S(0) where it was never measured; gained again in a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFigures:
    """What the control loop measured of one worker, for those who show or count it."""

    acceptance: Acceptance = NO_ACCEPTANCE
    costs: CostModel = NO_MEASUREMENT
    since: float = 0.0
    """Monotonic time of the last change of mode."""
    choices: tuple[int, ...] = (0,)
    draft_tokens: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Draft tokens in force, by measured batch bucket."""
    probed_steps: int = 0
    exploration_share: float = 0.0
    """Share of engine time that exploration cost by expectation, over about ten minutes."""

    @property
    def window(self) -> SpecDecodeCounters:
        """The drafts of the present text."""
        return self.acceptance.total


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """The monitor's memory of one worker, from one tick to the next, with what it decided last."""

    mode: SpeculationMode
    reason: Reason = Reason.TOO_FEW_DRAFTS
    """Why the worker is in this mode, or why this tick gave no evidence."""
    basis: Reason = Reason.TOO_FEW_DRAFTS
    """The reason of the mode."""
    acceptance: Acceptance = NO_ACCEPTANCE
    costs: CostModel = NO_MEASUREMENT
    choice: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Draft tokens by batch bucket."""
    use: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Recent engine seconds by batch bucket."""
    bucket: int | None = None
    """The batch bucket of most engine time since the reading before; None without steps."""
    step_seconds: float = 0.0
    """Mean seconds of a step, when there were steps last."""
    last: EngineReading | None = None
    base: EngineReading | None = None
    """The last reading without a probe in flight: steps since then are compared."""
    largest_batch: int = 1
    choices: tuple[int, ...] = (0,)
    probe: tuple[tuple[int, int], ...] = ()
    """Draft tokens and steps of each part of the probe in flight; empty if there is none."""
    starts_probe: bool = False
    """Whether the worker has to start the probe now."""
    probes: int = 0
    probed_steps: int = 0
    bank: float = 0.0
    """Engine seconds that exploration may cost now; never negative."""
    debt: float = 0.0
    """Engine seconds that it cost beyond them, not yet repaid."""
    catch_up: float = 0.0
    """Engine seconds of the last probe in which the draft caught up."""
    engine_seconds: float = 0.0
    """Of about the last ten minutes, and those that exploration cost."""
    lost_seconds: float = 0.0
    suspected_at: float = -math.inf
    """When a change of traffic was last suspected."""
    differs_since: float | None = None
    """Since when the batch size in use has been in another mode than this; None if it is not."""
    override_draft_tokens: int | None = None
    """Draft tokens of the operator's override, at every batch size."""
    expected_length: float | None = None
    """Minimum acceptance length that the draft's record promises for the most draft tokens."""
    avoid: bool = False
    """Whether the router should prefer other workers, because this one cannot be controlled."""
    judged_from: float = 0.0
    """When the evidence of a worker that cannot be controlled began."""
    retry_at: float | None = None
    """When such a worker is tried again; None if its drafts have not collapsed."""
    since: float = 0.0
    """When the mode last changed."""

    @property
    def table(self) -> DraftTokenTable:
        """The draft-token table for the worker; empty if it cannot be set."""
        if self.last is None or not self.last.controllable:
            return ()
        chosen = {bucket: self.draft_tokens(bucket) for bucket in buckets_up_to(self.largest_batch)}
        return table_of(chosen, self.largest_batch)

    def draft_tokens(self, bucket: int) -> int:
        """Draft tokens for a batch bucket, probes apart."""
        if self.override_draft_tokens is not None:
            return self.override_draft_tokens
        return self.choice.get(bucket, max(self.choices))

    @property
    def bucket_in_use(self) -> int | None:
        """The batch bucket of most recent engine time."""
        return max(self.use, key=self.use.__getitem__, default=None)

    def promised_gain(self, bucket: int, k: int, instead_of: int, now: float) -> Estimate:
        """Logarithm of the tokens per second with K draft tokens over those with another, by `newest`."""
        length = replace(self.acceptance, total=self.acceptance.newest).gain(k, instead_of)
        return length.minus(self.costs.ratio(bucket, k, instead_of, now))

    @property
    def verdict(self) -> Reason | None:
        """Why drafting does not pay; that of a worker that cannot be controlled holds while it is retried."""
        if self.basis is Reason.NOT_CONTROLLABLE:
            return Reason.COLLAPSED if self.retry_at is not None else None
        return self.basis if self.basis in {Reason.COLLAPSED, Reason.BELOW_BREAK_EVEN} else None

    def in_mode(self, mode: SpeculationMode, basis: Reason, now: float) -> "MonitorState":
        since = self.since if mode is self.mode else now
        return replace(self, mode=mode, basis=basis, since=since, differs_since=None)

    @property
    def decision(self) -> Decision:
        return Decision(
            mode=self.mode,
            reason=self.reason,
            basis=self.basis,
            verdict=self.verdict,
            table=self.table,
            probe=self.probe,
            starts_probe=self.starts_probe,
            avoid=self.avoid,
        )

    @property
    def figures(self) -> SpeculationFigures:
        measured = sorted(self.costs.seconds_per_token)
        return SpeculationFigures(
            acceptance=self.acceptance,
            costs=self.costs,
            since=self.since,
            choices=self.choices,
            draft_tokens=MappingProxyType({bucket: self.draft_tokens(bucket) for bucket in measured}),
            probed_steps=self.probed_steps,
            exploration_share=self.lost_seconds / self.engine_seconds if self.engine_seconds else 0.0,
        )


def observe(
    state: MonitorState, reading: EngineReading | None, policy: MonitorPolicy, now: float
) -> MonitorState:
    """Add what one reading measured; None if the worker did not answer.  Decides nothing."""
    if reading is None:
        # A probe that was started is not started twice.
        return replace(state, reason=Reason.SCRAPE_FAILED, starts_probe=False)
    if state.last is None or state.last.epoch != reading.epoch:
        return _adopt(state, reading, policy, now)
    drafts = reading.drafting.since(state.last.drafting)
    state = replace(state, last=reading, starts_probe=False, bucket=None, reason=state.basis)
    if drafts is None:
        fresh = Acceptance(scores=state.acceptance.scores)
        return replace(state, acceptance=fresh, base=reading, probe=(), reason=Reason.COUNTER_RESET)
    acceptance, has_changed = state.acceptance.counted(
        drafts,
        memory=policy.memory_drafts,
        least=policy.min_drafts,
        are_probes=state.mode is SpeculationMode.TARGET_ONLY,
    )
    if has_changed:
        state = replace(state, suspected_at=now)
        if acceptance.newest is acceptance.total:  # it is no suspicion
            state = replace(state, costs=replace(state.costs, at=state.costs.at - AGE_OF_TEXT))
    state = replace(state, acceptance=acceptance)
    return state if reading.is_probing else _with_steps(state, reading, policy, now)


def _with_steps(
    state: MonitorState, reading: EngineReading, policy: MonitorPolicy, now: float
) -> MonitorState:
    """Add the steps since the last reading without a probe, and end the probe."""
    assert state.base is not None  # noqa: S101 - set by `_adopt`
    spans: dict[int, dict[int, StepCounters]] = {}
    for (bucket, k), counters in reading.steps.items():
        taken = counters.since(state.base.steps.get((bucket, k), NO_STEPS))
        if taken.steps > 0 and taken.seconds > 0:
            spans.setdefault(bucket, {})[k] = taken
    seconds = {bucket: sum(each.seconds for each in steps.values()) for bucket, steps in spans.items()}
    busy = measured = sum(seconds.values())
    if reading.busy_seconds is not None and state.base.busy_seconds is not None:
        busy = max(measured, reading.busy_seconds - state.base.busy_seconds)
    step_count = reading.step_count - state.base.step_count
    if not measured or step_count <= 0:
        return replace(state, base=reading, probe=())
    busiest = max(seconds, key=seconds.__getitem__)
    costs = state.costs
    for bucket, steps in spans.items():
        costs = costs.measured(bucket, steps, now)
    lost = catch_up = 0.0
    if state.probe:
        catch_up = reading.catch_up_seconds - state.base.catch_up_seconds
        lost = catch_up + _lost(replace(state, costs=costs), spans, now)
    weight = math.exp(-busy / BUDGET_SECONDS)
    recent = math.exp(-busy / policy.recent_seconds)
    earned = policy.exploration_share * busy
    loan = policy.exploration_share * LOAN_SECONDS
    repaid = min(state.debt, earned * min(MOST_REPAID, state.debt / (state.debt + loan)))
    bank = state.bank + earned - repaid - lost
    return replace(
        state,
        base=reading,
        probe=(),
        costs=costs,
        bucket=busiest,
        suspected_at=state.suspected_at if state.costs.is_measured(busiest) else now,
        use=MappingProxyType(
            {
                bucket: state.use.get(bucket, 0.0) * recent + seconds.get(bucket, 0.0)
                for bucket in {**state.use, **seconds}
            }
        ),
        step_seconds=busy / step_count,
        bank=min(policy.exploration_share * BUDGET_SECONDS, max(0.0, bank)),
        debt=state.debt - repaid + max(0.0, -bank),
        catch_up=catch_up or state.catch_up,
        engine_seconds=state.engine_seconds * weight + busy,
        lost_seconds=state.lost_seconds * weight + lost,
    )


def _lost(state: MonitorState, spans: Mapping[int, Mapping[int, StepCounters]], now: float) -> float:
    """Expected engine seconds that the probe cost: those in which the table would have given as much."""
    lost = 0.0
    parts = Counter(k for k, _steps in state.probe)
    for bucket, steps in spans.items():
        current = state.draft_tokens(bucket)
        for k, taken in steps.items():
            if k != current:
                # Not all steps of a part are measured; the first that drafts again catches up.
                unmeasured = int(SETTLE_SECONDS / taken.seconds_per_step) + (1 if current else 0)
                seconds = taken.seconds + parts[k] * unmeasured * taken.seconds_per_step
                lost -= seconds * min(0.0, math.expm1(state.promised_gain(bucket, k, current, now).mean))
    return lost


def collapse_limit(state: MonitorState, policy: MonitorPolicy, draft_tokens: int) -> float:
    """
    Acceptance length of drafts of this many tokens under which the draft has collapsed.

    A record may raise the alarm sooner, and never suppress one.  Its promise for the most draft tokens
    holds for fewer by their share (`Expectation.at`).
    """
    if state.expected_length is None:
        return policy.collapsed_below
    share = min(1.0, draft_tokens / max((1, *state.choices)))
    return max(policy.collapsed_below, 1.0 + COLLAPSE_SHARE * share * (state.expected_length - 1.0))


def follow(state: MonitorState, reading: EngineReading) -> MonitorState:
    """The state with the mode and table that another gateway commanded, as the worker reports them."""
    state = replace(state, probe=(), override_draft_tokens=None, choice=_choice_of(reading))
    if reading.mode is None or reading.reason is None:
        return state
    return replace(state, mode=reading.mode, basis=reading.reason, reason=reading.reason)


def _adopt(state: MonitorState, reading: EngineReading, policy: MonitorPolicy, now: float) -> MonitorState:
    """
    Start on a new engine, with what its worker was last commanded.

    The gateway that set the worker's table may be gone; the worker kept it, and this gateway continues.  How
    much requests differ is kept: the next engine gets the same traffic.
    """
    mode, basis = state.mode, Reason.NOT_CONTROLLABLE
    if reading.controllable:
        mode, basis = reading.mode or SpeculationMode.SPECULATIVE, Reason.TOO_FEW_DRAFTS
        if reading.reason is Reason.OPERATOR_OVERRIDE:
            # If it is still in force it is found again; if not, the next decision resumes from here.
            basis = Reason.OPERATOR_OVERRIDE
        elif mode is SpeculationMode.TARGET_ONLY:
            is_collapsed = reading.reason is Reason.COLLAPSED
            basis = Reason.COLLAPSED if is_collapsed else Reason.BELOW_BREAK_EVEN
    return MonitorState(
        mode=mode,
        reason=basis if state.last is None else Reason.COUNTER_RESET,
        basis=basis,
        acceptance=Acceptance(scores=state.acceptance.scores),
        costs=CostModel.unmeasured(
            reading.largest_batch, reading.choices, spread=policy.cost_spread, now=now
        ),
        choice=_choice_of(reading),
        last=reading,
        base=reading,
        largest_batch=reading.largest_batch,
        choices=reading.choices,
        bank=state.bank,
        debt=state.debt,
        expected_length=reading.expected_length,
        judged_from=now,
        since=state.since,
    )


def _choice_of(reading: EngineReading) -> Mapping[int, int]:
    """The draft tokens of the table that a gateway set; the most at every batch size if none did."""
    most = ((1, reading.largest_batch, max(reading.choices)),)
    table = reading.table if reading.mode is not None else most
    buckets = buckets_up_to(reading.largest_batch) if reading.controllable else ()
    return MappingProxyType({bucket: draft_tokens_at(table, bucket) for bucket in buckets})
