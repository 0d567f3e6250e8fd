"""Options, settings and requests to the gateway that commands share."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.errors import ConfigurationError
from appliance.infra.key_location import KeyLocation, parse_key_location
from appliance.infra.settings import CONFIG_VARIABLE, DEFAULT_CONFIG, Settings, load_settings


def _or_default(config: Path | None) -> Path | None:
    if config is None:
        try:
            DEFAULT_CONFIG.lstat()
        except FileNotFoundError:
            return None
        except OSError:
            pass  # whatever is there, reading it says why it cannot be read: never run on defaults instead
        return DEFAULT_CONFIG
    return config


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=CONFIG_VARIABLE,
        callback=_or_default,
        help=f"Settings file (YAML); default: {DEFAULT_CONFIG}, if it exists.",
    ),
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Data directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="Base URL of the admin listener.")]
NoteOption = Annotated[str, typer.Option("--note", help="Reason; recorded in the audit log.")]


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


wall_clock = time.time  # noqa: TID251 - a command is a composition root


def settings_from(config: Path | None, data: Path | None, **sections: dict[str, Any]) -> Settings:
    """Settings from file and environment; options of the command line override them."""
    overrides = {
        name: {field: value for field, value in fields.items() if value is not None or field == "draft"}
        for name, fields in sections.items()
    }
    if data is not None:
        overrides["data"] = {"directory": str(data)}
    return load_settings(config, overrides=overrides)


def key_location(text: str) -> KeyLocation:
    """The path or URI of a signing key; raises ConfigurationError."""
    try:
        return parse_key_location(text)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def ask_gateway(
    settings: Settings,
    url: str | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_seconds: float | None = None,
) -> dict[str, Any]:
    """Send one request to the gateway's admin API, below `/admin/v1/`; raises as `AdminApi` does."""
    from appliance.cli.common.admin_client import TIMEOUT_SECONDS, open_admin  # noqa: PLC0415 - slow to import

    async def ask() -> dict[str, Any]:
        async with open_admin(settings, url, timeout_seconds=timeout_seconds or TIMEOUT_SECONDS) as gateway:
            return await gateway.request(method, path, body)

    return asyncio.run(ask())
