"""
`appliance key`: API keys of tenants.
"""

import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer

from appliance.cli.common.duration import parse_duration, show_duration
from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.cli.register import CLOCK, change_roster, parse_expiry, parse_names, read_roster
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import Installation, locate
from appliance.infra.files import write_private
from appliance.tenancy import KEY_BYTES, KEY_FORMAT, ApiKey, Tenant, make_key
from appliance.tenancy.edits import add_key, revoke_key, rotate_key
from appliance.tenancy.roster import find_tenant

REASON_CHARACTERS = 200

commands = typer.Typer(help="API keys of tenants.", no_args_is_help=True)
KeyArgument = Annotated[str, typer.Argument(help="Id of the key: the eight characters after `sk-`.")]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires", help="After so long (90d), or at a date or time (UTC).")
]


@commands.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    models: Annotated[
        str | None, typer.Option("--models", help="Only these of its tenant's models: a,b.")
    ] = None,
    expires: ExpiresOption = None,
    admin: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--admin", help="For the admin API, and for nothing else.")
    ] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make a key for a tenant and show it, this once."""
    now = int(CLOCK())
    text, key = make_key(
        secrets.token_bytes(KEY_BYTES),
        admin=admin,
        models=None if models is None else tuple(parse_names(models)),
        created_at=now,
        expires_at=parse_expiry(expires, now),
    )
    change_roster(settings_from(config, data), lambda tenants: add_key(tenants, tenant, key))
    typer.echo(text)
    typer.echo(f"This is the only time the key for {tenant} is shown.", err=True)


@commands.command()
def rotate(
    key_id: KeyArgument,
    overlap: Annotated[
        str, typer.Option("--overlap", help="How long the old key still works: 30m, 24h, 7d.")
    ] = "24h",
    expires: ExpiresOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make a key that takes another's place and show it, this once; the old one ends after a while."""
    settings, now, seconds = settings_from(config, data), int(CLOCK()), parse_duration(overlap)
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
    installation = locate(settings)
    if _kept_admin_key(installation) == key_id:
        write_private(installation.admin_key, text + "\n")
        typer.echo(f"{installation.admin_key} holds the new key now.", err=True)


@commands.command()
def revoke(
    key_id: KeyArgument,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; goes into the audit log.")] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """End a key for good, on every gateway within about a second."""
    if reason is not None and (len(reason) > REASON_CHARACTERS or not reason.isprintable()):
        raise ConfigurationError(f"--reason takes one line of at most {REASON_CHARACTERS} characters")
    settings, now = settings_from(config, data), int(CLOCK())
    change_roster(settings, lambda tenants: revoke_key(tenants, key_id, now=now), reason=reason)
    typer.echo(f"{key_id} opens nothing any more")
    installation = locate(settings)
    if _kept_admin_key(installation) == key_id:
        typer.echo(f"It is the key in {installation.admin_key}, which is of no use now.", err=True)


@commands.command(name="list")
def list_keys(
    tenant: Annotated[str | None, typer.Argument(help="Only the keys of this tenant.")] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """List the public part of keys: tenant, id, what it opens, until when."""
    tenants, now = read_roster(settings_from(config, data)).tenants, CLOCK()
    for each in tenants if tenant is None else (find_tenant(tenants, tenant),):
        for key in each.keys:
            typer.echo("\t".join((each.name, key.key_id, _opens(each, key), show_state(key, now))))


def show_state(key: ApiKey, now: float) -> str:
    """Whether a key is in force, and until when."""
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if key.expires_at is None:
        return "in force"
    word = "rotated, until" if key.rotated_at is not None else "until"
    return f"{word if key.opens_at(now) else 'expired'} {_day(key.expires_at)}"


def _opens(tenant: Tenant, key: ApiKey) -> str:
    if key.admin:
        return "admin"
    return ", ".join(tenant.models if key.models is None else key.models) or "no model"


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _kept_admin_key(installation: Installation) -> str | None:
    """Id of the key that commands of this machine use; None where there is none."""
    try:
        found = KEY_FORMAT.match(installation.admin_key.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return found["key_id"] if found else None
