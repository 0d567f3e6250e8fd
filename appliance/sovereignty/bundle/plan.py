"""
What loading a bundle would change.

Pure: the bundle's manifest against what is remembered of the one before.
"""

from dataclasses import dataclass
from enum import StrEnum

from appliance.sovereignty.bundle.manifest import Item, Manifest
from appliance.sovereignty.bundle.memory import Loaded


class Change(StrEnum):
    """What happens to an item."""

    NEW = "new"
    CHANGED = "changed"
    SAME = "same"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One item, before and after."""

    change: Change
    item: Item
    """As it will be; as it was, where it is gone."""
    before: str | None
    """Version that is loaded."""


def make_plan(manifest: Manifest, loaded: Loaded | None) -> list[Step]:
    """Return what happens to each item, by kind and name."""
    old = {(item.kind, item.name): item for item in loaded.items} if loaded is not None else {}
    new = {(item.kind, item.name): item for item in manifest.items}
    steps = []
    for key in sorted(old.keys() | new.keys()):
        item, before = new.get(key), old.get(key)
        if item is None:
            change = Change.GONE
        elif before is None:
            change = Change.NEW
        else:
            change = Change.SAME if item.digest == before.digest else Change.CHANGED
        shown = item or old[key]
        steps.append(Step(change=change, item=shown, before=None if before is None else before.version))
    return steps
