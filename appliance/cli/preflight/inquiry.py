"""
What an installer asks about: the settings, the roles of this machine, and what to compare with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.infra.data_directory import Installation, locate
from appliance.infra.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """Everything a check may need to know before it looks at the machine."""

    settings: Settings
    settings_file: Path | None
    """The YAML file the settings came from, if there is one."""
    clock: Callable[[], float]
    """Unix time in seconds."""
    gateway: bool = True
    """Whether a gateway is to run on this machine."""
    worker: bool = True
    """Whether a worker is to run on this machine."""
    manifest: Path | None = None
    """A bundle's `MANIFEST.json`, or what `sha256sum` printed: the digests that weights must have."""
    names: tuple[str, ...] = ()
    """Host names by which clients reach the gateway."""
    egress: bool = False
    """Whether to try the ways out even if `egress.mode` is off."""
    requests_per_day: int | None = None
    """Expected load; None where nobody knows."""
    keep_days: int = 365
    """How long the audit log is to have room for."""
    entries: int = 1000
    """Newest entries of the audit log that are read."""

    @property
    def installation(self) -> Installation:
        """Paths of its files, whether or not they exist yet."""
        return locate(self.settings)

    @property
    def uses_sqlite(self) -> bool:
        """Whether the audit log is a SQLite file."""
        return self.installation.database_url.startswith("sqlite")
