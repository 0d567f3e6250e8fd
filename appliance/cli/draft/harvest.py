"""`appliance draft harvest`."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.audit.content.payloads import first_id
from appliance.audit.content.samples import SqlSampleStore
from appliance.audit.reading import MAX_PURPOSE_CHARACTERS
from appliance.cli.common.audit_log import open_store
from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.draft.audit_steps import open_journal
from appliance.drafts.harvest.candidate import POLICY, HarvestCandidate, HarvestFilter, allows
from appliance.drafts.harvest.content_vault import open_vault
from appliance.drafts.harvest.conversation import Skipped
from appliance.drafts.harvest.dataset_manifest import DatasetManifest, ManifestEntry
from appliance.drafts.harvest.harvest import HarvestPurpose, HarvestTools, Survey, harvest, preview, survey
from appliance.drafts.harvest.selection import SampleSelection, SelectionLimits
from appliance.drafts.harvest.tokenizer import digest_tokenizer, open_tokenizer
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings, process_environment
from appliance.serving.weights import load_weights
from appliance.sovereignty.environment import offline_environment
from appliance.tenancy import Tenant
from appliance.tenancy.moments import parse_moment
from appliance.tenancy.store import open_tenant_store

ANY_LENGTH = 32768
"""Maximum tokens of a sample if the target's config states no context."""


def harvest_samples(
    target: Annotated[
        Path | None, typer.Option(help="Directory of the target; default: worker.model.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Name it is served under; default: its directory's; repeatable.")
    ] = None,
    max_samples: Annotated[int, typer.Option(min=1, help="Maximum samples.")] = 5000,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of all samples together.")
    ] = None,
    per_stratum: Annotated[
        int | None, typer.Option(min=1, help="Maximum samples per template and context length.")
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of one sample; default: the target's context.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only requests since this time (RFC 3339) or date (UTC).")
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Only this tenant; repeatable; default: all that allow training.")
    ] = None,
    other_weights: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--other-weights", help="Include answers of other weights of the model.")
    ] = False,
    seed: Annotated[str, typer.Option(help="Seed of the random choice.")] = "1",
    purpose: Annotated[str, typer.Option(help="Reason, recorded in the audit log.")] = "",
    dry_run: Annotated[  # noqa: FBT002 - as above
        bool, typer.Option("--dry-run", help="Show what would be harvested; reads no content.")
    ] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Make training samples from kept content of tenants that may `train_drafts`.

    The harvest is recorded in the audit log before content is read.  Samples are sealed with the content
    they were made from and are erased with it.  A dry run reads only the log and is not recorded.
    """
    settings = settings_from(config, data)
    if len(purpose) > MAX_PURPOSE_CHARACTERS or not purpose.isprintable():
        message = f"--purpose takes one line of at most {MAX_PURPOSE_CHARACTERS} characters"
        raise ConfigurationError(message)
    start = "" if since is None else first_id(parse_moment("--since", since) * 1000)
    with open_store(settings):  # fails if the tables are missing or outdated
        pass
    chosen = _permitted(settings, tenant or [])
    weights = load_weights(target or settings.worker.model)
    is_served = weights.path == settings.worker.model.absolute()
    name = (settings.worker.served_name if is_served else None) or weights.path.name
    wanted = HarvestFilter(
        models=frozenset(model or [name]),
        weights=weights.digest,
        any_weights=other_weights,
        longest=_longest(longest, settings.worker.max_model_len if is_served else None, weights.config),
    )
    with closing(SqlSampleStore(locate(settings).database_url)) as store:
        surveyed = survey(store.answered(chosen, since=start), wanted)
    bounds = SelectionLimits(samples=max_samples, tokens=max_tokens, per_stratum=per_stratum)
    selection = SampleSelection(surveyed.candidates, bounds, seed=seed)
    if dry_run:
        _show_preview(chosen, surveyed, selection)
        return
    aim = HarvestPurpose(target=weights.digest, tokenizer=digest_tokenizer(weights.path), text=purpose)
    environment = offline_environment(process_environment(), plugins=())
    with (
        open_tokenizer(weights.path, environment) as tokenizer,
        open_vault(settings, clock=wall_clock) as vault,
    ):
        manifest, skipped = harvest(
            surveyed,
            selection,
            aim,
            HarvestTools(
                samples=vault,
                tokenizer=tokenizer,
                journal=open_journal(settings),
                permitted=lambda: frozenset(each.name for each in _tenants(settings) if allows(each)),
                clock=wall_clock,
                drafts=locate(settings).drafts,
            ),
        )
    _show(manifest, skipped)


COMMANDS: dict[str, Callable[..., None]] = {"harvest": harvest_samples}


def _permitted(settings: Settings, named: list[str]) -> list[str]:
    """The named tenants, or all that allow harvesting."""
    permitted = [tenant.name for tenant in _tenants(settings) if allows(tenant)]
    for name in named:
        if name not in permitted:
            raise DraftRefusedError(
                f"{name} does not allow training: once it has agreed, run "
                f"`appliance tenant set {name} --content encrypted --may ...,train_drafts`"
            )
    if not permitted:
        raise DraftRefusedError(
            f"no tenant allows training ({POLICY}): see `--content` and `--may` of `appliance tenant set`"
        )
    return sorted(set(named)) or permitted


def _tenants(settings: Settings) -> tuple[Tenant, ...]:
    with closing(open_tenant_store(locate(settings))) as store:
        return store.read().tenants


def _longest(requested: int | None, served: int | None, config: Mapping[str, Any]) -> int:
    """Maximum tokens of one sample: the requested value, limited by the target's context."""
    inner = config.get("text_config")
    known = (config, inner if isinstance(inner, dict) else {})
    stated = [each["max_position_embeddings"] for each in known if each.get("max_position_embeddings")]
    bounds = [bound for bound in (requested, served, *stated[:1]) if isinstance(bound, int)]
    return min(bounds, default=ANY_LENGTH)


def _show_preview(tenants: list[str], surveyed: Survey, selection: SampleSelection) -> None:
    chosen = preview(selection)
    typer.echo(f"{'allowed':<12}{', '.join(tenants)}")
    tokens = sum(candidate.tokens for candidate in chosen)
    typer.echo(f"{'would take':<12}{len(chosen)} of {len(surveyed.candidates)} requests, {tokens} tokens")
    _show_counts("tenant", Counter(candidate.tenant for candidate in chosen))
    _show_counts("like", Counter(_stratum(candidate) for candidate in chosen))
    left = len(surveyed.candidates) - len(chosen)
    _show_counts("skipped", surveyed.skipped + Counter({Skipped.NO_ROOM: left}))
    typer.echo("the content was not checked: nothing was read or recorded")


def _show(manifest: DatasetManifest, skipped: Counter[Skipped]) -> None:
    samples = manifest.samples
    held_out = sum(entry.held_out for entry in samples)
    tokens = sum(entry.tokens for entry in samples)
    typer.echo(f"{'data set':<12}{manifest.digest}")
    typer.echo(f"{'samples':<12}{len(samples)}, {tokens} tokens, {held_out} of them held out for evaluation")
    _show_counts("tenant", Counter(entry.tenant for entry in samples))
    _show_counts("like", Counter(_stratum(entry) for entry in samples))
    _show_counts("skipped", skipped)
    if skipped[Skipped.ALTERED]:
        typer.echo("some content differs from the log's commitment: run `appliance audit verify`", err=True)


def _stratum(sample: HarvestCandidate | ManifestEntry) -> str:
    return f"{sample.template} {sample.context}"


def _show_counts(label: str, counts: Counter[Any]) -> None:
    rows: Iterable[tuple[Any, int]] = sorted(
        ((what, count) for what, count in counts.items() if count), key=lambda row: (-row[1], str(row[0]))
    )
    for what, count in rows:
        typer.echo(f"{label:<12}{count:>7}  {what}")
