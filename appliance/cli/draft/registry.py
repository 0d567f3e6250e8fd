"""
`appliance draft list | show | import | key`: the drafts of this site, and how one from elsewhere becomes one.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.audit.registry import EntryType
from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.cli.draft.journal import open_journal
from appliance.drafts.evaluation.store import load_evaluation, load_measured
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.lint.rules import Finding, Severity
from appliance.drafts.record import encode_record
from appliance.drafts.registry.opening import open_registry, site_signer
from appliance.drafts.registry.origin import read_origin
from appliance.drafts.registry.registry import SHORT, DraftRegistry
from appliance.drafts.registry.revision import Revision, is_digest
from appliance.drafts.registry.source import read_source
from appliance.drafts.registry.standing import Standing, read_standing
from appliance.errors import ConfigurationError, DraftError, DraftRefusedError
from appliance.infra.settings import Settings
from appliance.serving.weights import Weights, inspect_weights, load_weights
from appliance.speculation.values import ALL_TRAFFIC, Expectation

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HEADINGS = ("draft", "target", "source", "made", "parent", "standing", "expected", "measured")
NOTHING = "-"


def list_drafts(config: ConfigOption = None, data: DataOption = None, as_json: JsonOption = False) -> None:  # noqa: FBT002
    """List the drafts of this site, oldest first, and which of them serve; no weights are read."""
    registry = open_registry(settings_from(config, data), time.time)  # noqa: TID251 - a command is a composition root
    revisions, complaints = registry.survey()
    marks = _Marks(registry.directory)
    measured = {revision.digest: marks.measured(revision) for revision in revisions}
    if as_json:
        drafts = [
            _described(revision, marks.of(revision), measured[revision.digest]) for revision in revisions
        ]
        warnings = [*complaints, *marks.complaints]
        typer.echo(json.dumps({"drafts": drafts, "warnings": warnings}, indent=2, ensure_ascii=False))
        return
    rows = [_row(revision, marks.of(revision), measured[revision.digest]) for revision in revisions]
    for line in _aligned([HEADINGS, *rows]) if rows else ["no draft is registered"]:
        typer.echo(line)
    for complaint in (*complaints, *marks.complaints):
        typer.echo(f"warning: {complaint}", err=True)


def show(
    draft: Annotated[str, typer.Argument(help="Digest of the draft, or the beginning of it.")],
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,  # noqa: FBT002
) -> None:
    """
    Show all that is known of a draft; its weights are read and checked.

    It is linted against `worker.model` where that is its target.  The exit code is 0 whatever lint finds.
    """
    settings = settings_from(config, data)
    registry = open_registry(settings, time.time)  # noqa: TID251 - a command is a composition root
    revision = registry.find(draft)
    weights, marks = registry.weights(revision), _Marks(registry.directory)
    known = _described(revision, marks.of(revision), marks.measured(revision))
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
            for first, line in enumerate(_in_words(value)):
                typer.echo(f"{'' if first else name:<11}{line}")
    for complaint in marks.complaints:
        typer.echo(f"warning: {complaint}", err=True)


def import_draft(
    path: Annotated[Path, typer.Argument(help="Directory of the draft, or of one as a registry has it.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help="Directory or digest of its target; default: worker.model."),
    ] = None,
    signature: Annotated[
        Path | None, typer.Option("--signature", help="Its revision.sig, where that came apart from it.")
    ] = None,
    vouch: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--vouch", help="Answer for a draft that nobody has signed.")
    ] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Register a draft that was made elsewhere; it serves nobody yet.

    It needs the signature of a key in `drafts.trusted_keys_file`, or an operator who answers for it with
    `--vouch`; and it has to fit its target.
    """
    settings = settings_from(config, data)
    registry = open_registry(settings, time.time)  # noqa: TID251 - a command is a composition root
    source = read_source(path)
    origin = read_origin(
        source,
        signature=signature,
        vouched=vouch,
        trusted=registry.trusted,
        now=time.time(),  # noqa: TID251 - likewise
    )
    # Last, since it reads the whole target.
    served = _target(settings, target)
    if origin is not None:
        origin.check_target(served.digest)
    findings = lint_pair(served, source.weights, context=settings.worker.max_model_len)
    for finding in findings:
        typer.echo(_line(finding), err=True)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise DraftRefusedError(f"the draft in {source.home} does not fit the target in {served.path}")
    if (known := registry.registered(source, target=served.digest)) is not None:
        typer.echo(f"{known.digest} was registered already, nothing was changed")
        return
    signer = site_signer(settings)
    # Before it can be used: what cannot be recorded is not registered.
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
    by = "on your word" if revision.origin is None else f"signed by {revision.origin}"
    typer.echo(f"{revision.digest} is registered, {by}; `appliance draft evaluate` tells what it is worth")


def key(config: ConfigOption = None, data: DataOption = None) -> None:
    """
    Print the public key that vouches for this site's drafts, as `drafts.trusted_keys_file` takes it.

    The key is made where there is none yet, unless `drafts.signing_key_file` places it.
    """
    typer.echo(site_signer(settings_from(config, data)).vkey)


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_drafts,
    "show": show,
    "import": import_draft,
    "key": key,
}
"""By name below `appliance draft`."""


class _Marks:
    """What is decided about drafts, read once for each target, and what evaluations measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._standings: dict[str, Standing] = {}
        self.complaints: list[str] = []

    def of(self, revision: Revision) -> list[str]:
        """Whether a draft serves its target, is tried, or served before."""
        standing = self._standings.get(revision.target)
        if standing is None:
            try:
                standing = read_standing(self._directory, revision.target)
            except DraftError as error:
                self.complaints.append(str(error))
                standing = Standing(target=revision.target)
            self._standings[revision.target] = standing
        marks = ["serving"] if standing.draft == revision.digest else []
        marks += ["candidate"] if standing.candidate == revision.digest else []
        marks += ["previous"] if revision.digest in standing.previous else []
        return marks

    def measured(self, revision: Revision) -> Expectation | None:
        """What its evaluation measured it to accept, of all traffic; None where none was completed."""
        try:
            return load_measured(self._directory, revision.digest, revision.target).get(ALL_TRAFFIC)
        except DraftError as error:
            self.complaints.append(str(error))
            return None


def _described(revision: Revision, marks: list[str], measured: Expectation | None) -> dict[str, Any]:
    expected = encode_record(revision.record).get("expected", {}).get(ALL_TRAFFIC)
    return {
        "digest": revision.digest,
        "target": revision.target,
        "source": revision.source,
        "origin": revision.origin,
        "made": revision.made,
        "parent": revision.parent,
        "standing": marks,
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
    """The target's weights, with their digest: without them nobody could tell whether a draft fits."""
    typer.echo("reading the target's weights", err=True)
    if named is None or not is_digest(named):
        return load_weights(settings.worker.model if named is None else Path(named))
    weights = load_weights(settings.worker.model)
    if weights.digest != named:
        raise ConfigurationError(
            f"the target {named} is not in {weights.path} (worker.model), so nobody can tell whether the "
            "draft fits it: name its directory with --target"
        )
    return weights


def _linted(settings: Settings, revision: Revision, weights: Path) -> dict[str, Any] | None:
    """What lint says of a draft; None where its target is not the one of the settings."""
    try:
        target = load_weights(settings.worker.model)
    except ConfigurationError:
        return None
    if target.digest != revision.target:
        return None
    findings = lint_pair(target, inspect_weights(weights), context=settings.worker.max_model_len)
    return {"target": str(target.path), "findings": [_line(finding) for finding in findings]}


def _evaluated(registry: DraftRegistry, revision: Revision) -> dict[str, Any] | None:
    """The verdict of its evaluation; None where it has none."""
    try:
        evaluation = load_evaluation(registry.directory, revision.digest)
    except DraftError as error:
        return {"verdict": "unreadable", "reasons": [str(error)]}
    if evaluation is None:
        return None
    return {"verdict": str(evaluation.verdict), "reasons": list(evaluation.reasons)}


def _line(finding: Finding) -> str:
    return f"{finding.severity}: {finding.rule}: {finding.message}; {finding.advice}"


def _in_words(value: object) -> list[str]:
    """A value for people, as lines: texts one by one, a group by its names, nothing as a dash."""
    if isinstance(value, dict):
        lines = [f"{name}: {word}" for name, part in value.items() for word in _in_words(part)]
        return lines or [NOTHING]
    if isinstance(value, list):
        words = [word for part in value for word in _in_words(part)]
        return words if any(isinstance(part, str) for part in value) else [", ".join(words) or NOTHING]
    if value is None:
        return [NOTHING]
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
