"""
The identity provider: its key file, reloaded when it changes, and token verification.

It fails closed at start: without usable keys the gateway does not start.  Later a broken file keeps the
previous keys, so that a partial copy does not lock out all callers.
"""

from collections.abc import Callable
from pathlib import Path

from appliance.errors import ConfigurationError
from appliance.infra.logs import Logger
from appliance.infra.settings import OidcSettings
from appliance.tenancy.identity.files import stamp
from appliance.tenancy.identity.jwks import KeySet, parse_key_set
from appliance.tenancy.identity.tokens import Bearer, TokenCache, verify_token


class IdentityProvider:
    """Verifies bearer tokens with the key file; raises ConfigurationError if that cannot be used."""

    def __init__(
        self, file: Path, settings: OidcSettings, *, logger: Logger, clock: Callable[[], float]
    ) -> None:
        self._file, self._settings, self._logger = file, settings, logger
        self._stamp = stamp([file])
        self._keys = self._load()
        self._cache = TokenCache(lambda token: verify_token(token, self._keys, settings), clock)
        self._report()

    def read(self, token: str) -> Bearer:
        """The content of a token, if it is valid now; raises RefusedCallerError."""
        return self._cache.read(token)

    def renew(self) -> None:
        """Reload the file if it has changed; tokens of removed keys are then refused."""
        now = stamp([self._file])
        if now == self._stamp:
            return
        self._stamp = now
        try:
            self._keys = self._load()
        except ConfigurationError as error:
            self._logger.warning("jwks_reload_failed", path=str(self._file), reason=str(error))
            return
        self._cache.forget()
        self._report()

    def _load(self) -> KeySet:
        try:
            return parse_key_set(self._file.read_text(encoding="utf-8"), self._settings.algorithms)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigurationError(f"oidc.jwks_file {self._file} cannot be read: {reason}") from error
        except ConfigurationError as error:
            raise ConfigurationError(f"oidc.jwks_file {self._file} cannot be used: {error}") from error

    def _report(self) -> None:
        ids = {key_id for key_id, _ in self._keys.keys}
        detail = f"{self._keys.skipped} more cannot be used" if self._keys.skipped else "all of the file"
        self._logger.info("jwks_loaded", path=str(self._file), count=len(ids), detail=detail)


def open_provider(
    settings: OidcSettings, *, logger: Logger, clock: Callable[[], float]
) -> IdentityProvider | None:
    """The provider of the settings; None without a key file.  Raises as `IdentityProvider`."""
    if settings.jwks_file is None:
        return None
    return IdentityProvider(settings.jwks_file, settings, logger=logger, clock=clock)
