"""
Watch acceptance length: a worker's cumulative counters in, a windowed view and a verdict out.

This module only computes.  `appliance.serving.vllm_metrics` turns a worker's metrics page into
`SpecDecodeCounters`; `appliance.control` calls `observe` once a tick and publishes the result.
There is no clock, socket or registry in here.

It fails by holding still: a scrape that failed changes nothing but the reason, and counters that
went backwards (the worker restarted) empty the window instead of producing a number.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class SpeculationMode(StrEnum):
    """What a worker does at each step."""

    SPECULATIVE = "speculative"
    PROBING = "probing"
    TARGET_ONLY = "target_only"


class Reason(StrEnum):
    """Why a worker is in its mode; also the metric label, the log field and the audit field."""

    HEALTHY = "healthy"
    TOO_FEW_DRAFTS = "too_few_drafts"
    BELOW_BREAK_EVEN = "below_break_even"
    COLLAPSED = "collapsed"
    PROBING = "probing"
    PROBE_FAILED = "probe_failed"
    RECOVERED = "recovered"
    COUNTER_RESET = "counter_reset"
    SCRAPE_FAILED = "scrape_failed"
    NOT_CONTROLLABLE = "not_controllable"
    OPERATOR_OVERRIDE = "operator_override"
    DRAFT_LINT_FAILED = "draft_lint_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeCounters:
    """Cumulative counts since a worker started, or the difference of two such readings."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per draft with the bonus token: 1 + accepted / drafts; 1.0 for no drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per draft token, 0..1."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """
        For each draft position, accepted tokens per draft, 0..1.

        vLLM does not export how many drafts reached a position: once drafts differ in length the
        later positions read too low.
        """
        if not self.drafts:
            return tuple(0.0 for _ in self.accepted_per_position)
        return tuple(count / self.drafts for count in self.accepted_per_position)

    def since(self, earlier: "SpecDecodeCounters") -> "SpecDecodeCounters | None":
        """What was counted after `earlier`, or None where a counter went backwards."""
        if len(self.accepted_per_position) != len(earlier.accepted_per_position):
            return None
        difference = SpecDecodeCounters(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(
                new - old
                for new, old in zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
            ),
        )
        counts = (difference.drafts, difference.draft_tokens, difference.accepted_tokens)
        return None if min(counts) < 0 or min(difference.accepted_per_position, default=0) < 0 else difference


NO_DRAFTS = SpecDecodeCounters(drafts=0, draft_tokens=0, accepted_tokens=0, accepted_per_position=())


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorPolicy:
    """Sizes in drafts, so that a quiet hour and a busy second weigh the same evidence alike."""

    window_drafts: int
    min_drafts: int
    collapsed_below: float
    """Acceptance length under which drafts are as good as useless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is remembered of one worker between two ticks."""

    mode: SpeculationMode
    reason: Reason = Reason.TOO_FEW_DRAFTS
    samples: tuple[SpecDecodeCounters, ...] = ()
    """Readings, oldest first; the window reaches from the first to the last."""

    @property
    def window(self) -> SpecDecodeCounters:
        """Counts between the oldest and the newest reading kept."""
        if len(self.samples) < 2:  # noqa: PLR2004 - a difference needs two
            return NO_DRAFTS
        return self.samples[-1].since(self.samples[0]) or NO_DRAFTS


def observe(watch: Watch, counters: SpecDecodeCounters | None, policy: MonitorPolicy) -> Watch:
    """
    Take one reading of a worker's counters into its window.

    Args:
        watch: what was known before.
        counters: the reading, or None when the worker could not be scraped.
        policy: window size and thresholds.
    """
    if counters is None:
        return replace(watch, reason=Reason.SCRAPE_FAILED)
    if watch.samples and counters.since(watch.samples[-1]) is None:
        return replace(watch, samples=(counters,), reason=Reason.COUNTER_RESET)
    if watch.samples and counters == watch.samples[-1]:
        return replace(watch, reason=_judge(watch, policy))
    grown = replace(watch, samples=_trim((*watch.samples, counters), policy.window_drafts))
    return replace(grown, reason=_judge(grown, policy))


def _trim(samples: tuple[SpecDecodeCounters, ...], window_drafts: int) -> tuple[SpecDecodeCounters, ...]:
    """Drop the oldest readings as long as the rest still spans a whole window."""
    newest, keep_from = samples[-1].drafts, 0
    while keep_from + 2 < len(samples) and newest - samples[keep_from + 1].drafts >= window_drafts:
        keep_from += 1
    return samples[keep_from:]


def _judge(watch: Watch, policy: MonitorPolicy) -> Reason:
    window = watch.window
    if window.drafts < policy.min_drafts:
        return Reason.TOO_FEW_DRAFTS
    if window.acceptance_length < policy.collapsed_below:
        return Reason.COLLAPSED
    return Reason.HEALTHY
