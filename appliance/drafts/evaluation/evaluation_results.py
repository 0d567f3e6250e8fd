"""
The JSON files of an evaluation: results of single steps, and the report.

They contain numbers, trails (`equality`) and request ids, no content.
"""

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import Field

from appliance.drafts.evaluation.arms import Arm, MeasurementStep, Mode
from appliance.drafts.evaluation.equality import Agreement, Near
from appliance.drafts.evaluation.intervals import ConfidenceInterval, EvaluationModel
from appliance.speculation.values import Expectation, StepCounters


class PromptResult(EvaluationModel):
    prompt: int
    """Index among all prompts."""
    mode: Mode
    tokens: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """By draft position: drafts of which this token and all before it were accepted."""
    trail: tuple[str, ...] = ()
    """Of a greedy answer."""
    near: tuple[Near, ...] = ()
    """Alternatives in the target's own greedy answer."""


class StepTotals(EvaluationModel):
    """Sums over whole decode steps of one kind, as the worker's plugin counts them."""

    batch: int
    """Batch bucket."""
    draft_tokens: int
    steps: int
    seconds: float
    """Of engine time."""
    requests: int
    """Sum of batch sizes."""
    tokens: int

    @classmethod
    def by_kind(cls, cells: Mapping[tuple[int, int], StepCounters]) -> "tuple[StepTotals, ...]":
        """`cells` are by batch bucket and draft tokens."""
        return tuple(
            cls(
                batch=batch,
                draft_tokens=draft_tokens,
                steps=cell.steps,
                seconds=cell.seconds,
                requests=cell.requests,
                tokens=cell.tokens,
            )
            for (batch, draft_tokens), cell in sorted(cells.items())
        )

    @property
    def counters(self) -> StepCounters:
        return StepCounters(
            steps=self.steps, seconds=self.seconds, requests=self.requests, tokens=self.tokens
        )


class StepResult(EvaluationModel):
    arm: Arm
    number: int
    answered: tuple[PromptResult, ...]
    paces: tuple[StepTotals, ...] = ()
    problem: str = ""
    """Why its speed could not be measured."""

    @property
    def step(self) -> MeasurementStep:
        return MeasurementStep(arm=self.arm, number=self.number)


class EvaluationVerdict(StrEnum):
    PASSED = "passed"
    REFUSED = "refused"


class TrafficAspect(StrEnum):
    ALL = "all"
    MODE = "mode"
    CONTEXT = "context"
    TEMPLATE = "template"


def kind_name(aspect: TrafficAspect, value: str) -> str:
    return value if aspect in {TrafficAspect.ALL, TrafficAspect.MODE} else f"{aspect} {value}"


class AcceptanceLine(EvaluationModel):
    aspect: TrafficAspect
    value: str
    """Such as `greedy`, `0-1k`, or a template's label."""
    arm: Arm
    requests: int
    """With drafts."""
    drafts: int
    draft_tokens: int
    accepted: int
    acceptance_length: ConfidenceInterval
    per_position: tuple[float, ...]
    """By draft position: share of drafts of which this token and all before it were accepted."""


class LengthRatio(EvaluationModel):
    """Candidate over incumbent."""

    aspect: TrafficAspect
    value: str
    requests: int
    """That both answered."""
    ratio: ConfidenceInterval


class ArmSpeed(EvaluationModel):
    arm: Arm
    gain: ConfidenceInterval | None = None
    """Tokens per engine second with drafts over without; absent if it could not be measured."""
    paces: tuple[StepTotals, ...]


class Equality(EvaluationModel):
    """Greedy answers of one arm compared with the target's own."""

    arm: Arm
    compared: int
    same: int
    ties: int
    mismatches: int


class Difference(EvaluationModel):
    arm: Arm
    request_id: str
    agreement: Agreement
    position: int
    """Of the first token that differs."""
    gap: float | None = None
    """How much less likely (log probability) the target had that token; absent for more than 1."""


class Evaluation(EvaluationModel):
    format: Literal[1] = 1
    draft: str
    """Digest of the candidate."""
    incumbent: str | None = None
    """Digest of the draft in service; absent if the target serves without one."""
    target: str
    dataset: str
    """Digest of the data set's manifest."""
    verdict: EvaluationVerdict
    reasons: tuple[str, ...]
    """Why it was refused, one line each; empty if it passed."""
    made: str
    """RFC 3339, UTC."""
    engine: str
    device: str
    dtype: str
    draft_tokens: int
    """K."""
    max_tokens: int
    margin: float
    """Allowed loss of acceptance length and speed, as a share."""
    epsilon: float
    prompts: int
    compared: int
    missing: int
    """Held-out samples that were erased."""
    withheld: int = 0
    """Held-out samples whose tenants withdrew their consent."""
    unusable: int
    """Held-out samples without an answer, or too long."""
    together: bool = False
    """Whether both workers ran at the same time and alternated by round."""
    complete: bool = False
    lines: tuple[AcceptanceLine, ...] = ()
    comparisons: tuple[LengthRatio, ...] = ()
    speeds: tuple[ArmSpeed, ...] = ()
    speed_ratio: ConfidenceInterval | None = None
    """Tokens per engine second, candidate over incumbent."""
    equalities: tuple[Equality, ...] = ()
    differences: tuple[Difference, ...] = ()
    """The first ones, mismatches before ties."""
    expected: dict[str, Expectation] = Field(default_factory=dict)
    """What the candidate accepted, by template label, and `all`."""

    @property
    def digest(self) -> str:
        """SHA-256 of the report's bytes: `sha256:` and 64 hex digits."""
        return f"sha256:{hashlib.sha256(self.encode()).hexdigest()}"

    @property
    def mismatches(self) -> int:
        """Greedy answers of all arms that differ from the target's own beyond rounding."""
        return sum(equality.mismatches for equality in self.equalities)

    @property
    def acceptance_ratio(self) -> ConfidenceInterval | None:
        """Candidate over incumbent, for all traffic."""
        return next((each.ratio for each in self.comparisons if each.aspect is TrafficAspect.ALL), None)

    def acceptance_length(self, arm: Arm) -> ConfidenceInterval | None:
        """For all traffic."""
        found = (line for line in self.lines if line.aspect is TrafficAspect.ALL and line.arm is arm)
        return next((line.acceptance_length for line in found), None)
