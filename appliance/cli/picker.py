"""`appliance picker`: the endpoint picker."""

from functools import partial
from typing import Annotated

import typer

from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.errors import ConfigurationError

commands = typer.Typer()


@commands.command()
def picker(
    config: ConfigOption = None,
    data: DataOption = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 picks one.")] = None,
) -> None:
    """Tell the proxy of others which worker in `pool` each request should go to."""
    try:
        from appliance.app.picker_process import run_picker  # noqa: PLC0415 - needs the extra `picker`
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"grpc", "grpc_health", "google"}:
            raise
        message = "the endpoint picker needs the extra `picker`: install sovereign-appliance[picker]"
        raise ConfigurationError(message) from error
    run_picker(partial(settings_from, config, data, picker={"host": host, "port": port}))
