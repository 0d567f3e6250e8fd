"""
What an evaluation says: numbers with their intervals, what was compared, and the verdict with its reasons.

It names requests by id where an answer differed, and holds no content.
"""

import hashlib
from enum import StrEnum
from typing import Literal

from pydantic import Field

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.equality import Agreement
from appliance.drafts.evaluation.intervals import Interval
from appliance.drafts.evaluation.part import Part
from appliance.drafts.evaluation.results import Pace
from appliance.speculation.values import Expectation


class Verdict(StrEnum):
    """Whether a draft may be tried on served traffic."""

    PASSED = "passed"
    REFUSED = "refused"


class Aspect(StrEnum):
    """What acceptance is broken down by."""

    ALL = "all"
    MODE = "mode"
    CONTEXT = "context"
    TEMPLATE = "template"


def kind_name(aspect: Aspect, value: str) -> str:
    """What people are shown of a kind of traffic."""
    return value if aspect in {Aspect.ALL, Aspect.MODE} else f"{aspect} {value}"


class Line(Part):
    """Acceptance of one arm's draft, of one kind of traffic."""

    aspect: Aspect
    value: str
    """Such as `greedy`, `0-1k`, or a template's label."""
    arm: Arm
    requests: int
    """That were drafted for."""
    drafts: int
    draft_tokens: int
    accepted: int
    acceptance_length: Interval
    per_position: tuple[float, ...]
    """For each draft position, the share of drafts of which this token and all before it were accepted."""


class Comparison(Part):
    """Acceptance length of the candidate over that of the draft in service, of one kind of traffic."""

    aspect: Aspect
    value: str
    requests: int
    """That both were asked."""
    ratio: Interval


class Speed(Part):
    """What an arm's draft did to the speed of its target."""

    arm: Arm
    gain: Interval | None = None
    """Tokens per engine second with drafts over without; absent where it could not be told."""
    paces: tuple[Pace, ...]


class Equality(Part):
    """Greedy answers of one arm against the target's own."""

    arm: Arm
    compared: int
    same: int
    ties: int
    """They part where the target had two tokens within `epsilon` of each other."""
    mismatches: int


class Difference(Part):
    """One answer that is not the target's own."""

    arm: Arm
    request_id: str
    agreement: Agreement
    position: int
    """Of the first token that differs."""
    gap: float | None = None
    """How much less likely (logarithm) the target had that token; absent for more than 1."""


class Expected(Part):
    """What the candidate accepted of one kind of traffic, for whoever compares with it later."""

    acceptance_length: float
    draft_tokens: int


class Evaluation(Part):
    """One report."""

    format: Literal[1] = 1
    draft: str
    """Digest of the candidate."""
    incumbent: str | None = None
    """Digest of the draft in service; absent where the target serves alone."""
    target: str
    dataset: str
    """Digest of the data set's manifest."""
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why it was refused, one line each; none for one that passed."""
    made: str
    """RFC 3339, UTC."""
    engine: str
    device: str
    dtype: str
    draft_tokens: int
    """K."""
    max_tokens: int
    """Longest answer."""
    margin: float
    """Share of acceptance length and speed that it may lose."""
    epsilon: float
    """Difference of two logarithms of probabilities that counts as rounding."""
    prompts: int
    """That were chosen."""
    compared: int
    """Of these, prompts that every arm answered."""
    missing: int
    """Held-out samples that had been erased."""
    withheld: int = 0
    """Held-out samples whose tenants do not allow it any more."""
    unusable: int
    """Held-out samples without an answer, or too long."""
    together: bool = False
    """Whether both workers ran at the same time and took turns by round."""
    complete: bool = False
    """Whether every step was taken."""
    lines: tuple[Line, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    speeds: tuple[Speed, ...] = ()
    speed_ratio: Interval | None = None
    """Of tokens per engine second, the candidate over the draft in service."""
    equalities: tuple[Equality, ...] = ()
    differences: tuple[Difference, ...] = ()
    """The first of them, mismatches before ties."""
    expected: dict[str, Expected] = Field(default_factory=dict)
    """By template label, and `all`."""

    @property
    def digest(self) -> str:
        """SHA-256 of the report's bytes: `sha256:` and 64 hex digits."""
        return f"sha256:{hashlib.sha256(self.encode()).hexdigest()}"

    @property
    def mismatches(self) -> int:
        """Greedy answers, of either arm, that differ from the target's own beyond rounding."""
        return sum(equality.mismatches for equality in self.equalities)

    @property
    def acceptance_ratio(self) -> Interval | None:
        """Acceptance length of the candidate over that of the draft in service, of all traffic."""
        return next((each.ratio for each in self.comparisons if each.aspect is Aspect.ALL), None)

    @property
    def expectations(self) -> dict[str, Expectation]:
        """What the candidate accepted, by kind of traffic, as a training record says it."""
        return {
            kind: Expectation(acceptance_length=said.acceptance_length, draft_tokens=said.draft_tokens)
            for kind, said in self.expected.items()
        }

    def acceptance_length(self, arm: Arm) -> Interval | None:
        """Acceptance length of an arm's draft, of all traffic."""
        found = (line for line in self.lines if line.aspect is Aspect.ALL and line.arm is arm)
        return next((line.acceptance_length for line in found), None)
