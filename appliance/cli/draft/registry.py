"""`appliance draft list | show | import | key`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.audit.entry_types import EntryType
from appliance.cli.common.options import ConfigOption, DataOption, JsonOption, settings_from, wall_clock
from appliance.cli.draft.audit_steps import open_journal
from appliance.drafts.evaluation.store import load_evaluation, load_measured
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.lint.rules import Finding, Severity
from appliance.drafts.registry.active_draft import ActiveDraft, read_active_draft
from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.registry import SHORT, DraftRegistry
from appliance.drafts.registry.revision import Revision, is_digest
from appliance.drafts.registry.signed_origin import read_origin
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.drafts.training_record import encode_record
from appliance.errors import ConfigurationError, DraftError, DraftRefusedError
from appliance.infra.settings import Settings
from appliance.serving.weights import Weights, inspect_weights, load_weights
from appliance.speculation.values import ALL_TRAFFIC, Expectation

HEADINGS = ("draft", "target", "source", "made", "parent", "status", "expected", "measured")
NOTHING = "-"


def list_drafts(config: ConfigOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:  # noqa: FBT002
    """List the drafts of this site, oldest first, and which of them serve; reads no weights."""
    registry = open_registry(settings_from(config, data), wall_clock)
    revisions, warnings = registry.survey()
    marks = _Marks(registry.directory)
    measured = {revision.digest: marks.measured(revision) for revision in revisions}
    if as_json:
        drafts = [_as_json(revision, marks.of(revision), measured[revision.digest]) for revision in revisions]
        report = {"drafts": drafts, "warnings": [*warnings, *marks.warnings]}
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
        return
    rows = [_row(revision, marks.of(revision), measured[revision.digest]) for revision in revisions]
    for line in _aligned([HEADINGS, *rows]) if rows else ["no draft is registered"]:
        typer.echo(line)
    for warning in (*warnings, *marks.warnings):
        typer.echo(f"warning: {warning}", err=True)


def show(
    draft: Annotated[str, typer.Argument(help="Digest of the draft, or a prefix of it.")],
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,  # noqa: FBT002
) -> None:
    """
    Show everything about a draft; its weights are read and verified.

    It is linted if `worker.model` is its target.  The exit code is 0 whatever lint finds.
    """
    settings = settings_from(config, data)
    registry = open_registry(settings, wall_clock)
    revision = registry.find(draft)
    weights, marks = registry.weights(revision), _Marks(registry.directory)
    known = _as_json(revision, marks.of(revision), marks.measured(revision))
    known |= {
        "dataset": revision.dataset,
        "record": encode_record(revision.record),
        "weights": str(weights),
        "lint": _linted(settings, revision, weights),
        "evaluation": _evaluated(registry, revision),
    }
    if as_json:
        typer.echo(json.dumps(known, indent=2, ensure_ascii=False))
    else:
        for name, value in known.items():
            for first, line in enumerate(_as_lines(value)):
                typer.echo(f"{'' if first else name:<11}{line}")
    for warning in marks.warnings:
        typer.echo(f"warning: {warning}", err=True)


def import_draft(
    path: Annotated[Path, typer.Argument(help="Directory of the draft, or of a registered one.")],
    target: Annotated[
        str | None, typer.Option(help="Directory or digest of its target; default: worker.model.")
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(help="Its revision.sig, if it is not in that directory.")
    ] = None,
    vouch: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--vouch", help="Vouch for an unsigned draft.")
    ] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Register a draft made elsewhere; it serves no traffic yet.

    It must be signed by a key in `drafts.trusted_keys_file`, or an operator vouches for it with `--vouch`;
    and it must fit its target.
    """
    settings = settings_from(config, data)
    registry = open_registry(settings, wall_clock)
    source = read_source(path)
    origin = read_origin(
        source, signature=signature, vouched=vouch, trusted=registry.trusted, now=wall_clock()
    )
    # Last, because it reads the whole target.
    served = _target(settings, target)
    if origin is not None:
        origin.check_target(served.digest)
    findings = lint_pair(served, source.weights, context=settings.worker.max_model_len)
    for finding in findings:
        typer.echo(_line(finding), err=True)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise DraftRefusedError(f"the draft in {source.home} does not fit the target in {served.path}")
    if (known := registry.registered(source, target=served.digest)) is not None:
        typer.echo(f"{known.digest} is already registered; nothing changed")
        return
    signer = site_signer(settings)
    # First the entry: a draft that cannot be recorded is not registered.
    open_journal(settings)(
        EntryType.DRAFT_IMPORTED,
        {
            "draft": source.digest,
            "target": served.digest,
            "signer": signer.verifier_key.name if origin is None else origin.signer,
            "parent": source.record.parent,
            "dataset": source.record.dataset,
            "record": source.record_hash,
        },
    )
    revision = registry.register(source, target=served.digest, how="imported", signer=signer, origin=origin)
    by = "vouched for by you" if revision.origin is None else f"signed by {revision.origin}"
    typer.echo(f"{revision.digest} is registered, {by}; measure it with `appliance draft evaluate`")


def key(config: ConfigOption = None, data: DataOption = None) -> None:
    """
    Print the public key that signs this site's drafts, in the format of `drafts.trusted_keys_file`.

    The key is made on first use, unless `drafts.signing_key_file` is set.
    """
    typer.echo(site_signer(settings_from(config, data)).vkey)


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_drafts,
    "show": show,
    "import": import_draft,
    "key": key,
}


class _Marks:
    """Active drafts, read once per target, and measured acceptance."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._active: dict[str, ActiveDraft] = {}
        self.warnings: list[str] = []

    def of(self, revision: Revision) -> list[str]:
        """Whether a draft serves its target, is a candidate, or served before."""
        active = self._active.get(revision.target)
        if active is None:
            try:
                active = read_active_draft(self._directory, revision.target)
            except DraftError as error:
                self.warnings.append(str(error))
                active = ActiveDraft(target=revision.target)
            self._active[revision.target] = active
        marks = ["serving"] if active.draft == revision.digest else []
        marks += ["candidate"] if active.candidate == revision.digest else []
        marks += ["previous"] if revision.digest in active.previous else []
        return marks

    def measured(self, revision: Revision) -> Expectation | None:
        """Acceptance measured by its evaluation over all traffic; None without a complete one."""
        try:
            return load_measured(self._directory, revision.digest, revision.target).get(ALL_TRAFFIC)
        except DraftError as error:
            self.warnings.append(str(error))
            return None


def _as_json(revision: Revision, marks: list[str], measured: Expectation | None) -> dict[str, Any]:
    expected = encode_record(revision.record).get("expected", {}).get(ALL_TRAFFIC)
    return {
        "digest": revision.digest,
        "target": revision.target,
        "source": revision.source,
        "origin": revision.origin,
        "made": revision.made,
        "parent": revision.parent,
        "status": marks,
        "expected": expected,
        "measured": None if measured is None else asdict(measured),
    }


def _row(revision: Revision, marks: list[str], measured: Expectation | None) -> tuple[str, ...]:
    return (
        revision.hex[:SHORT],
        revision.target.removeprefix("sha256:")[:SHORT],
        revision.source,
        revision.made[:10],
        NOTHING if revision.parent is None else revision.parent.removeprefix("sha256:")[:SHORT],
        ", ".join(marks) or NOTHING,
        _length(revision.record.expected.get(ALL_TRAFFIC)),
        _length(measured),
    )


def _length(accepted: Expectation | None) -> str:
    return NOTHING if accepted is None else f"{accepted.acceptance_length:.2f} at K={accepted.draft_tokens}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _target(settings: Settings, named: str | None) -> Weights:
    """The target's weights with their digest, which lint needs."""
    typer.echo("reading the target's weights", err=True)
    if named is None or not is_digest(named):
        return load_weights(settings.worker.model if named is None else Path(named))
    weights = load_weights(settings.worker.model)
    if weights.digest != named:
        raise ConfigurationError(
            f"the target {named} is not in {weights.path} (worker.model), so the draft cannot be "
            "checked against it: give its directory with --target"
        )
    return weights


def _linted(settings: Settings, revision: Revision, weights: Path) -> dict[str, Any] | None:
    """The lint findings of a draft; None if the settings name another target."""
    try:
        target = load_weights(settings.worker.model)
    except ConfigurationError:
        return None
    if target.digest != revision.target:
        return None
    findings = lint_pair(target, inspect_weights(weights), context=settings.worker.max_model_len)
    return {"target": str(target.path), "findings": [_line(finding) for finding in findings]}


def _evaluated(registry: DraftRegistry, revision: Revision) -> dict[str, Any] | None:
    """The verdict of its evaluation; None without one."""
    try:
        evaluation = load_evaluation(registry.directory, revision.digest)
    except DraftError as error:
        return {"verdict": "unreadable", "reasons": [str(error)]}
    if evaluation is None:
        return None
    return {"verdict": str(evaluation.verdict), "reasons": list(evaluation.reasons)}


def _line(finding: Finding) -> str:
    return f"{finding.severity}: {finding.rule}: {finding.message}; {finding.advice}"


def _as_lines(value: object) -> list[str]:
    """A value for people, as lines: texts one by one, a group by its names, nothing as a dash."""
    if isinstance(value, dict):
        lines = [f"{name}: {word}" for name, part in value.items() for word in _as_lines(part)]
        return lines or [NOTHING]
    if isinstance(value, list):
        words = [word for part in value for word in _as_lines(part)]
        return words if any(isinstance(part, str) for part in value) else [", ".join(words) or NOTHING]
    if value is None:
        return [NOTHING]
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
