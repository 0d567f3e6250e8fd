"""
Who is compared: the candidate, the draft in service, their target, and what speaks against the candidate.
"""

from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.evaluation.arms import Arm, Served
from appliance.drafts.evaluation.verdict import objections
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.record import parse_record
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.standing import read_standing
from appliance.errors import DraftRefusedError
from appliance.infra.settings import WorkerSettings
from appliance.serving.weights import Weights, inspect_weights, load_weights

NO_DRAFT = "none"
"""How a command names the target alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One comparison; every digest has been computed from the bytes that will be served."""

    target: Weights
    candidate: Weights
    incumbent: Weights | None
    """None where the target serves alone."""
    objections: tuple[str, ...]
    """Why the candidate may not even be loaded; one line each."""

    @property
    def arms(self) -> dict[Arm, Served]:
        """What each arm's worker serves."""
        arms = {Arm.TARGET: Served(target=self.target)}
        if self.incumbent is not None:
            arms[Arm.INCUMBENT] = Served(target=self.target, draft=self.incumbent)
        return arms | {Arm.CANDIDATE: Served(target=self.target, draft=self.candidate)}


def open_contest(
    registry: DraftRegistry,
    directory: Path,
    settings: WorkerSettings,
    *,
    candidate: str,
    target: Path | None = None,
    incumbent: str | None = None,
) -> Contest:
    """
    Find out who is compared; reads all weights to digest them.

    Args:
        registry: of drafts.
        directory: of that registry.
        settings: the `worker` section.
        candidate: digest of a registered draft, or how it begins.
        target: directory of the target; default: the one in the settings.
        incumbent: likewise for the draft to compare with, `none` for none; default: the one in service.

    Raises:
        DraftNotFoundError: the registry has no such draft.
        DraftRefusedError: a draft in the registry is damaged, or the candidate is the draft in service.
        ConfigurationError: weights cannot be read.
    """
    weights = load_weights(target or settings.model)
    revision = registry.find(candidate)
    mine = load_weights(registry.weights(revision))
    other = _incumbent(registry, directory, settings, weights.digest, incumbent)
    if other is not None and other.digest == mine.digest:
        message = f"{mine.digest} is the draft it would be compared with: there is nothing to evaluate"
        raise DraftRefusedError(f"{message}; name another with --incumbent")
    record, _wrong = parse_record(mine.training)
    lint = lint_pair(weights, mine, context=settings.max_model_len)
    return Contest(
        target=weights,
        candidate=mine,
        incumbent=other,
        objections=objections(record, revision.target, weights.digest, lint),
    )


def _incumbent(
    registry: DraftRegistry, directory: Path, settings: WorkerSettings, target: str, name: str | None
) -> Weights | None:
    if name == NO_DRAFT:
        return None
    standing = read_standing(directory, target).draft if name is None else name
    if standing is not None:
        return load_weights(registry.weights(registry.find(standing)))
    if settings.method != "eagle3" or settings.draft is None:
        return None
    inspect_weights(settings.draft)
    return load_weights(settings.draft)
