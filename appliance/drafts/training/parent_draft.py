"""Finds the draft that a training starts from: by default the draft in service."""

from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.lint.rules import Severity
from appliance.drafts.registry.active_draft import read_active_draft
from appliance.drafts.registry.registry import DraftRegistry
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.infra.settings import Settings
from appliance.serving.weights import Weights, inspect_weights, load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentDraft:
    path: Path
    digest: str


def choose_parent(
    settings: Settings, registry: DraftRegistry, target: Weights, named: str | None
) -> ParentDraft:
    """`named` is a directory, or a registered draft's digest or its prefix; default: the draft in service."""
    if named is not None and Path(named).is_dir():
        weights = load_weights(Path(named))
        parent = ParentDraft(path=weights.path, digest=weights.digest)
    else:
        digest = named or read_active_draft(registry.directory, target.digest).draft
        if digest is None:
            parent = _settings_draft(settings)
        else:
            revision = registry.find(digest)
            parent = ParentDraft(path=registry.weights(revision), digest=revision.digest)
    refuse_misfit(target, parent.path)
    return parent


def refuse_misfit(target: Weights, draft: Path, *, context: int | None = None) -> None:
    """Raise DraftRefusedError, with the first reason, if vLLM would not serve a draft with its target."""
    findings = lint_pair(target, inspect_weights(draft), context=context)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise DraftRefusedError(
            f"the draft in {draft} does not fit its target: {errors[0].message}; {errors[0].advice}"
        )


def _settings_draft(settings: Settings) -> ParentDraft:
    draft = settings.worker.draft
    if draft is None or settings.worker.method != "eagle3":
        raise DraftRefusedError("no draft serves this target: give one with --from, or use --from-scratch")
    try:
        weights = load_weights(draft)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; give a draft with --from, or use --from-scratch") from error
    return ParentDraft(path=weights.path, digest=weights.digest)
