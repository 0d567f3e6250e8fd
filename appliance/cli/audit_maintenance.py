"""`appliance audit upgrade-database | grants | migrate | rotate-key`: database and keys of the audit log."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from appliance.audit.gateway_name import GatewayName
from appliance.audit.migrate import copy_log
from appliance.audit.recovery import check_tail
from appliance.audit.rotation import Rotated, rotate_keys, rotate_to
from appliance.audit.sealed import SealedHead
from appliance.audit.store import SqlAuditStore
from appliance.cli.common.audit_log import has_log
from appliance.cli.common.options import ConfigOption, DataOption, key_location, settings_from, wall_clock
from appliance.cli.common.progress import progress_bar
from appliance.errors import ConfigurationError
from appliance.gateway.batch.tables import metadata as batch_tables
from appliance.gateway.cost.store import metadata as cost_tables
from appliance.infra.data_directory import Installation, locate
from appliance.infra.key_location import KeyLocation
from appliance.infra.os_account import account_name
from appliance.infra.schema import grants as grants_sql
from appliance.infra.schema import upgrade_database
from appliance.infra.settings import Settings

UrlOption = Annotated[
    str | None, typer.Option(help="Database URL of its owner; default: `audit.database_url`.")
]


def upgrade(
    url: UrlOption = None,
    grant_to: Annotated[str | None, typer.Option(help="PostgreSQL role that receives the grants.")] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create or upgrade the audit log's tables; on PostgreSQL as the role that owns them."""
    url = url or locate(settings_from(config, data)).database_url
    upgrade_database(url, grant_to=grant_to)
    with progress_bar("hash tiles") as progress, closing(SqlAuditStore(url, progress=progress)) as store:
        head = store.head()
        check_tail(store, head, head.size)
    typer.echo("the audit database is up to date")


def grants(
    role: Annotated[str, typer.Option(help="PostgreSQL role of the gateways.")],
) -> None:
    """Print the SQL that lets a role append to the log, but not change or delete entries."""
    typer.echo(grants_sql(role), nl=False)


def migrate(
    to: Annotated[str, typer.Option(help="URL of the database to copy the log into.")],
    source: Annotated[
        str | None, typer.Option("--from", help="URL of the source; default: the log in use.")
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Copy the whole log into an empty database, verifying every hash; stop all gateways first."""
    settings = settings_from(config, data)
    installation = locate(settings)
    with ExitStack() as stack:
        if source is None:
            if not has_log(settings):
                message = f"there is no audit log in {installation.directory}: pass its directory with --data"
                raise ConfigurationError(message)
            # A writer of this log holds this name; while it is held here, none can start.
            held = GatewayName.hold(installation.directory / "gateway.id", settings.audit.gateway)
            stack.callback(held.release)
        progress = stack.enter_context(progress_bar("entries"))
        head = copy_log(
            source or installation.database_url,
            to,
            progress=progress,
            also=(*batch_tables.sorted_tables, *cost_tables.sorted_tables),
        )
    done = "set audit.database_url to the new database and start the gateways"
    typer.echo(f"copied {head.size} entries; {done}")


def rotate_key(
    to: Annotated[
        str | None,
        typer.Option(
            help="Path or `pkcs11:` URI of the new key; default: it takes the place of the old one."
        ),
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Rotate the log's signing keys; stop every gateway first.

    With `--to`, the log is handed over to a key at another place, such as in a token, where it must have been
    generated; name it in `audit.signing_key_file` afterwards.
    """
    settings = settings_from(config, data)
    installation = locate(settings)
    # While the name is held here, no gateway of this machine can run.
    held = GatewayName.hold(installation.directory / "gateway.id", settings.audit.gateway)
    try:
        rotated = _rotate(settings, installation, held.name, None if to is None else key_location(to))
    finally:
        held.release()
    typer.echo(f"both keys have signed the log of {rotated.size} entries; the new key signs from now on.")
    typer.echo("Hand these public keys to auditors and witnesses:")
    typer.echo(rotated.signer.vkey)
    if to is not None:
        typer.echo(f"Set audit.signing_key_file, or no gateway starts: {to}", err=True)
    for file in rotated.retired:
        typer.echo(f"Destroy {file}: its holder can forge the log's past.", err=True)


def _rotate(settings: Settings, installation: Installation, gateway: str, to: KeyLocation | None) -> Rotated:
    store = SqlAuditStore(installation.database_url)
    try:
        # A running gateway would continue to sign with the key it has in memory.
        ages = {name: wall_clock() - seen for name, seen in store.writers().items() if name != gateway}
        for name, seconds in ages.items():
            if seconds < settings.audit.gateway_dead_seconds:
                message = (
                    f"the gateway {name} was alive {seconds:.0f} s ago: stop it, and wait until it has been "
                    f"silent for {settings.audit.gateway_dead_seconds:g} s"
                )
                raise ConfigurationError(message)
        place = installation.signing_key
        if to == place:
            raise ConfigurationError("--to names the key that signs now: name another")
        if to is not None:
            rotate = partial(rotate_to, place=place, to=to, retired=installation.retired_keys)
        elif isinstance(place, Path):
            rotate = partial(rotate_keys, path=place)
        else:
            raise ConfigurationError(
                "the signing key is in a token: generate a new one there, and name it in --to"
            )
        return rotate(
            store=store,
            origin=settings.audit.origin,
            sealed=SealedHead(installation.sealed_head),
            gateway=gateway,
            actor=f"cli:{account_name()}",
            clock=wall_clock,
        )
    finally:
        store.close()


COMMANDS: dict[str, Callable[..., None]] = {
    "upgrade-database": upgrade,
    "grants": grants,
    "migrate": migrate,
    "rotate-key": rotate_key,
}
