"""
Standings that name a promotion which nobody carries on: its file is gone, cannot be read, or says it is over.

A worker would go on starting with that promotion's draft, so the standing forgets it.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from appliance.drafts.registry.standing import STANDING, read_standing, write_standing
from appliance.errors import DraftStorageError


def clear_strays(directory: Path, carried_on: Collection[str]) -> tuple[str, ...]:
    """
    Let every standing forget a promotion that is not among these; return what was changed or is damaged.

    Args:
        directory: of the registry.
        carried_on: ids of the promotions that are.

    Raises:
        DraftStorageError: a standing cannot be written.
    """
    changed: list[str] = []
    for file in sorted((directory / STANDING).glob("*.json")):
        try:
            standing = read_standing(directory, f"sha256:{file.stem}")
        except DraftStorageError:
            # Nobody starts a worker by it either: workers fall back to the draft of their settings.
            changed.append(file.name)
            continue
        if standing.promotion is not None and standing.promotion not in carried_on:
            write_standing(directory, replace(standing, promotion=None, candidate=None))
            changed.append(file.name)
    return tuple(changed)
