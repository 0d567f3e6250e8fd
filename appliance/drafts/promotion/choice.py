"""
Which draft a worker is started with: asked before every start, on the machine that starts it.

    on trial, if its promotion still goes on ─► in service, by the standing ─► `worker.draft`

It fails towards the right: what cannot be found, read or verified, was made for another target, or does
not fit, is never started, and the next one is.  So whatever happens to a gateway or to the registry, a
worker comes up with a draft that has served before.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from appliance.drafts.evaluation.store import load_measured
from appliance.drafts.lint.findings import Finding
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.lint.rules import Severity
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.standing import read_standing
from appliance.errors import ApplianceError, DraftRefusedError
from appliance.serving.restart_request import Candidate
from appliance.serving.weights import Weights, inspect_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A draft that should have been started and was not."""

    draft: str
    """Its digest; empty where not even that is known."""
    why: str
    promotion: str | None = None
    """The promotion that tries it; None for one in service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The draft for one start."""

    draft: Weights | None = None
    """None: that of the settings."""
    findings: tuple[Finding, ...] = ()
    """What is suspicious about it."""
    is_trial: bool = False
    problems: tuple[Problem, ...] = ()


class DraftChoice:
    """Chooses for one target on one machine."""

    def __init__(
        self,
        *,
        directory: Path,
        target: Weights,
        own: str,
        context: int | None,
        open_registry: Callable[[], DraftRegistry],
    ) -> None:
        """
        Prepare; nothing is read yet.

        Args:
            directory: of the registry.
            target: what the worker serves, with its digest.
            own: digest of the draft of the settings; empty where there is none that may be served.
            context: longest context to be served; None for the target's own.
            open_registry: opens the registry, anew each time: keys and revisions come and go.
        """
        self._directory = directory
        self._target = target
        self._own = own
        self._context = context
        self._open_registry = open_registry

    def choose(self, candidate: Candidate | None) -> Choice:
        """
        Choose; reads whole drafts, and never fails.

        Args:
            candidate: the draft that was wished for, and the promotion it belongs to.
        """
        try:
            standing = read_standing(self._directory, self._target.digest)
        except (ApplianceError, OSError, ValueError) as error:
            return Choice(problems=(Problem(draft="", why=_line(error)),))
        problems: list[Problem] = []
        if candidate is not None and standing.promotion == candidate.promotion:
            tried = self._load(candidate.draft, problems, candidate.promotion)
            if tried is not None:
                return replace(tried, is_trial=True)
        # A promotion that is over, however it ended, counts for nothing: what is in service does.
        if standing.draft is not None:
            standing_choice = self._load(standing.draft, problems, None)
            if standing_choice is not None:
                return replace(standing_choice, problems=tuple(problems))
        return Choice(problems=tuple(problems))

    def _load(self, digest: str, problems: list[Problem], promotion: str | None) -> Choice | None:
        """Read one draft of the registry and judge it; None, and a problem more, where it is no good."""
        if digest == self._own:
            return Choice()
        try:
            registry = self._open_registry()
            revision = registry.find(digest)
            if revision.target != self._target.digest:
                message = f"draft {digest} was made for the target {revision.target}"
                raise DraftRefusedError(message)
            weights = replace(inspect_weights(registry.weights(revision)), digest=digest)
            findings = lint_pair(self._target, weights, context=self._context)
            errors = [finding for finding in findings if finding.severity is Severity.ERROR]
            if errors:
                message = f"draft {digest} does not fit: {errors[0].message}; {errors[0].advice}"
                raise DraftRefusedError(message)
        except (ApplianceError, OSError, ValueError) as error:
            problems.append(Problem(draft=digest, why=_line(error), promotion=promotion))
            return None
        return Choice(draft=self._as_evaluated(weights), findings=findings)

    def _as_evaluated(self, draft: Weights) -> Weights:
        """
        The draft with what its evaluation measured it to accept, in place of what its training hoped for.

        An evaluation may be missing here, or damaged: then the training's word stands.
        """
        with suppress(ApplianceError):
            measured = load_measured(self._directory, draft.digest, self._target.digest)
            if measured:
                said = {kind: asdict(each) for kind, each in measured.items()}
                return replace(draft, training={**draft.training, "expected": said})
        return draft


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
