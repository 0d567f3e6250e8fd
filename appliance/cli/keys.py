"""
`appliance key`: API keys of tenants.
"""

import secrets
from typing import Annotated

import typer

from appliance.cli.options import ConfigOption, DataOption, settings_from
from appliance.installation import KEY_BYTES, add_key, load_tenants, locate, write_tenants
from appliance.tenancy import encode_tenants, make_key, parse_tenants

commands = typer.Typer(help="API keys of tenants.", no_args_is_help=True)


@commands.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant; a new one is created.")],
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make a key for a tenant and show it, this once.  A running gateway reads it when restarted."""
    installation = locate(settings_from(config, data))
    text, key = make_key(secrets.token_bytes(KEY_BYTES))
    tenants = add_key(load_tenants(installation), tenant, key)
    parse_tenants(encode_tenants(tenants))  # refuses a bad tenant name before anything is written
    write_tenants(installation, tenants)
    typer.echo(text)
    typer.echo(
        f"This is the only time the key for {tenant} is shown. Restart the gateway to use it.", err=True
    )


@commands.command(name="list")
def list_keys(config: ConfigOption = None, data: DataOption = None) -> None:
    """List tenants and the public part of their keys."""
    for tenant in load_tenants(locate(settings_from(config, data))):
        for key in tenant.keys:
            kind = "admin" if key.admin else ", ".join(tenant.models)
            typer.echo(f"{tenant.name}\t{key.key_id}\t{kind}")
