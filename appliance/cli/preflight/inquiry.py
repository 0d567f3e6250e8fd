"""Inputs of the checks: settings, roles of this machine, and expectations."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.infra.data_directory import Installation, locate
from appliance.infra.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    settings: Settings
    settings_file: Path | None
    """The YAML file of the settings, if there is one."""
    clock: Callable[[], float]
    """Unix time in seconds."""
    gateway: bool = True
    """Whether a gateway runs on this machine."""
    worker: bool = True
    """Whether a worker runs on this machine."""
    manifest: Path | None = None
    """A bundle, or the output of `sha256sum`: the expected digests of the weights."""
    names: tuple[str, ...] = ()
    """Host names that clients use for the gateway."""
    egress: bool = False
    """Whether to check egress even if `egress.mode` is off."""
    requests_per_day: int | None = None
    """Expected load; None if unknown."""
    keep_days: int = 365
    """Days for which the audit log must have space."""
    entries: int = 1000
    """Number of newest audit entries to read."""

    @property
    def installation(self) -> Installation:
        """Paths of its files, whether or not they exist."""
        return locate(self.settings)

    @property
    def uses_sqlite(self) -> bool:
        return self.installation.database_url.startswith("sqlite")
