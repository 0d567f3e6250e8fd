"""
Client of the gateway's admin API, with the admin key of the data directory.

Every failure is one line that says what to do.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from appliance.api.http.tls import command_context
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings

TIMEOUT_SECONDS = 15.0
"""Longer than the gateway waits for its audit log and its database."""
OK, UNAUTHORISED = 200, 401


class AdminApi:
    """The admin API of one gateway; created by `open_admin`."""

    def __init__(self, base: str, key: str, session: aiohttp.ClientSession) -> None:
        self.base = base
        """Base URL without a trailing slash."""
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session = session

    async def get(self, path: str) -> dict[str, Any]:
        return await self.request("GET", path)

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """
        Send one request to a path below `/admin/v1/`.

        Raises ConfigurationError if the gateway does not answer, or refuses the key or the request.
        """
        try:
            async with self._session.request(
                method, f"{self.base}/admin/v1/{path}", json=body, headers=self._headers
            ) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            kind = type(error).__name__
            message = f"no gateway answers at {self.base} ({kind}): start it, or pass another with --url"
            raise ConfigurationError(message) from error
        if status == UNAUTHORISED:
            raise ConfigurationError(f"the gateway at {self.base} answered {status}: is this its admin key?")
        try:
            content: dict[str, Any] = json.loads(text)
            if OK <= status < OK + 100:
                return content
            message = f"the gateway at {self.base} refused ({status}): {content['error']['message']}"
        except (ValueError, KeyError, TypeError):
            message = f"the server at {self.base} is not a gateway of this version ({status})"
        raise ConfigurationError(message)


@asynccontextmanager
async def open_admin(
    settings: Settings, url: str | None, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> AsyncIterator[AdminApi]:
    """Connect to the admin listener at `url`, by default the one in the settings."""
    scheme = "https" if settings.tls.certificate_file else "http"
    host = settings.api.admin_host
    own = f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.api.admin_port}"
    base = (url or own).rstrip("/")
    key_file = locate(settings).admin_key
    try:
        key = key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        message = f"cannot read the admin key {key_file} ({reason}): pass its directory with --data"
        raise ConfigurationError(message) from error
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    context = command_context(settings.tls, is_own=url is None) if base.startswith("https:") else True
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        yield AdminApi(base, key, session)
