from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.evaluation.arms import Arm, Served
from appliance.drafts.evaluation.verdict import objections
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.registry.active_draft import read_active_draft
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.training_record import parse_record
from appliance.errors import DraftRefusedError
from appliance.infra.settings import WorkerSettings
from appliance.serving.weights import Weights, inspect_weights, load_weights

NO_DRAFT = "none"
"""As `incumbent`: compare with the target alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The weights of an evaluation; every digest was computed from the bytes that will be served."""

    target: Weights
    candidate: Weights
    incumbent: Weights | None
    """None if the target serves without a draft."""
    objections: tuple[str, ...]
    """Why the candidate must not be loaded; one line each."""

    @property
    def arms(self) -> dict[Arm, Served]:
        arms = {Arm.TARGET: Served(target=self.target)}
        if self.incumbent is not None:
            arms[Arm.INCUMBENT] = Served(target=self.target, draft=self.incumbent)
        return arms | {Arm.CANDIDATE: Served(target=self.target, draft=self.candidate)}


def open_comparison(
    registry: DraftRegistry,
    directory: Path,
    settings: WorkerSettings,
    *,
    candidate: str,
    target: Path | None = None,
    incumbent: str | None = None,
) -> Comparison:
    """
    Load and digest all weights.

    Args:
        registry: of drafts.
        directory: of that registry.
        settings: the `worker` section.
        candidate: digest of a registered draft, or a prefix.
        target: directory of the target; default: the one in the settings.
        incumbent: as `candidate`, or `none`; default: the draft in service.

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
    return Comparison(
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
    draft = read_active_draft(directory, target).draft if name is None else name
    if draft is not None:
        return load_weights(registry.weights(registry.find(draft)))
    if settings.method != "eagle3" or settings.draft is None:
        return None
    inspect_weights(settings.draft)
    return load_weights(settings.draft)
