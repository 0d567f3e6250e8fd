"""
Verifies, while the gateway runs, that what is stored is still what was written.

A pass reads the whole log: it hashes the bytes of every leaf, and compares the hashes with those stored with
the leaves and in the tiles above them, and the root with the one the writer holds in memory.  A round is a
part of a pass; it begins by comparing that root with the newest hashes of each level.  Between tiles the
check rests, so it costs a small part of one core, and no longer than a pass within a day allows.

Progress is in a file: a restart resumes a pass and its rests.  So is damage: the gateway stays out of service
until the place where it was is sound again after a restart.  Fails closed, but a database that cannot be read
is not damage.

It detects damage and crude attacks.  It proves nothing to others: an auditor uses `appliance.audit.verify`
with a checkpoint held elsewhere.
"""

import json
import math
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from appliance.audit.merkle import (
    TILE_WIDTH,
    CompactRange,
    HashTree,
    hash_leaf,
    root_from_leaf_hashes,
    root_of_tile,
)
from appliance.audit.recovery import check_disposal
from appliance.audit.store import AuditStore, Leaf
from appliance.errors import AuditUnavailableError, AuditVerificationError
from appliance.infra.files import OWNER_ONLY, write_atomically

PASS_SECONDS = 8 * 3600.0
"""A pass takes so many seconds of waiting between rounds, as many of rest, and its work: less than a day."""
LEAST_TILES = 400
"""Tiles of a round, if the log has as many: about a hundred thousand leaves."""
TILES_PER_SAVE = 4096
RESTS = 9
"""Seconds of rest for each second of work."""
_REMEDY = "stop, keep the database as it is, and compare it with an export or a backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the check has found."""

    time: float = 0.0
    """When the last pass over the whole log ended, in seconds since the epoch; 0 for none yet."""
    size: int = 0
    """Entries it covered."""
    damage: str | None = None
    """What is wrong, in one line, or None."""
    failure: str | None = None
    """Why the last round could not be done, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckProgress:
    """What the file remembers."""

    tiles: int = 0
    """Full tiles of leaves that this pass has checked."""
    subtrees: tuple[str, ...] = ()
    """The tree over them, in hexadecimal."""
    completed: float = 0.0
    completed_size: int = 0
    damage: str | None = None
    damaged_tile: int | None = None
    """Where it was; None for damage or no damage of the log as a whole."""


class DamagedError(Exception):
    """What is stored is not what was written; caught by the caller of `SelfCheck.round`."""

    def __init__(self, damage: str, tile: int | None = None) -> None:
        super().__init__(f"{damage}: {_REMEDY}")
        self.tile = tile


def pace(tiles: int, verify_seconds: float) -> tuple[int, float]:
    """Return how many tiles a round checks, and the longest rest after one, in seconds."""
    rounds = max(1, int(PASS_SECONDS / verify_seconds))
    count = max(LEAST_TILES, math.ceil(tiles / rounds))
    return count, min(verify_seconds, PASS_SECONDS) / count


class SelfCheck:
    """
    Verifies one log round by round; blocks, for a thread of its own.

    `file` keeps its progress, None for nowhere; `verify_seconds` pass between two rounds; `clock` is Unix
    time.
    """

    def __init__(
        self,
        store: AuditStore,
        file: Path | None,
        *,
        verify_seconds: float,
        clock: Callable[[], float],
        work_clock: Callable[[], float] = time.perf_counter,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._file, self._clock = store, file, clock
        self._verify_seconds = verify_seconds or PASS_SECONDS
        self._work_clock, self._rest = work_clock, rest
        self._progress = _load(file)
        # Checked before it is relied on: the file may be of another log, or altered.
        self._tiles: CompactRange | None = None
        self._stopped = threading.Event()

    @property
    def found(self) -> Verification:
        known = self._progress
        return Verification(time=known.completed, size=known.completed_size, damage=known.damage)

    def stop(self) -> None:
        """End the running round soon."""
        self._stopped.set()

    def round(self, size: int, root: str) -> None:
        """
        Check the place of former damage, the newest hashes of each level, and the next part of the log.

        `size` and `root` (in base64) are those of the durable entries, as the writer knows them.  Raises
        DamagedError, and AuditUnavailableError if the store cannot be read or progress not be written.
        """
        try:
            if self._progress.damaged_tile is not None and self._progress.damaged_tile * TILE_WIDTH < size:
                self._check_tile(self._progress.damaged_tile, size)
            self._check_root(HashTree(size, self._store.hashes).root(), size, root)
            check_disposal(self._store)
            self._save(replace(self._progress, damage=None, damaged_tile=None))
            self._continue(size, root)
        except (DamagedError, AuditVerificationError) as error:
            damage = error if isinstance(error, DamagedError) else DamagedError(str(error))
            self._progress = replace(self._progress, damage=str(damage), damaged_tile=damage.tile)
            with suppress(AuditUnavailableError):  # then it is remembered until a restart only
                self._save(self._progress)
            raise damage from error

    def _continue(self, size: int, root: str) -> None:
        if self._tiles is None:
            self._tiles = self._resumed(size)
        full = size // TILE_WIDTH
        count, longest = pace(full + 1, self._verify_seconds)
        for done in range(count):
            if self._stopped.is_set():
                break
            began = self._work_clock()
            number = self._tiles.size
            tile = self._check_tile(number, size)
            if number == full:
                whole = CompactRange(size, (*self._tiles.subtrees, *tile.subtrees))
                self._check_root(whole.root(), size, root)
                self._tiles = CompactRange()
                self._save(CheckProgress(completed=self._clock(), completed_size=size))
                return
            self._tiles.append(tile.root())
            if done % TILES_PER_SAVE == TILES_PER_SAVE - 1:
                self._save_pass()
            self._rest(min((self._work_clock() - began) * RESTS, longest))
        self._save_pass()

    def _resumed(self, size: int) -> CompactRange:
        known = self._progress
        try:
            tiles = CompactRange(known.tiles, map(bytes.fromhex, known.subtrees))
            stored = HashTree(known.tiles * TILE_WIDTH, self._store.hashes).compact()
        except (AuditVerificationError, ValueError):
            return CompactRange()
        is_sound = known.tiles * TILE_WIDTH <= size and tiles.subtrees == stored.subtrees
        return tiles if is_sound else CompactRange()

    def _check_tile(self, number: int, size: int) -> CompactRange:
        """Return the tree of a tile, and check the hashes above it that it completes."""
        start = number * TILE_WIDTH
        tile = self._read(number, start, min(start + TILE_WIDTH, size))
        level, root, is_full = 1, tile.root(), tile.size == TILE_WIDTH
        while is_full:
            if self._store.hashes(level, number, number + 1) != [root]:
                raise DamagedError(
                    f"the hash {number} of level {level} is missing or not the one of stored entries",
                    start // TILE_WIDTH,
                )
            if (number + 1) % TILE_WIDTH:
                break
            number //= TILE_WIDTH
            below = self._store.hashes(level, number * TILE_WIDTH, (number + 1) * TILE_WIDTH)
            level, root, is_full = level + 1, root_from_leaf_hashes(below), len(below) == TILE_WIDTH
        return tile

    def _check_root(self, found: bytes, size: int, root: str) -> None:
        if b64encode(found).decode() != root:
            raise DamagedError(f"the first {size} stored entries are not the ones that were written")

    def _read(self, number: int, start: int, end: int) -> CompactRange:
        leaves = self._store.leaves(start, end)
        if [leaf.index for leaf in leaves] != list(range(start, end)):
            # Read only now: a disposal may have begun since the round did.
            if start < self._store.disposal().below:
                return self._read_disposed(number, start, end)
            raise DamagedError(f"stored entries between {start} and {end - 1} are missing", number)
        tile = CompactRange()
        for leaf in leaves:
            tile.append(_hash(leaf, number))
        return tile

    def _read_disposed(self, number: int, start: int, end: int) -> CompactRange:
        """Return a tile by its root, and check that the leaves that stay lead to it."""
        tile = CompactRange(TILE_WIDTH, self._store.hashes(1, number, number + 1))
        for kept in self._store.kept(start, end):
            index = kept.leaf.index
            if root_of_tile(_hash(kept.leaf, number), index - start, kept.path) != tile.root():
                raise DamagedError(f"entry {index} was disposed of, and another is stored", number)
        return tile

    def _save_pass(self) -> None:
        if self._tiles is not None:
            subtrees = tuple(subtree.hex() for subtree in self._tiles.subtrees)
            self._save(replace(self._progress, tiles=self._tiles.size, subtrees=subtrees))

    def _save(self, progress: CheckProgress) -> None:
        changed, self._progress = progress != self._progress or progress.damage is not None, progress
        if self._file is None or not changed:
            return
        fresh = self._file.with_name(f"{self._file.name}.new")  # a killed one is replaced by the next
        try:
            write_atomically(
                self._file, json.dumps(asdict(progress)).encode(), temporary=fresh, mode=OWNER_ONLY
            )
        except OSError as error:
            raise AuditUnavailableError(
                f"cannot write the progress of the check, {self._file}: {error.strerror}"
            ) from error


def _hash(leaf: Leaf, number: int) -> bytes:
    try:
        leaf_hash = hash_leaf(leaf.leaf)
    except TypeError as error:  # SQLite keeps a value of any type in any column
        raise DamagedError(f"stored entry {leaf.index} is not of bytes", number) from error
    if leaf.leaf_hash != leaf_hash:
        raise DamagedError(f"stored entry {leaf.index} does not have the hash stored with it", number)
    return leaf_hash


def _load(file: Path | None) -> CheckProgress:
    """What the file has; nothing if there is none, or it cannot be read: the pass begins again."""
    try:
        known = json.loads(file.read_bytes()) if file else {}
        return CheckProgress(**{**known, "subtrees": tuple(known.get("subtrees", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return CheckProgress()
