"""
The weights a worker is started with: read, digested, and judged before anything large is.
"""

from dataclasses import dataclass
from typing import Protocol

from appliance.drafts.lint.findings import Finding
from appliance.drafts.lint.lint import lint_pair, refuse_errors
from appliance.drafts.lint.rules import Severity
from appliance.infra.settings import WorkerSettings
from appliance.serving.weights import Weights, inspect_weights, load_weights


class Speaker(Protocol):
    """Whoever tells the person watching."""

    def say(self, text: str) -> None:
        """Print a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPair:
    """The weights a worker is started with, and what was found about them."""

    target: Weights
    draft: Weights | None
    lint: tuple[Finding, ...] = ()
    draft_refused: bool = False
    """Set where there is a draft, and the settings say to serve the target alone rather than this."""


def load_pair(settings: WorkerSettings, announcer: Speaker) -> LoadedPair:
    """
    Read and digest target and draft, and judge whether they fit before anything large is read.

    Fails closed: a draft that does not fit is never served.  `worker.bad_draft` decides whether the
    target is served without it.

    Raises:
        ConfigurationError: a path or file is missing, or the draft does not fit and is to be refused.
    """
    if settings.method != "eagle3" or settings.draft is None:
        return LoadedPair(target=load_weights(settings.model), draft=None)
    seen = inspect_weights(settings.model), inspect_weights(settings.draft)
    findings = lint_pair(*seen, context=settings.max_model_len)
    for finding in findings:
        announcer.say(f"{finding.severity}: {finding.rule}: {finding.message}; {finding.advice}")
    refused = any(finding.severity is Severity.ERROR for finding in findings)
    if settings.bad_draft == "refuse":
        refuse_errors(findings, seen[1].path)
    if refused:
        announcer.say(f"the draft in {seen[1].path} does not fit: the target is served alone")
    return LoadedPair(
        target=load_weights(settings.model),
        draft=None if refused else load_weights(settings.draft),
        lint=findings,
        draft_refused=refused,
    )
