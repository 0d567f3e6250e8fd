"""Tenants and keys of a data directory, as its gateway reads and writes them."""

from pathlib import Path

from appliance.infra.data_directory import locate
from appliance.infra.settings import DataSettings, Settings
from appliance.tenancy.roster_mac import RosterMac


def roster_mac(directory: Path) -> RosterMac:
    """The MAC key of a data directory, which is made if it is missing."""
    directory.mkdir(exist_ok=True)
    return RosterMac.of(locate(Settings(data=DataSettings(directory=directory))))
