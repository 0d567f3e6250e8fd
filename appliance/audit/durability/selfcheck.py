"""
Verifies, while the gateway runs, that what is stored is still what was written.

A round reads the leaves that are new since the last one, hashes their bytes, and compares the root with the
one the writer holds in memory.  Then it rereads some of the older leaves, whose chunks it remembers by their
roots, so that in time every leaf is verified again.  It reads a little at a time and sleeps in between, so it
costs a small part of one core.

It detects damage and crude attacks early.  It proves nothing to others: an auditor uses
`appliance.audit.verify` with a checkpoint held elsewhere.  Fails closed: damage stays reported until a
restart, which checks the whole log. A database that cannot be read is not damage.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass

from appliance.audit.merkle import CompactRange, hash_leaf, root_from_leaf_hashes
from appliance.audit.store import AuditStore

CHUNK = 256
RECHECKED_CHUNKS = 400
"""Maximum number of older chunks that one round verifies again: about a hundred thousand leaves."""
RESTS = 9
"""Seconds of rest for each second of work."""
_REMEDY = "stop, keep the database as it is, and compare it with an export or a backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the last round found."""

    time: float = 0.0
    """When it ended, in seconds since the epoch; 0 for none yet."""
    size: int = 0
    """Entries verified since the start."""
    damage: str | None = None
    """What is wrong, in one line, or None."""
    failure: str | None = None
    """Why the last round could not be done, or None."""


class DamagedError(Exception):
    """What is stored is not what was written; caught by the caller of `SelfCheck.round`."""

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage}: {_REMEDY}")


class SelfCheck:
    """Verifies one log round by round; blocks, for a thread of its own."""

    def __init__(
        self,
        store: AuditStore,
        *,
        work_clock: Callable[[], float] = time.perf_counter,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._work_clock, self._rest = store, work_clock, rest
        self._tree = CompactRange()
        # The same leaves in chunks: the root of each full chunk, and the rest.
        self._roots: list[bytes] = []
        self._rest_of_tree = CompactRange()
        self._next = 0
        self._stopped = threading.Event()
        self.size = 0
        """Entries verified at least once."""

    def stop(self) -> None:
        """End the running round soon."""
        self._stopped.set()

    def round(self, size: int, root: str) -> None:
        """
        Verify what is new up to `size`, then some of the older chunks.

        `size` and `root` (in base64) are those of the durable entries, as the writer knows them.  Raises
        DamagedError, and AuditUnavailableError if the store cannot be read.
        """
        self._recheck(len(self._roots), self._rest_of_tree)
        while self._tree.size < size and not self._stopped.is_set():
            self._extend(min(size, self._tree.size + CHUNK - self._tree.size % CHUNK))
        if self._stopped.is_set():
            return
        if b64encode(self._tree.root()).decode() != root:
            raise DamagedError(f"the first {size} stored entries are not the ones that were written")
        for _ in range(min(RECHECKED_CHUNKS, len(self._roots))):
            if self._stopped.is_set():
                return
            self._recheck(self._next % len(self._roots))
            self._next += 1
        self.size = size

    def _extend(self, end: int) -> None:
        began = self._work_clock()
        for leaf_hash in self._read(self._tree.size, end):
            self._tree.append(leaf_hash)
            self._rest_of_tree.append(leaf_hash)
        if self._rest_of_tree.size == CHUNK:
            self._roots.append(self._rest_of_tree.root())
            self._rest_of_tree = CompactRange()
        self._rest((self._work_clock() - began) * RESTS)

    def _recheck(self, number: int, rest: CompactRange | None = None) -> None:
        began = self._work_clock()
        start = number * CHUNK
        size, root = (CHUNK, self._roots[number]) if rest is None else (rest.size, rest.root())
        if root_from_leaf_hashes(self._read(start, start + size)) != root:
            end = start + size - 1
            raise DamagedError(
                f"stored entries between {start} and {end} were altered since they were verified"
            )
        self._rest((self._work_clock() - began) * RESTS)

    def _read(self, start: int, end: int) -> list[bytes]:
        leaves = self._store.leaves(start, end)
        if [leaf.index for leaf in leaves] != list(range(start, end)):
            raise DamagedError(f"stored entries between {start} and {end - 1} are missing")
        try:
            hashes = [hash_leaf(leaf.leaf) for leaf in leaves]
        except TypeError as error:  # SQLite keeps a value of any type in any column
            raise DamagedError(f"stored entries between {start} and {end - 1} are not of bytes") from error
        for leaf, leaf_hash in zip(leaves, hashes, strict=True):
            if leaf.leaf_hash != leaf_hash:
                raise DamagedError(f"stored entry {leaf.index} does not have the hash stored with it")
        return hashes
