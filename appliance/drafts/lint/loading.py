"""Loads the weights a worker starts with; the draft is checked before any large file is read."""

from dataclasses import dataclass
from typing import Protocol

from appliance.drafts.lint.lint import refuse_errors
from appliance.drafts.lint.methods import lint_settings
from appliance.drafts.lint.rules import Finding, Severity
from appliance.infra.settings import WorkerSettings
from appliance.serving.weights import Weights, inspect_weights, load_weights


class AnnouncerLike(Protocol):
    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPair:
    target: Weights
    draft: Weights | None
    lint: tuple[Finding, ...] = ()
    draft_refused: bool = False
    """The draft does not fit, and `worker.bad_draft` says to serve the target alone."""


def load_pair(settings: WorkerSettings, announcer: AnnouncerLike) -> LoadedPair:
    """Check a pair, then read and digest it; fails closed: a draft that does not fit is never served."""
    target, draft = inspect_weights(settings.model), None
    if settings.own_draft is not None:
        draft = inspect_weights(settings.own_draft)
    findings, path = lint_settings(settings, target, draft), (draft or target).path
    for finding in findings:
        announcer.say(f"{finding.severity}: {finding.rule}: {finding.message}; {finding.advice}")
    refused = any(finding.severity is Severity.ERROR for finding in findings)
    if settings.bad_draft == "refuse":
        refuse_errors(findings, path)
    if refused:
        announcer.say(f"the draft in {path} does not fit: the target is served alone")
    return LoadedPair(
        target=load_weights(settings.model),
        draft=None if refused or settings.own_draft is None else load_weights(settings.own_draft),
        lint=findings,
        draft_refused=refused,
    )
