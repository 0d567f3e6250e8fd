"""
`appliance audit upgrade-database | grants | migrate`: the database under the audit log.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated

import typer

from appliance.audit.gateway_name import GatewayName
from appliance.audit.migrate import copy_log
from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.errors import ConfigurationError
from appliance.gateway.batch.tables import metadata as batch_tables
from appliance.gateway.cost.store import metadata as cost_tables
from appliance.infra.data_directory import locate
from appliance.infra.schema import grants as grants_sql
from appliance.infra.schema import upgrade_database

UrlOption = Annotated[
    str | None, typer.Option("--url", help="The database, as its owner; default: `audit.database_url`.")
]


def upgrade(
    url: UrlOption = None,
    grant_to: Annotated[
        str | None, typer.Option("--grant-to", help="PostgreSQL role to grant what `grants` prints.")
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make or upgrade the audit log's tables; on PostgreSQL as the role that owns them."""
    upgrade_database(url or locate(settings_from(config, data)).database_url, grant_to=grant_to)
    typer.echo("the audit database is up to date")


def grants(
    role: Annotated[str, typer.Option("--role", help="PostgreSQL role the gateways connect as.")],
) -> None:
    """Print the SQL that lets a role append to the log, but not change or remove what is in it."""
    typer.echo(grants_sql(role), nl=False)


def migrate(
    to: Annotated[str, typer.Option("--to", help="URL of the database to copy the log into.")],
    source: Annotated[
        str | None, typer.Option("--from", help="URL to copy from; default: the log in use.")
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Copy the whole log into an empty database, checking every hash; gateways must be stopped."""
    settings = settings_from(config, data)
    installation = locate(settings)
    with ExitStack() as stack:
        if source is None:
            if settings.audit.database_url is None and not (installation.directory / "audit.db").exists():
                message = f"there is no audit log in {installation.directory}: name its directory with --data"
                raise ConfigurationError(message)
            # Whoever writes this log has this name; while it is held here, nobody can start to.
            held = GatewayName.hold(installation.directory / "gateway.id", settings.audit.gateway)
            stack.callback(held.release)
        bar = stack.enter_context(typer.progressbar(length=1, label="entries"))

        def progress(done: int, total: int) -> None:
            bar.length = max(total, 1)
            bar.update(done - bar.pos)

        head = copy_log(
            source or installation.database_url,
            to,
            progress=progress,
            also=(*batch_tables.sorted_tables, *cost_tables.sorted_tables),
        )
    typer.echo(
        f"copied {head.size} entries; set audit.database_url to the new database and start the gateways"
    )


COMMANDS: dict[str, Callable[..., None]] = {"upgrade-database": upgrade, "grants": grants, "migrate": migrate}
"""By name, to be added to `appliance audit`."""
