"""
What one step of an evaluation found, as numbers and trails; no content.
"""

from appliance.drafts.evaluation.arms import Arm, Mode
from appliance.drafts.evaluation.course import Step
from appliance.drafts.evaluation.part import Part
from appliance.drafts.evaluation.trail import Near


class Answered(Part):
    """What became of one prompt."""

    prompt: int
    """Its place among all prompts."""
    mode: Mode
    tokens: int
    """Length of the answer."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """For each draft position, drafts of which this token and all before it were accepted."""
    trail: tuple[str, ...] = ()
    """Of a greedy answer; see `appliance.drafts.evaluation.trail`."""
    near: tuple[Near, ...] = ()
    """Of the target's own greedy answer."""


class Pace(Part):
    """What whole decode steps of one kind took and gave, as the worker's plugin counts them."""

    batch: int
    """Batch bucket."""
    draft_tokens: int
    steps: int
    seconds: float
    """Of engine time."""
    requests: int
    """Sum of batch sizes."""
    tokens: int


class StepResult(Part):
    """One step, finished."""

    arm: Arm
    number: int
    answered: tuple[Answered, ...]
    paces: tuple[Pace, ...] = ()
    problem: str = ""
    """Why its speed could not be measured."""

    @property
    def step(self) -> Step:
        """Which step it is."""
        return Step(arm=self.arm, number=self.number)
