"""
What a refresh came to, as a page of results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.draft_refresh.traffic import Acceptance
from benchmarks.speculation.provenance import Provenance

GOAL = 0.80
"""Share of the lost acceptance that a refresh has to bring back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the script, and how long it took."""

    name: str
    seconds: float
    said: str = ""
    """The last lines its command printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Acceptance before, after the change, and after the refresh."""

    original: Acceptance
    fallen: Acceptance
    refreshed: Acceptance

    @property
    def recovered(self) -> float:
        """Share of the lost acceptance that came back; 1.0 for all of it, and where nothing was lost."""
        lost = self.original.acceptance_length - self.fallen.acceptance_length
        return (self.refreshed.acceptance_length - self.fallen.acceptance_length) / lost if lost > 0 else 1.0


def markdown(
    provenance: Provenance, findings: Findings, steps: Sequence[Step], counted: Sequence[str]
) -> str:
    """
    The page.

    Args:
        provenance: what it was measured with.
        findings: the three measurements.
        steps: in order.
        counted: names of the steps that the refresh consists of; their time is summed.
    """
    total = sum(step.seconds for step in steps if step.name in counted)
    rows = [
        ("original target, original draft", findings.original),
        ("changed target, original draft", findings.fallen),
        ("changed target, refreshed draft", findings.refreshed),
    ]
    lines = [
        f"# A draft refreshed, at commit {provenance.commit}",
        "",
        f"`{provenance.command}`",
        "",
        f"- {provenance.hardware}",
        f"- {provenance.engine}, {provenance.model} with {provenance.draft}",
        f"- commit {provenance.source}, {provenance.date}",
        "",
        "The target is fine-tuned to number the lines of its listings, under another chat template.",
        "Two workers and a gateway serve it with the draft of before; the operator's commands then",
        "harvest, train, evaluate and promote.  Acceptance is measured through the gateway, greedy, on",
        "requests that were never harvested.",
        "",
        "| pair | acceptance length | drafts | requests | tokens/s |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {found.acceptance_length:.2f} | {found.drafts} "
            f"| {found.requests} | {found.tokens_per_second:.0f} |"
            for name, found in rows
        ),
        "",
        f"**{findings.recovered:.0%} of the lost acceptance came back** (goal: {GOAL:.0%}).",
        f"{', '.join(counted).capitalize()} took {total / 60:.1f} minutes of machine time.",
        "",
        "| step | seconds |",
        "| --- | --- |",
        *(f"| {step.name} | {step.seconds:.0f} |" for step in steps),
        "",
    ]
    for step in steps:
        if step.said:
            lines += [f"## {step.name}", "", "```", step.said.rstrip(), "```", ""]
    return "\n".join(lines)
