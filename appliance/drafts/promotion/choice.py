"""
Which draft a worker starts with, decided before every start on the machine that starts it.

    candidate, while its promotion runs ─► active draft ─► `worker.draft`

A draft that cannot be found, read or verified, belongs to another target or fails lint is never started;
the next in this order is.  So whatever happens to a gateway or to the registry, a worker starts with a
draft that has served before.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from appliance.drafts.evaluation.store import load_measured
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.lint.rules import Finding, Severity
from appliance.drafts.registry.active_draft import read_active_draft
from appliance.drafts.registry.registry import DraftRegistry
from appliance.errors import ApplianceError, DraftRefusedError
from appliance.serving.restart_request import CandidateDraft
from appliance.serving.weights import Weights, inspect_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    draft: str
    """Digest; empty if unknown."""
    why: str
    promotion: str | None = None
    """Id of the promotion that tries it; None for the draft in service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    draft: Weights | None = None
    """None for that of the settings."""
    findings: tuple[Finding, ...] = ()
    is_trial: bool = False
    problems: tuple[Problem, ...] = ()


@dataclass(kw_only=True)
class DraftChooser:
    """For one target on one machine."""

    directory: Path
    """Of the registry."""
    target: Weights
    own: str
    """Digest of the draft of the settings; empty if there is none."""
    context: int | None
    """Maximum context that is served; None for the target's own."""
    open_registry: Callable[[], DraftRegistry]
    """Called at every start: keys and revisions change."""

    def choose(self, candidate: CandidateDraft | None) -> Choice:
        """Choose a draft; reads whole files, never raises.  `candidate` is the restart request's."""
        try:
            active = read_active_draft(self.directory, self.target.digest)
        except (ApplianceError, OSError, ValueError) as error:
            return Choice(problems=(Problem(draft="", why=_line(error)),))
        problems: list[Problem] = []
        if candidate is not None and active.promotion == candidate.promotion:
            tried = self._load(candidate.draft, problems, candidate.promotion)
            if tried is not None:
                return replace(tried, is_trial=True)
        # Without a valid candidate, or once its promotion is over, the active draft counts.
        if active.draft is not None:
            chosen = self._load(active.draft, problems, None)
            if chosen is not None:
                return replace(chosen, problems=tuple(problems))
        return Choice(problems=tuple(problems))

    def _load(self, digest: str, problems: list[Problem], promotion: str | None) -> Choice | None:
        """Load and lint a draft of the registry; None if it may not be started, with a problem appended."""
        if digest == self.own:
            return Choice()
        try:
            registry = self.open_registry()
            revision = registry.find(digest)
            if revision.target != self.target.digest:
                raise DraftRefusedError(f"draft {digest} was made for the target {revision.target}")
            weights = replace(inspect_weights(registry.weights(revision)), digest=digest)
            findings = lint_pair(self.target, weights, context=self.context)
            errors = [finding for finding in findings if finding.severity is Severity.ERROR]
            if errors:
                raise DraftRefusedError(
                    f"draft {digest} does not fit: {errors[0].message}; {errors[0].advice}"
                )
        except (ApplianceError, OSError, ValueError) as error:
            problems.append(Problem(draft=digest, why=_line(error), promotion=promotion))
            return None
        return Choice(draft=self._as_evaluated(weights), findings=findings)

    def _as_evaluated(self, draft: Weights) -> Weights:
        """The draft with the acceptance that its evaluation measured, if readable, not its training's."""
        with suppress(ApplianceError):
            measured = load_measured(self.directory, draft.digest, self.target.digest)
            if measured:
                expected = {kind: asdict(each) for kind, each in measured.items()}
                return replace(draft, training={**draft.training, "expected": expected})
        return draft


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
