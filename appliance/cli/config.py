"""`appliance config`: the settings in force."""

import typer
import yaml

from appliance.cli.common.options import ConfigOption, DataOption, settings_from

commands = typer.Typer()


@commands.command(name="config")
def show_config(config: ConfigOption = None, data: DataOption = None) -> None:
    """Check the settings and print all of them, with defaults, as YAML."""
    settings = settings_from(config, data)
    typer.echo(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), nl=False)
