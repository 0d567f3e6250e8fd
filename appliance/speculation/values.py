"""
The words of speculation: modes, reasons, draft-token tables, and what is counted of a worker's steps.

Values only.  `appliance.serving.plugin_client` reads them from a worker, `appliance.monitor` decides
on them, `appliance.control.loop` acts on what was decided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


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


MOST_DRAFT_TOKENS = 1024
"""More draft tokens than this no draft was ever measured at: a record that says so is wrong."""
ALL_TRAFFIC = "all"
"""Name of the expectation of every kind of traffic together, in a draft's record."""

DraftTokenTable = tuple[tuple[int, int, int], ...]
"""Ranges of (first batch size, last batch size, draft tokens), from 1 on, without gaps."""


def bucket_of(batch: int) -> int:
    """The batch bucket a batch size falls into, named by its largest: 1, 2, 4, 8 and so on."""
    return 1 << max(0, batch - 1).bit_length()


def buckets_up_to(largest_batch: int) -> tuple[int, ...]:
    """Every bucket of a worker that decodes at most so many requests together."""
    return tuple(1 << exponent for exponent in range(bucket_of(largest_batch).bit_length()))


def table_of(draft_tokens: Mapping[int, int], largest_batch: int) -> DraftTokenTable:
    """
    Write a choice of draft tokens for each bucket as ranges; equal neighbours become one range.

    Args:
        draft_tokens: bucket to draft tokens, for every bucket of `buckets_up_to(largest_batch)`.
        largest_batch: most requests decoded together; the last range ends there.
    """
    spans: list[tuple[int, int, int]] = []
    first = 1
    for bucket in buckets_up_to(largest_batch):
        last = min(bucket, largest_batch)
        if spans and spans[-1][2] == draft_tokens[bucket]:
            spans[-1] = (spans[-1][0], last, draft_tokens[bucket])
        else:
            spans.append((first, last, draft_tokens[bucket]))
        first = last + 1
    return tuple(spans)


def draft_tokens_at(table: DraftTokenTable, batch: int) -> int:
    """Draft tokens the table gives a batch size; beyond its end, what its last range says."""
    for _first, last, draft_tokens in table:
        if batch <= last:
            return draft_tokens
    return table[-1][2] if table else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeCounters:
    """Cumulative counts since a worker started, or the difference of two such readings."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    drafted_per_position: tuple[int, ...] = ()
    """Drafts that reached each position; empty where the worker does not say."""

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
        For each draft position, accepted tokens per draft that reached it, 0..1.

        Where the worker does not say how many drafts reached a position (stock vLLM), all are taken
        to have, and once drafts differ in length the later positions read too low.
        """
        reached = self.drafted_per_position or tuple(self.drafts for _ in self.accepted_per_position)
        return tuple(
            accepted / drafts if drafts else 0.0
            for accepted, drafts in zip(self.accepted_per_position, reached, strict=True)
        )

    def since(self, earlier: "SpecDecodeCounters") -> "SpecDecodeCounters | None":
        """What was counted after `earlier`, or None where a counter went backwards."""
        if len(self.accepted_per_position) != len(earlier.accepted_per_position) or len(
            self.drafted_per_position
        ) != len(earlier.drafted_per_position):
            return None
        difference = SpecDecodeCounters(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=_subtract(self.accepted_per_position, earlier.accepted_per_position),
            drafted_per_position=_subtract(self.drafted_per_position, earlier.drafted_per_position),
        )
        counts = (
            *(difference.drafts, difference.draft_tokens, difference.accepted_tokens),
            *difference.accepted_per_position,
            *difference.drafted_per_position,
        )
        return None if min(counts) < 0 else difference


NO_DRAFTS = SpecDecodeCounters(drafts=0, draft_tokens=0, accepted_tokens=0, accepted_per_position=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounters:
    """
    Cumulative measurements of one kind of step: one batch bucket, one number of draft tokens.

    Only whole decode steps count: no prompt was processed, and every request verified exactly that
    many draft tokens.  What a step took reaches from the end of the one before to its own end, so
    that everything between two steps is in it.
    """

    steps: int = 0
    seconds: float = 0.0
    seconds_squared: float = 0.0
    """Sum of squared seconds, for the variance of a step."""
    requests: int = 0
    """Sum of batch sizes."""
    tokens: int = 0
    """Tokens given to requests."""

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds of a step; 0.0 for none."""
        return self.seconds / self.steps if self.steps else 0.0

    def since(self, earlier: "StepCounters") -> "StepCounters":
        """What was measured after `earlier`, of the same engine."""
        return StepCounters(
            steps=self.steps - earlier.steps,
            seconds=self.seconds - earlier.seconds,
            seconds_squared=self.seconds_squared - earlier.seconds_squared,
            requests=self.requests - earlier.requests,
            tokens=self.tokens - earlier.tokens,
        )

    def plus(self, other: "StepCounters") -> "StepCounters":
        """What was measured by either; of several engines, or of spans that do not overlap."""
        return StepCounters(
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            seconds_squared=self.seconds_squared + other.seconds_squared,
            requests=self.requests + other.requests,
            tokens=self.tokens + other.tokens,
        )


NO_STEPS = StepCounters()


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What the GPUs of a worker took since their driver was loaded."""

    gpus: int
    millijoules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Acceptance that a draft showed."""

    acceptance_length: float
    """Mean tokens per draft, the bonus token included: 1.0 for none accepted."""
    draft_tokens: int
    """K it was measured at, 1 or more."""

    def at(self, draft_tokens: int) -> float:
        """
        The least acceptance length that this means for another K, on the same text.

        A draft is a chain: no position is accepted more often than the one before it.  So the first K
        positions have at least their share of what all of them gave, and more draft tokens never give less.
        """
        share = min(1.0, max(0, draft_tokens) / self.draft_tokens)
        return 1.0 + share * (self.acceptance_length - 1.0)


def parse_expectation(said: object) -> Expectation | None:
    """Read an expectation from JSON; None for anything that no draft can have shown."""
    length = said.get("acceptance_length") if isinstance(said, dict) else None
    tokens = said.get("draft_tokens") if isinstance(said, dict) else None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MOST_DRAFT_TOKENS:
        return None
    if not isinstance(length, int | float) or isinstance(length, bool) or not 1 <= length <= 1 + tokens:
        return None
    return Expectation(acceptance_length=float(length), draft_tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """What the plugin in a worker says about its engine."""

    controllable: bool
    """Whether the table can be changed; if not, `problems` says why."""
    problems: tuple[str, ...] = ()
    epoch: str
    """Changes with every start of the engine: counters of two epochs have nothing to do with each other."""
    largest_batch: int = 1
    """Most requests decoded together."""
    choices: tuple[int, ...] = (0,)
    """Numbers of draft tokens the engine is prepared for, ascending."""
    table: DraftTokenTable = ()
    mode: SpeculationMode | None = None
    """The mode whoever set the table last said it was for; None when nobody has yet."""
    reason: Reason | None = None
    is_probing: bool = False
    """Whether a probe is under way; the table is in force again when it ends."""
    batch: int = 0
    """Size of the last step's batch; 0 while idle."""
    step_count: int = 0
    """All steps of the engine."""
    steps: Mapping[tuple[int, int], StepCounters] = field(default_factory=lambda: MappingProxyType({}))
    """Measurements by (batch bucket, draft tokens)."""
    drafting: SpecDecodeCounters = NO_DRAFTS
    busy_seconds: float | None = None
    """Time the engine worked since its start; None where nothing measures it."""
    energy: Energy | None = None
    """What its GPUs took; None where nothing measures it."""
    target: str = ""
    """Content digest of the target it was started with; empty where the worker does not say."""
    draft: str = ""
    """Likewise of the draft; also empty where it was started without one."""
    expected_length: float | None = None
    """Acceptance length that the draft's record promises with the most draft tokens there are here, at least;
    None where no record says."""


def _subtract(later: tuple[int, ...], earlier: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(new - old for new, old in zip(later, earlier, strict=True))
