"""
Decides how far a log may be disposed of.  Pure.

Whole tiles go, from the oldest on, up to the first entry that a rule keeps.  What cannot be read keeps
everything from there on.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import TILE_WIDTH
from appliance.audit.stored import Leaf, place_of
from appliance.errors import ControlRefusedError

DAY_MS = 86_400_000
LEAST_DAYS = 183
"""No entry is disposed of earlier (EU AI Act, Articles 19 and 26(6): six months)."""
_FILES = {EntryType.FILE_CREATED.value: "file", EntryType.BATCH_CREATED.value: "batch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A rule, and the first entry that it keeps."""

    rule: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the rules need besides the entries; sizes count entries."""

    disposed: int
    """Entries that earlier disposals cover."""
    signed: int
    exported: int
    """Covered by the largest export that the log records."""
    witnessed: int | None
    """Cosigned by every configured witness; None without witnesses."""
    forwarded: int | None
    """Received by the SIEM; None if the log is not forwarded."""
    open_from: int | None
    """Intent of the oldest request without an end."""
    content_from: int | None
    """Intent of the oldest request whose content is stored."""
    held: Collection[str] = ()
    """Tenants under a legal hold."""
    files: Collection[str] = ()
    """Files that are stored and batches that have not ended; the keys of an erasure are chosen by them."""
    sequences: Mapping[str, int] = field(default_factory=dict)
    """Newest number of each gateway's sequence among the entries that earlier disposals cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    previous: int
    below: int
    """Entries with a smaller index go; not above `previous` if none may."""
    newest: str
    """Latest `time` among those that go."""
    limits: tuple[Limit, ...]
    """Every rule, the one that keeps most first."""
    facts: Facts

    @property
    def entries(self) -> int:
        return max(0, self.below - self.previous)


def latest_cutoff(now_ms: int, evidence_ms: Iterable[int], days: int = LEAST_DAYS) -> int:
    """
    Return the time before which entries are older than so many days.

    `evidence_ms` are times of witnesses and of the time-stamp authority, if there are any: the clock of this
    machine may be ahead.
    """
    return min([now_ms, *evidence_ms]) - days * DAY_MS


def check_cutoff(before: str, latest: str) -> None:
    """Refuse a time that is too late; both as `time` in entries.  Raises ControlRefusedError."""
    if before > latest:
        raise ControlRefusedError(
            f"entries from before {before} cannot be disposed of: every entry is kept for {LEAST_DAYS} days, "
            f"so name {latest} or an earlier time"
        )


def make_plan(facts: Facts, leaves: Iterable[Leaf], before: str) -> Plan:
    """
    Decide; `leaves` are all from `facts.disposed` on, and read only as far as needed.

    `before` is as `time` in entries: none that is as new goes.
    """
    scan = _Scan(facts, before)
    for leaf in leaves:
        if not scan.passes(leaf):
            break
    limits = [
        *scan.limits,
        Limit(rule="the newest checkpoint covers fewer", size=facts.signed),
        Limit(rule="the largest export that the log records covers fewer", size=facts.exported),
    ]
    others = (
        ("not every witness has cosigned more", facts.witnessed),
        ("the SIEM has received fewer", facts.forwarded),
        ("a request has no end", facts.open_from),
        ("content of a request is stored", facts.content_from),
    )
    limits += [Limit(rule=rule, size=size) for rule, size in others if size is not None]
    limits.sort(key=lambda limit: limit.size)
    most = limits[0].size // TILE_WIDTH * TILE_WIDTH
    below = max(facts.disposed, most)
    return Plan(
        previous=facts.disposed,
        below=below,
        newest=scan.newest(below),
        limits=tuple(limits),
        facts=facts,
    )


class _Scan:
    """Follows the oldest entries up to the first one that a rule keeps."""

    def __init__(self, facts: Facts, before: str) -> None:
        self._before, self._held, self._files = before, frozenset(facts.held), frozenset(facts.files)
        self._start = self._next = facts.disposed
        self._sequences = dict(facts.sequences)
        self._newest: list[str] = []
        """Latest time up to the end of each tile."""
        self.limits: list[Limit] = []

    def passes(self, leaf: Leaf) -> bool:
        if leaf.index != self._next:
            return self._ends(f"entry {self._next} is missing")
        try:
            entry = json.loads(leaf.leaf)
            time = str(entry["time"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return self._ends(f"entry {self._next} cannot be read")
        if time >= self._before:
            # The first entry that stays is as old as those that go, which everyone can check.
            return self._ends(f"entry {self._next} is of {time}", size=self._next - 1)
        if kept := self._keeps(entry) or self._breaks_off(leaf):
            return self._ends(kept)
        if (leaf.index - self._start) % TILE_WIDTH == 0:
            self._newest.append(self._newest[-1] if self._newest else time)
        self._newest[-1] = max(self._newest[-1], time)
        self._next += 1
        return True

    def newest(self, below: int) -> str:
        tiles = (below - self._start) // TILE_WIDTH
        return self._newest[tiles - 1] if tiles > 0 else ""

    def _keeps(self, entry: dict[str, Any]) -> str | None:
        if entry.get("tenant") in self._held:
            return f"{entry['tenant']} is under a legal hold, and entry {self._next} is of it"
        name = entry.get(_FILES.get(str(entry.get("type")), ""))
        if name in self._files:
            return f"{name} is stored, and entry {self._next} created it"
        return None

    def _breaks_off(self, leaf: Leaf) -> str | None:
        place = place_of(leaf)
        if place is None:
            return None
        writer, number = place
        due = self._sequences.get(writer, 0) + 1
        self._sequences[writer] = number
        # Evidence of what was removed before it came into the log.
        return f"entry {leaf.index} is number {number} of {writer}, not {due}" if number != due else None

    def _ends(self, rule: str, *, size: int | None = None) -> bool:
        self.limits.append(Limit(rule=rule, size=self._next if size is None else size))
        return False
