"""
`appliance audit rotate-key`: hand the log over to a new signing key.
"""

import time

import typer

from appliance.audit.gateway_name import GatewayName
from appliance.audit.rotation import Rotated, rotate_keys
from appliance.audit.sealed import SealedHead
from appliance.audit.store import SqlAuditStore
from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import Installation, locate
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings


def rotate_key(config: ConfigOption = None, data: DataOption = None) -> None:
    """Hand the log over to new signing keys; stop every gateway first."""
    settings = settings_from(config, data)
    installation = locate(settings)
    # While the name is held here, no gateway of this machine runs or starts.
    held = GatewayName.hold(installation.directory / "gateway.id", settings.audit.gateway)
    try:
        rotated = _rotate(settings, installation, held.name)
    finally:
        held.release()
    typer.echo(f"both keys have signed the log of {rotated.size} entries; from here on the new one signs.")
    typer.echo("Hand these public keys to auditors and witnesses:")
    typer.echo(rotated.signer.vkey)
    for file in rotated.retired:
        typer.echo(f"Destroy {file}: whoever has it can forge the log's past.", err=True)


def _rotate(settings: Settings, installation: Installation, gateway: str) -> Rotated:
    clock = time.time  # noqa: TID251 - a command is a composition root
    store = SqlAuditStore(installation.database_url)
    try:
        # One that runs would go on signing with the key it has in memory.
        ages = {name: clock() - seen for name, seen in store.writers().items() if name != gateway}
        for name, seconds in ages.items():
            if seconds < settings.audit.gateway_dead_seconds:
                message = (
                    f"the gateway {name} was alive {seconds:.0f} s ago: stop it, and wait until it has been "
                    f"silent for {settings.audit.gateway_dead_seconds:g} s"
                )
                raise ConfigurationError(message)
        return rotate_keys(
            store=store,
            path=installation.signing_key,
            origin=settings.audit.origin,
            sealed=SealedHead(installation.sealed_head),
            gateway=gateway,
            actor=f"cli:{account_name()}",
            clock=clock,
        )
    finally:
        store.close()


COMMANDS = {"rotate-key": rotate_key}
"""By name, to be added to `appliance audit`."""
