"""The data directory's disk: writable, durable, local, and large enough for the audit log."""

import os
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from appliance.cli.preflight.check import Check, Inquiry, Subject, family, gib, read_text

WRITABLE = Subject("disk.writable", "Data directory")
SPEED = Subject("disk.fsync", "Durable writes")
FILESYSTEM = Subject("disk.filesystem", "File system")
SPACE = Subject("disk.space", "Disk space")
SHARED = (
    *("nfs", "cifs", "smb", "9p", "ceph", "gluster", "lustre", "afs", "beegfs", "gpfs"),
    *("sshfs", "virtiofs"),
)
"""Prefixes of the names of file systems that several machines may mount."""
FLEETING = frozenset({"tmpfs", "ramfs", "overlay", "aufs"})
"""File systems whose content is lost with the machine or the container."""
WRITES = 20
SLOW_SECONDS, SLOWEST_SECONDS = 0.005, 0.03
ENTRY_BYTES = 646
"""Bytes of the database per entry: benchmarks/results/audit-large-b96b0c4.md."""
ENTRIES_PER_REQUEST = 2
MOUNT_FIELDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDisk:
    directory: Path
    exists: bool
    """False if the nearest existing directory above it was checked instead."""
    problem: str | None
    """Why it could not be written to; None if it could."""
    sync_seconds: float | None
    """Median of small durable writes; None if it could not be written to."""
    filesystem: str
    """Name in the kernel's list of mounts; empty if not found."""
    wal: bool
    """Whether SQLite can use a write-ahead log there."""
    free_bytes: int


@family(WRITABLE, SPEED, FILESYSTEM, SPACE)
def check_disk(inquiry: Inquiry) -> Iterable[Check]:
    """Write to the data directory's disk, and remove everything again."""
    seen = measure_disk(inquiry.installation.directory)
    yield judge_writable(seen)
    inquiry.require_gateway()
    yield judge_speed(seen)
    yield judge_filesystem(seen, sqlite=inquiry.uses_sqlite)
    yield judge_space(
        seen,
        low_bytes=inquiry.settings.audit.low_disk_bytes,
        files_bytes=0 if inquiry.settings.batch.directory else inquiry.settings.batch.keep_free_bytes,
        requests_per_day=inquiry.requests_per_day if inquiry.uses_sqlite else None,
        keep_days=inquiry.keep_days,
    )


def measure_disk(directory: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> SeenDisk:
    """Measure the disk of a directory (absolute path), or of the nearest existing one above it."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    problem, seconds, wal = None, None, False
    try:
        with tempfile.TemporaryDirectory(prefix=".preflight-", dir=place) as scratch:
            seconds = _time_writes(Path(scratch) / "sync")
            wal = _has_wal(Path(scratch) / "wal.db")
    except OSError as error:
        problem = error.strerror or str(error)
    return SeenDisk(
        directory=directory,
        exists=directory.exists(),
        problem=problem,
        sync_seconds=seconds,
        filesystem=filesystem_of(place.resolve(), read_text(mounts)),
        wal=wal,
        free_bytes=shutil.disk_usage(place).free,
    )


def judge_writable(seen: SeenDisk) -> Check:
    where = f"{seen.directory}{'' if seen.exists else ' (created at the first start)'}"
    if seen.problem is not None:
        todo = "make it writable for the appliance's account, or pass another with --data"
        return WRITABLE.fail(f"{where} is not writable: {seen.problem}", todo)
    return WRITABLE.ok(where)


def judge_speed(seen: SeenDisk) -> Check:
    """Whether the disk is fast enough: each request waits for one or two such writes."""
    if seen.sync_seconds is None:
        return SPEED.skipped("nothing could be written")
    took = f"{seen.sync_seconds * 1000:.2f} ms for 4 KiB, median of {WRITES}"
    if seen.sync_seconds > SLOWEST_SECONDS:
        return SPEED.warn(f"{took}: like a busy hard disk", "put the data directory on a solid-state disk")
    if seen.sync_seconds > SLOW_SECONDS:
        return SPEED.warn(f"{took}: slower than a solid-state disk", "use a local disk without other writers")
    return SPEED.ok(f"{took}: like a solid-state disk")


def judge_filesystem(seen: SeenDisk, *, sqlite: bool) -> Check:
    name = seen.filesystem or "unknown"
    # SQLite's write-ahead log needs memory shared by all its users, so it cannot be on a network file system
    # (https://www.sqlite.org/wal.html).
    if name.removeprefix("fuse.").startswith(SHARED):
        if sqlite:
            todo = "put the data directory on a local disk, or the audit log in PostgreSQL"
            return FILESYSTEM.fail(f"{name} is a network file system, where SQLite can lose entries", todo)
        todo = "give each gateway its own directory there, and make its writes durable"
        return FILESYSTEM.warn(f"{name} is a network file system", todo)
    if sqlite and seen.problem is None and not seen.wal:
        text = f"{name}: SQLite cannot use a write-ahead log there"
        return FILESYSTEM.fail(text, "use a local disk, such as ext4 or xfs")
    if name in FLEETING:
        text = f"{name}: its content is lost with the machine or container"
        return FILESYSTEM.warn(text, "mount a volume there")
    return FILESYSTEM.ok(f"{name}, SQLite uses a write-ahead log there" if seen.wal else name)


def judge_space(
    seen: SeenDisk, *, low_bytes: int, files_bytes: int, requests_per_day: int | None, keep_days: int
) -> Check:
    """
    Whether there is space: `entries x 646 bytes`, two entries per request, above the watermark.

    Operators are warned below `low_bytes` (`audit.low_disk_bytes`), and files, if they are on this disk, are
    refused below `files_bytes` (`batch.keep_free_bytes`).  `requests_per_day` is None if it is
    unknown, or if the log is elsewhere.
    """
    each = ENTRY_BYTES * ENTRIES_PER_REQUEST
    room = max(0, seen.free_bytes - low_bytes)
    text = f"{gib(seen.free_bytes)} free, enough for the log of about {room // each:,} requests"
    if seen.free_bytes < low_bytes:
        todo = f"free space: audit.low_disk_bytes is {gib(low_bytes)}, and a full disk stops service"
        return SPACE.fail(f"{gib(seen.free_bytes)} free", todo)
    if requests_per_day is not None:
        wanted = requests_per_day * keep_days * each
        text = f"{text}, {gib(wanted)} wanted for {keep_days} days"
        if wanted > room:
            todo = f"add {gib(wanted - room)}, keep the log in PostgreSQL, or keep it for fewer days"
            return SPACE.fail(text, todo)
    if seen.free_bytes < files_bytes:
        return SPACE.warn(text, f"batch files are refused below {gib(files_bytes)} (batch.keep_free_bytes)")
    return SPACE.ok(text)


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The file system of a path, from the text of /proc/self/mountinfo (proc(5))."""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < MOUNT_FIELDS or not rest:
            continue
        mount = Path(words[4].encode().decode("unicode_escape"))
        # Of two mounts at one place the later covers the earlier.
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), rest.split()[0]
    return kind


def _time_writes(file: Path) -> float:
    times = []
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for _ in range(WRITES):
            begin = time.perf_counter()
            os.write(descriptor, b"\0" * 4096)
            os.fsync(descriptor)
            times.append(time.perf_counter() - begin)
    finally:
        os.close(descriptor)
    return statistics.median(times)


def _has_wal(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(file)) as database:
            mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            database.execute("CREATE TABLE probe (x)")
            database.commit()
    except sqlite3.Error:
        return False
    return bool(mode == "wal")
