"""
TLS to `https://` workers: what their certificates must be signed by, and what the gateway presents to them.

Fails closed at the start; a broken file found later changes nothing.
"""

import ssl

from appliance.errors import ConfigurationError
from appliance.infra.settings import PoolSettings
from appliance.tenancy.identity.files import stamp


class WorkerTls:
    """Raises ConfigurationError unless every file can be used."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._files = [
            file
            for file in (settings.ca_file, settings.certificate_file, settings.key_file)
            if file is not None
        ]
        self._stamp = stamp(self._files)
        self._context = self._load() if self._files else None

    @property
    def context(self) -> ssl.SSLContext:
        """For new connections.  The system's authorities take long to read, so only if needed."""
        if self._context is None:
            self._context = self._load()
        return self._context

    def renew(self) -> None:
        """Apply changed files to new connections."""
        now = stamp(self._files)
        if now == self._stamp:
            return
        try:
            self._context = self._load()
        except ConfigurationError:
            return  # between a new certificate and its key; tried again at the next call
        self._stamp = now

    def _load(self) -> ssl.SSLContext:
        settings = self._settings
        try:
            context = ssl.create_default_context(cafile=settings.ca_file)
            if settings.certificate_file is not None:
                # A password is always given, or OpenSSL would ask for it on the terminal.
                context.load_cert_chain(settings.certificate_file, settings.key_file, "")
        except (OSError, ValueError) as error:
            message = f"pool.ca_file, pool.certificate_file or pool.key_file cannot be used: {error}"
            raise ConfigurationError(message) from error
        return context
