"""
Options every command shares, and the settings that come of them.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.infra.settings import Settings, load_settings

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (YAML).")]
DataOption = Annotated[Path | None, typer.Option("--data", help="Data directory.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="Base URL of the gateway.")]


def settings_from(config: Path | None, data: Path | None, **sections: dict[str, Any]) -> Settings:
    """Settings from file and environment, with what the command line says on top."""
    overrides = {
        name: {field: value for field, value in fields.items() if value is not None or field == "draft"}
        for name, fields in sections.items()
    }
    if data is not None:
        overrides["data"] = {"directory": str(data)}
    return load_settings(config, overrides=overrides)
