"""`appliance draft provenance`: the training data of a draft, and later erasures of it."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.entry_types import EntryType
from appliance.cli.common.audit_log import open_store
from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.draft.lint import count_of
from appliance.drafts.harvest.dataset import find_manifest
from appliance.drafts.harvest.provenance import ErasedSample, Provenance, first_training, parse_used, trace
from appliance.drafts.registry.revision import Revision
from appliance.drafts.registry.site_registry import open_registry
from appliance.errors import ConfigurationError, DraftNotFoundError, DraftRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings
from appliance.serving.weights import TRAINING_RECORD

USED = "used.txt"
MAX_SHOWN = 10
"""Maximum requests listed; `--json` lists all."""


def provenance(
    draft: Annotated[str, typer.Argument(help="Digest of the draft, or a prefix of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - a flag
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Show whose requests a draft was trained on, and whether any of them were erased.

    The exit code is 1 if a request was erased before the training, or is not in the data set.
    """
    settings = settings_from(config, data)
    with open_store(settings):  # fails if the tables are missing or outdated
        pass
    registry = open_registry(settings, wall_clock)
    revision = registry.find(draft)
    found = _trace(settings, revision, registry.weights(revision))
    if as_json:
        shown = {"draft": revision.digest, "sound": found.is_sound, **asdict(found)}
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        for name, value in _report(revision, found):
            typer.echo(f"{name:<15}{value}")
    sys.exit(0 if found.is_sound else 1)


COMMANDS: dict[str, Callable[..., None]] = {"provenance": provenance}


def _trace(settings: Settings, revision: Revision, weights: Path) -> Provenance:
    record = _record(weights)
    if revision.dataset is None or "used" not in record:
        raise DraftNotFoundError(
            f"the draft {revision.digest} has no training data on record: it was not trained by "
            "`appliance draft train`"
        )
    try:
        used = parse_used((weights / USED).read_bytes(), record["used"])
    except OSError as error:
        raise DraftRefusedError(f"cannot read {weights / USED}: {error.strerror}") from error
    manifest = find_manifest(locate(settings).drafts, revision.dataset)
    with closing(SqlPayloadStore(locate(settings).database_url)) as store:
        trainings = store.entries(EntryType.DRAFT_TRAINED)
        erasures = store.entries(EntryType.ERASURE)
    trained = first_training(revision.digest, trainings)
    _check_record(weights, [entry for index, entry in trainings if index == trained])
    return trace(used, manifest, erasures, trained=trained)


def _record(weights: Path) -> dict[str, Any]:
    try:
        record = json.loads((weights / TRAINING_RECORD).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {weights / TRAINING_RECORD}: {error}") from error
    return record if isinstance(record, dict) else {}


def _check_record(weights: Path, entries: list[Mapping[str, Any]]) -> None:
    """Check that the training record, which names the list of used samples, is the one in the log."""
    digest = hashlib.sha256((weights / TRAINING_RECORD).read_bytes()).hexdigest()
    for entry in entries:
        if str(entry.get("record", "")).removeprefix("sha256:") != digest:
            raise DraftRefusedError(
                f"{weights / TRAINING_RECORD} differs from the training record in the log: it was altered"
            )


def _report(revision: Revision, found: Provenance) -> list[tuple[str, str]]:
    lines = [
        ("draft", revision.digest),
        ("data set", str(found.dataset)),
        ("trained", "not in the log" if found.trained is None else f"entry {found.trained}"),
        ("samples", f"{found.used} of {count_of(len(found.tenants), 'tenant')}"),
        *(("", f"{tenant}: {count}") for tenant, count in found.tenants.items()),
    ]
    if found.unknown:
        lines.append(("unknown", f"{len(found.unknown)} used requests are not in the data set"))
        lines += [("", request) for request in found.unknown[:MAX_SHOWN]]
    lines += _erased("erased before", found.erased_before)
    lines += _erased("erased since", found.erased_since)
    return [*lines, ("verdict", _verdict(found))]


def _erased(name: str, covered: tuple[ErasedSample, ...]) -> list[tuple[str, str]]:
    if not covered:
        return [(name, "none")]
    counts = Counter(each.tenant for each in covered)
    summary = ", ".join(f"{count} of {tenant}" for tenant, count in sorted(counts.items()))
    more = [("", f"and {len(covered) - MAX_SHOWN} more")] if len(covered) > MAX_SHOWN else []
    named = [("", f"{each.request_id} by entry {each.index}") for each in covered[:MAX_SHOWN]]
    return [(name, summary), *named, *more]


def _verdict(found: Provenance) -> str:
    if found.erased_before:
        return "not sound: it was trained on erased requests; take it out of service and train another"
    if found.unknown:
        return "not sound: it was trained on requests outside its data set; take it out of service"
    if found.erased_since:
        return (
            "sound; but the draft still contains what it learned from requests erased since: harvest again, "
            "train and promote another, or take it out of service with `appliance draft rollback`"
        )
    return "sound: no request it was trained on was erased"
