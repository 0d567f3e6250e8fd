"""
The values of speculation: modes, reasons, draft-token tables, counters of a worker's steps, decisions.

`appliance.serving.plugin_client` reads them from a worker, `appliance.monitor` makes a `Decision` of them,
and `appliance.control.loop` applies it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class SpeculationMode(StrEnum):
    SPECULATIVE = "speculative"
    TARGET_ONLY = "target_only"


class Reason(StrEnum):
    """Why a worker is in its mode; also the metric label, the log field and the audit field."""

    HEALTHY = "healthy"
    TOO_FEW_DRAFTS = "too_few_drafts"
    BELOW_BREAK_EVEN = "below_break_even"
    COLLAPSED = "collapsed"
    RECOVERED = "recovered"
    COUNTER_RESET = "counter_reset"
    SCRAPE_FAILED = "scrape_failed"
    NOT_CONTROLLABLE = "not_controllable"
    OPERATOR_OVERRIDE = "operator_override"
    DRAFT_LINT_FAILED = "draft_lint_failed"


def parse_names(mode: str | None, reason: str | None) -> tuple[SpeculationMode | None, Reason | None]:
    """
    Mode and reason of a report; raises ValueError for names of neither this version nor an earlier one.

    Until 0.1 a worker that probed while it did not draft had a mode and reasons of its own.
    """
    mode = SpeculationMode.TARGET_ONLY if mode == "probing" else mode
    reason = Reason.BELOW_BREAK_EVEN if reason in {"probing", "probe_failed"} else reason
    return SpeculationMode(mode) if mode else None, Reason(reason) if reason else None


class Capability(StrEnum):
    """What the plugin can do in a worker; also the metric label."""

    CONTROL = "control"
    """Measure each kind of step, and change the draft-token table."""
    DEFERRED_PREFILL = "deferred_prefill"
    """Leave out the draft's forward passes while it does not draft."""
    ATTRIBUTION = "attribution"
    """Report drafts and accepted tokens of each request."""


MAXIMUM_DRAFT_TOKENS = 1024
"""A record that claims more draft tokens than this is wrong."""
ALL_TRAFFIC = "all"
"""Name of the expectation of every kind of traffic together, in a draft's record."""

SETTLE_SECONDS = 0.02
"""Steps that end so soon after a change of draft tokens are not measured: answers of those before it are
still being sent, often by the same cores."""

DraftTokenTable = tuple[tuple[int, int, int], ...]
"""Ranges of (first batch size, last batch size, draft tokens), from 1 on, without gaps."""


def bucket_of(batch: int) -> int:
    """The batch bucket of a batch size, named by its largest: 1, 2, 4, 8 and so on."""
    return 1 << max(0, batch - 1).bit_length()


def buckets_up_to(largest_batch: int) -> tuple[int, ...]:
    """Every bucket of a worker that decodes at most this many requests together."""
    return tuple(1 << exponent for exponent in range(bucket_of(largest_batch).bit_length()))


def table_of(draft_tokens: Mapping[int, int], largest_batch: int) -> DraftTokenTable:
    """Draft tokens of all `buckets_up_to(largest_batch)` as ranges; equal neighbours are merged."""
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
    """Draft tokens the table gives a batch size; beyond its end, those of its last range."""
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
    """Drafts that reached each position; empty if the worker does not report it."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per draft with the bonus token; 1.0 for no drafts."""
        return acceptance_length_of(self.drafts, self.accepted_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per draft token, 0..1."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """
        For each draft position, accepted tokens per draft that reached it, 0..1.

        If the worker does not report how many drafts reached a position (stock vLLM), all are assumed
        to have, and once drafts differ in length the later positions read too low.
        """
        reached = self.drafted_per_position or tuple(self.drafts for _ in self.accepted_per_position)
        return tuple(
            accepted / drafts if drafts else 0.0
            for accepted, drafts in zip(self.accepted_per_position, reached, strict=True)
        )

    def since(self, earlier: "SpecDecodeCounters") -> "SpecDecodeCounters | None":
        """The counts after `earlier`, or None if a counter went backwards."""
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


def acceptance_length_of(drafts: int, accepted_tokens: int) -> float:
    """Mean tokens per draft with the bonus token: 1 + accepted / drafts; 1.0 for no drafts."""
    return 1.0 + accepted_tokens / drafts if drafts else 1.0


NO_DRAFTS = SpecDecodeCounters(drafts=0, draft_tokens=0, accepted_tokens=0, accepted_per_position=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounters:
    """
    Cumulative measurements of one kind of step: one batch bucket, one number of draft tokens.

    Only whole decode steps count: no prompt was processed, and every request verified exactly that
    many draft tokens, which have not changed within `SETTLE_SECONDS`.  The time of a step reaches from the
    end of the one before to its own end, so that it includes everything between two steps.
    """

    steps: int = 0
    seconds: float = 0.0
    seconds_squared: float = 0.0
    """Sum of squared seconds, for the variance of a step."""
    requests: int = 0
    """Sum of batch sizes."""
    tokens: int = 0
    """Tokens delivered to requests."""

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0

    def since(self, earlier: "StepCounters") -> "StepCounters":
        """The measurements after `earlier`, of the same engine."""
        return StepCounters(
            steps=self.steps - earlier.steps,
            seconds=self.seconds - earlier.seconds,
            seconds_squared=self.seconds_squared - earlier.seconds_squared,
            requests=self.requests - earlier.requests,
            tokens=self.tokens - earlier.tokens,
        )

    def plus(self, other: "StepCounters") -> "StepCounters":
        """The sum of both: of several engines, or of spans that do not overlap."""
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
    """Energy that a worker's GPUs have used since their driver was loaded."""

    gpus: int
    millijoules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Acceptance that a draft's record promises."""

    acceptance_length: float
    """Mean tokens per draft, the bonus token included: 1.0 for none accepted."""
    draft_tokens: int
    """K it was measured at, 1 or more."""

    def at(self, draft_tokens: int) -> float:
        """
        The minimum acceptance length that this implies for another K, on the same text.

        A draft is a chain: no position is accepted more often than the one before it.  So the first K
        positions have at least their share of all accepted tokens, and more draft tokens never give less.
        """
        share = min(1.0, max(0, draft_tokens) / self.draft_tokens)
        return 1.0 + share * (self.acceptance_length - 1.0)


def parse_expectation(value: object) -> Expectation | None:
    """Read an expectation from JSON; None for anything that no draft can have reached."""
    length = value.get("acceptance_length") if isinstance(value, dict) else None
    tokens = value.get("draft_tokens") if isinstance(value, dict) else None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MAXIMUM_DRAFT_TOKENS:
        return None
    if not isinstance(length, int | float) or isinstance(length, bool) or not 1 <= length <= 1 + tokens:
        return None
    return Expectation(acceptance_length=float(length), draft_tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One answer of the plugin in a worker."""

    controllable: bool
    """Whether the table can be changed; if not, `problems` gives the reasons."""
    problems: tuple[str, ...] = ()
    missing_capabilities: Mapping[Capability, str] = field(default_factory=lambda: MappingProxyType({}))
    """Those other than control that the worker lacks, with the reasons."""
    is_leaving: bool = False
    """Whether the worker is stopping; it then reports nothing else."""
    epoch: str
    """Changes with every start of the engine: counters of two epochs cannot be compared."""
    largest_batch: int = 1
    """Maximum requests decoded together."""
    choices: tuple[int, ...] = (0,)
    """Numbers of draft tokens the engine is prepared for, ascending."""
    table: DraftTokenTable = ()
    mode: SpeculationMode | None = None
    """The mode that came with the table; None until a gateway sets one."""
    reason: Reason | None = None
    is_probing: bool = False
    """Whether a probe is in flight; the table is in force again when it ends."""
    batch: int = 0
    """Size of the last step's batch; 0 while idle."""
    step_count: int = 0
    """All steps of the engine."""
    steps: Mapping[tuple[int, int], StepCounters] = field(default_factory=lambda: MappingProxyType({}))
    """Measurements by (batch bucket, draft tokens)."""
    drafting: SpecDecodeCounters = NO_DRAFTS
    busy_seconds: float | None = None
    """Time the engine worked since its start; None if nothing measures it."""
    catch_up_seconds: float = 0.0
    """Part of it by which the first steps that draft again took longer than steps without drafts."""
    energy: Energy | None = None
    """None if nothing measures it."""
    target: str = ""
    """Content digest of the target it was started with; empty if the worker does not report it."""
    draft: str = ""
    """Likewise of the draft; also empty if it was started without one."""
    expected_length: float | None = None
    """Minimum acceptance length that the draft's record promises with the most draft tokens of this worker;
    None without a record."""


def missing_of(reading: EngineReading | None) -> dict[Capability, str]:
    """Each capability that a worker lacks, with the reason."""
    if reading is None:
        return dict.fromkeys(Capability, "not scraped yet")
    control = {} if reading.controllable else {Capability.CONTROL: "; ".join(reading.problems)}
    return control | dict(reading.missing_capabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the monitor decided for one worker; the control loop applies it."""

    mode: SpeculationMode
    reason: Reason = Reason.TOO_FEW_DRAFTS
    """Why the worker is in this mode, or why this tick gave no evidence."""
    basis: Reason = Reason.TOO_FEW_DRAFTS
    """The reason of the mode."""
    verdict: Reason | None = None
    """`collapsed` or `below_break_even` while the batch size in use does not draft for it."""
    table: DraftTokenTable = ()
    """Empty if no table can be set."""
    probe: tuple[tuple[int, int], ...] = ()
    """Draft tokens and steps of each part of the probe in flight; the table would end it."""
    starts_probe: bool = False
    """Whether the worker has to start the probe now."""
    avoid: bool = False
    """Whether the router should prefer other workers: drafts do not pay here and cannot be switched off."""


def _subtract(later: tuple[int, ...], earlier: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([new - old for new, old in zip(later, earlier, strict=True)])
