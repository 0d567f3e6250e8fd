"""`appliance key`: manages tenants' API keys."""

import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.common.duration import parse_duration, show_duration
from appliance.cli.common.options import (
    ConfigOption,
    DataOption,
    JsonOption,
    print_json,
    settings_from,
    wall_clock,
)
from appliance.cli.register import change_roster, parse_expiry, parse_limit_words, parse_names, read_roster
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import Installation, locate
from appliance.infra.files import write_private
from appliance.tenancy import KEY_BYTES, KEY_FORMAT, AdminScope, Caller, make_key
from appliance.tenancy.directory import callers_of
from appliance.tenancy.edits import add_key, revoke_key, rotate_key
from appliance.tenancy.file import parse_key_limits, parse_manage_keys, parse_scopes
from appliance.tenancy.roster import find_tenant

REASON_CHARACTERS = 200

commands = typer.Typer(help="Manage tenants' API keys.", no_args_is_help=True)
KeyArgument = Annotated[str, typer.Argument(help="Id of the key: the eight characters after `sk-`.")]
ExpiresOption = Annotated[
    str | None, typer.Option(help="Expiry: after a duration (90d), or at a date or time (UTC).")
]


@commands.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    models: Annotated[
        str | None, typer.Option(help="Restrict it to these of its tenant's models: a,b.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="requests_per_minute=60 or MODEL:tokens_per_day=10000; repeatable."),
    ] = None,
    manage_keys: Annotated[  # noqa: FBT002 - a flag of the command line
        bool,
        typer.Option(
            "--manage-keys", help="Let it make further keys of the tenant, with no more than it has."
        ),
    ] = False,
    expires: ExpiresOption = None,
    admin: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--admin", help="For the admin API only.")
    ] = False,
    scope: Annotated[
        list[AdminScope] | None,
        typer.Option(help="What an admin key may do; repeatable; default: everything."),
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create a key for a tenant and show it once."""
    now = int(wall_clock())
    text, key = make_key(
        secrets.token_bytes(KEY_BYTES),
        admin=admin,
        scopes=parse_scopes("--scope", scope or None, admin=admin),
        models=None if models is None else tuple(parse_names(models)),
        limits=parse_key_limits("--limit", parse_limit_words(limit or []), admin=admin),
        manage_keys=parse_manage_keys("--manage-keys", manage_keys, admin=admin),
        created_at=now,
        expires_at=parse_expiry(expires, now),
    )
    change_roster(settings_from(config, data), lambda tenants: add_key(tenants, tenant, key))
    typer.echo(text)
    typer.echo(f"This is the only time the key for {tenant} is shown.", err=True)


@commands.command()
def rotate(
    key_id: KeyArgument,
    overlap: Annotated[str, typer.Option(help="Time the old key stays valid: 30m, 24h, 7d.")] = "24h",
    expires: ExpiresOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Replace a key and show the new one once; the old one stays valid for the overlap."""
    settings, now, seconds = settings_from(config, data), int(wall_clock()), parse_duration(overlap)
    text, key = make_key(
        secrets.token_bytes(KEY_BYTES), created_at=now, expires_at=parse_expiry(expires, now)
    )
    change_roster(
        settings,
        lambda tenants: rotate_key(tenants, key_id, key, now=now, overlap_seconds=seconds),
    )
    typer.echo(text)
    typer.echo(
        f"This is the only time the new key is shown. {key_id} works for another {show_duration(seconds)}.",
        err=True,
    )
    if (file := _file_with(locate(settings), key_id)) is not None:
        write_private(file, text + "\n")
        typer.echo(f"{file} holds the new key now.", err=True)


@commands.command()
def revoke(
    key_id: KeyArgument,
    reason: Annotated[str | None, typer.Option(help="Reason, recorded in the audit log.")] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Revoke a key: final, on every gateway within about a second."""
    if reason is not None and (len(reason) > REASON_CHARACTERS or not reason.isprintable()):
        raise ConfigurationError(f"--reason takes one line of at most {REASON_CHARACTERS} characters")
    settings, now = settings_from(config, data), int(wall_clock())
    change_roster(settings, lambda tenants: revoke_key(tenants, key_id, now=now), reason=reason)
    typer.echo(f"{key_id} is revoked")
    if (file := _file_with(locate(settings), key_id)) is not None:
        typer.echo(f"It is the key in {file}, which is invalid now.", err=True)


@commands.command(name="list")
def list_keys(
    tenant: Annotated[str | None, typer.Argument(help="Only the keys of this tenant.")] = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """List keys: tenant, id, permissions, validity; never the keys themselves."""
    tenants, now = read_roster(settings_from(config, data)).tenants, wall_clock()
    named = [
        {
            "tenant": each.name,
            "key_id": key_id,
            "permissions": _permissions(caller),
            "state": show_state(caller, now),
        }
        for each in (tenants if tenant is None else (find_tenant(tenants, tenant),))
        for key_id, caller in callers_of(each).items()
    ]
    if as_json:
        print_json(named)
        return
    for line in named:
        typer.echo("\t".join(line.values()))


def show_state(caller: Caller, now: float) -> str:
    key = caller.key
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if key.is_valid_at(now) and not caller.has_maker_at(now):
        return "ended with its maker"
    if key.expires_at is None:
        return "in force"
    word = "rotated, until" if key.rotated_at is not None else "until"
    return f"{word if key.is_valid_at(now) else 'expired'} {_day(key.expires_at)}"


def _permissions(caller: Caller) -> str:
    tenant, key = caller.tenant, caller.key
    if key.admin:
        return "admin" if key.scopes is None else f"admin: {', '.join(sorted(key.scopes))}"
    return ", ".join(tenant.models if key.models is None else key.models) or "no model"


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _file_with(installation: Installation, key_id: str) -> Path | None:
    """The file of the data directory that holds this key in clear, if any."""
    for file in (installation.admin_key, installation.demo_key):
        with suppress(OSError, UnicodeDecodeError):
            found = KEY_FORMAT.match(file.read_text(encoding="utf-8").strip())
            if found and found["key_id"] == key_id:
                return file
    return None
