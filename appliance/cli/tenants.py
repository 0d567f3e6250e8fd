"""`appliance tenant`: manages tenants, their models, priority and limits."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from appliance.cli.common.options import (
    ConfigOption,
    DataOption,
    JsonOption,
    print_json,
    settings_from,
    wall_clock,
)
from appliance.cli.keys import show_state
from appliance.cli.register import change_roster, open_sealing, parse_limit_words, parse_names, read_roster
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.files import write_private
from appliance.tenancy import Tenant, encode_tenants, parse_tenants
from appliance.tenancy.directory import callers_of
from appliance.tenancy.edits import change_tenant, create_tenant, delete_tenant, import_tenants, merge_patch
from appliance.tenancy.file import describe_key, encode_policy
from appliance.tenancy.roster import find_tenant

STANDARD_STREAM = Path("-")

commands = typer.Typer(help="Manage tenants: models, priority, limits, permissions.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(help="Name of the tenant.")]
ModelsOption = Annotated[str | None, typer.Option(help="Models it may use: a,b; '*' for all, '' for none.")]
SpeculationOption = Annotated[str | None, typer.Option("--speculation", help="auto or off.")]
ContentOption = Annotated[
    str | None, typer.Option(help="Content in the audit log: none, digest or encrypted.")
]
PriorityOption = Annotated[str | None, typer.Option("--priority", help="interactive, standard or batch.")]
MayOption = Annotated[
    str | None, typer.Option(help="Permissions: priority,lora,remote_media,train_drafts; '' for none.")
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        help="requests_per_minute=60 or MODEL:tokens_per_day=10000; =none for no limit; repeatable."
    ),
]


@commands.command()
def create(
    name: NameArgument,
    models: ModelsOption = None,
    speculation: SpeculationOption = None,
    content: ContentOption = None,
    priority: PriorityOption = None,
    may: MayOption = None,
    limit: LimitOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create a tenant; then create its keys with `appliance key create`."""
    members = merge_patch({}, _members(models, speculation, content, priority, may, limit))
    change_roster(settings_from(config, data), lambda tenants: create_tenant(tenants, name, members))
    typer.echo(f"{name} is created; `appliance key create {name}` makes a key for it")


@commands.command(name="set")
def change(
    name: NameArgument,
    models: ModelsOption = None,
    speculation: SpeculationOption = None,
    content: ContentOption = None,
    priority: PriorityOption = None,
    may: MayOption = None,
    limit: LimitOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Change a tenant; options that are not given keep their values."""
    _change(config, data, name, _members(models, speculation, content, priority, may, limit))
    typer.echo(f"{name} is changed")


@commands.command()
def disable(name: NameArgument, config: ConfigOption = None, data: DataOption = None) -> None:
    """Disable a tenant: its keys stop working until you enable it again."""
    _change(config, data, name, {"disabled": True})
    typer.echo(f"{name} is disabled")


@commands.command()
def enable(name: NameArgument, config: ConfigOption = None, data: DataOption = None) -> None:
    """Enable a disabled tenant: its keys work again."""
    _change(config, data, name, {"disabled": False})
    typer.echo(f"{name} is enabled")


@commands.command()
def delete(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,  # noqa: FBT002
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Delete a tenant and all its keys; its audit entries stay."""
    if not yes:
        typer.confirm(f"Remove the tenant {name} and all its keys?", abort=True)
    change_roster(settings_from(config, data), lambda tenants: delete_tenant(tenants, name))
    typer.echo(f"{name} is removed")


@commands.command(name="list")
def list_tenants(
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """List tenants: name, state, priority, models, number of valid keys."""
    now = wall_clock()
    tenants = read_roster(settings_from(config, data)).tenants
    if as_json:
        print_json([_described(tenant, now) for tenant in tenants])
        return
    for tenant in tenants:
        state = "disabled" if tenant.disabled else "enabled"
        keys = sum(key.is_valid_at(now) for key in tenant.keys)
        models = ", ".join(tenant.models) or "no model"
        count = "1 key" if keys == 1 else f"{keys} keys"
        typer.echo(f"{tenant.name}\t{state}\t{tenant.priority}\t{models}\t{count}")


@commands.command()
def show(
    name: NameArgument,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print a tenant as YAML or JSON, without digests or keys."""
    tenant = find_tenant(read_roster(settings_from(config, data)).tenants, name)
    shown = _described(tenant, wall_clock())
    if as_json:
        print_json(shown)
    else:
        typer.echo(yaml.safe_dump(shown, sort_keys=False), nl=False)


def _described(tenant: Tenant, now: float) -> dict[str, Any]:
    keys = [
        {
            "key_id": key_id,
            "admin": caller.key.admin,
            "state": show_state(caller, now),
            **describe_key(caller.key),
        }
        for key_id, caller in callers_of(tenant).items()
    ]
    return {"name": tenant.name, **encode_policy(tenant), "keys": keys}


@commands.command(name="import")
def import_file(
    file: Annotated[Path, typer.Argument(help="The tenants file (YAML); - for standard input.")],
    prune: Annotated[  # noqa: FBT002
        bool, typer.Option("--prune", help="Delete tenants and keys that are not in the file.")
    ] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create and change tenants and keys from a file; idempotent."""
    wanted = parse_tenants(_read(file))
    changed = change_roster(
        settings_from(config, data),
        lambda tenants: import_tenants(tenants, wanted, prune=prune, now=wall_clock()),
    )
    typer.echo(f"{len(wanted)} tenants are as {file} has them; there are {len(changed.tenants)} in all")


@commands.command()
def export(
    file: Annotated[
        Path, typer.Argument(help="File to write, with mode 0600; - for standard output.")
    ] = STANDARD_STREAM,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Write all tenants for `import`: with digests of keys, without keys."""
    text = encode_tenants(read_roster(settings_from(config, data)).tenants)
    if file == STANDARD_STREAM:
        typer.echo(text, nl=False)
        return
    try:
        write_private(file, text)
    except OSError as error:
        raise ConfigurationError(f"cannot write {file} ({error.strerror})") from error


@commands.command()
def seal(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,  # noqa: FBT002
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Compute the MAC of all tenants and keys again, after comparing them with the audit log."""
    settings = settings_from(config, data)
    with open_sealing(settings) as (plan, apply):
        typer.echo(encode_tenants(plan.before.tenants), nl=False)
        if not (mac_key := locate(settings).tenants_mac_key).exists():
            typer.echo(f"{mac_key} does not exist: a new key is made, which every gateway then needs")
        for finding in plan.findings:
            typer.echo(f"NOT IN THE LOG  {finding}")
        if plan.is_recorded:
            typer.echo("The audit log announced exactly these tenants and keys.")
        else:
            typer.echo(
                "The audit log did not announce these tenants and keys as the newest. It has no policies of "
                "tenants, and no models, scopes, expiry and digests of keys: if something changed the "
                "database, check those above, or restore it from a backup; rotate every key whose digest may "
                "have changed."
            )
            if yes and (plan.was_sealed or plan.findings):
                raise ConfigurationError(
                    "--yes is only for tenants and keys that the log announced, or agrees with before their "
                    "first MAC: confirm this by hand"
                )
        if not yes:
            typer.confirm("Seal them?", abort=True)
        sealed = apply()
    typer.echo(f"sealed: {len(sealed.tenants)} tenants, generation {sealed.generation}")


def _change(config: Path | None, data: Path | None, name: str, members: dict[str, Any]) -> None:
    change_roster(settings_from(config, data), lambda tenants: change_tenant(tenants, name, members))


def _members(
    models: str | None,
    speculation: str | None,
    content: str | None,
    priority: str | None,
    may: str | None,
    limits: list[str] | None,
) -> dict[str, Any]:
    named: dict[str, Any] = {
        "models": None if models is None else parse_names(models),
        "speculation": speculation,
        "content": content,
        "priority": priority,
        "may": None if may is None else parse_names(may),
        "limits": parse_limit_words(limits) if limits else None,
    }
    return {member: value for member, value in named.items() if value is not None}


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if file == STANDARD_STREAM else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the tenants file {file}: {error}") from error
