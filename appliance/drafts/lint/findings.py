"""
One thing found about a pair of weights.
"""

from dataclasses import dataclass

from appliance.drafts.lint.explanations import EXPLANATIONS
from appliance.drafts.lint.rules import Rule, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or suspicious, about a pair of weights."""

    rule: Rule
    message: str
    """What exactly, with names and numbers; its subject, `it`, is the draft."""

    @property
    def severity(self) -> Severity:
        """Whether it keeps the draft from being loaded."""
        return EXPLANATIONS[self.rule].severity

    @property
    def advice(self) -> str:
        """What to do about it."""
        return EXPLANATIONS[self.rule].advice
