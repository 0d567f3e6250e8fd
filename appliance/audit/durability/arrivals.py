"""
What the log holds from some entry on: looked up before anything that waited elsewhere is handed over.

A commit whose answer was lost may have happened, and a process may have ended between a commit and
the note that it was made.  Leaves are unlike each other (each has an id of its own), so one that is
here already is known by its hash, and is not recorded a second time.
"""

import json
from collections import Counter
from dataclasses import dataclass, field

from appliance.audit.registry import EntryType
from appliance.audit.store import AuditStore

CHUNK = 1024


@dataclass(slots=True, kw_only=True)
class Arrivals:
    """Leaves, spools and gaps that the log holds."""

    leaf_hashes: set[bytes] = field(default_factory=set)
    spools: set[str] = field(default_factory=set)
    """Ids of the spools that an `audit.spooled` entry reports."""
    gaps: Counter[str] = field(default_factory=Counter)
    """Entries that `audit.gap` entries admit are missing, by the time the gap began."""


def arrivals(store: AuditStore, start: int) -> Arrivals:
    """
    Read everything from index `start` on.  Blocks.

    Raises:
        AuditUnavailableError: it cannot be read.
    """
    found = Arrivals()
    while leaves := store.leaves(start, start + CHUNK):
        for leaf in leaves:
            found.leaf_hashes.add(leaf.leaf_hash)
            if leaf.type == EntryType.AUDIT_SPOOLED:
                found.spools.add(json.loads(leaf.leaf)["spool"])
            elif leaf.type == EntryType.AUDIT_GAP:
                entry = json.loads(leaf.leaf)
                found.gaps[entry["since"]] += entry["entries"]
        start += len(leaves)
    return found
