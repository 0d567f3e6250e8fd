"""
Appends per second and commit latency: one log, and one, two or four writers on PostgreSQL, each a process.

Each writer has several requests in flight, as a gateway has; entries become durable in groups.  At
the end the log is exported and verified, and must hold every entry that was acknowledged: speed
that loses entries is not reported.
"""

import asyncio
import multiprocessing
import multiprocessing.queues
import multiprocessing.synchronize
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import uvloop

from appliance.audit import verify
from appliance.audit.export import export_log
from appliance.audit.integration import AcceptedRow
from appliance.audit.log import AuditLog
from appliance.audit.pending_rows import Fence, Writing
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import Behind, Head, Leaf, SqlAuditStore
from appliance.infra.schema import upgrade_database
from appliance.infra.settings import AuditSettings
from benchmarks.audit.entries import pair
from benchmarks.audit.figures import Times, markdown, times
from tests.postgres import find_binaries, private_postgres

SETTINGS = AuditSettings(origin="appliance.benchmark/audit")
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appends:
    """One line of the table."""

    database: str
    writers: int
    requests: int
    """In flight at once, in each writer."""
    seconds: float
    entries: int
    entries_per_second: float
    commits_per_second: float
    entries_per_commit: float
    commit: Times
    """What the database took for a group."""
    append: Times
    """How long the caller of an append waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one writer process is told."""

    url: str
    directory: Path
    number: int
    requests: int
    seconds: float


class TimedStore(SqlAuditStore):
    """A store that notes how long each commit takes: an event loop's clock may count milliseconds."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.commits: list[float] = []
        """Seconds of each, with what it waited for its turn."""

    def append(
        self, leaves: Sequence[Leaf], *, expected: Head, new: Head, fence: Fence | None = None
    ) -> None:
        """Append, and note the time."""
        with self._timed():
            super().append(leaves, expected=expected, new=new, fence=fence)

    def accept(self, writing: Writing, rows: Sequence[AcceptedRow]) -> None:
        """Likewise."""
        with self._timed():
            super().accept(writing, rows)

    def append_behind(self, size: int, make: Behind, *, fence: Fence | None = None) -> None:
        """Likewise."""
        with self._timed():
            super().append_behind(size, make, fence=fence)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.commits.append(time.perf_counter() - started)


def measure(databases: list[str], writers: list[int], requests: int, seconds: float) -> Iterator[Appends]:
    """
    Measure every combination, one after the other; a SQLite log has one writer and no more.

    Raises:
        RuntimeError: a writer failed, or the log does not hold what was acknowledged.
    """
    for database in databases:
        for count in writers if database == "postgresql" else [1]:
            with (
                tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
                _url(database, scratch) as url,
            ):
                yield _measure(database, url, Path(scratch), count, requests, seconds)


def available() -> list[str]:
    """The databases that can be measured on this machine."""
    return ["sqlite", *(["postgresql"] if find_binaries() else [])]


@contextmanager
def _url(database: str, scratch: str) -> Iterator[str]:
    if database == "sqlite":
        yield f"sqlite:///{scratch}/audit.db"
    else:
        with private_postgres() as server:
            yield server.new_database()


def _measure(
    database: str, url: str, directory: Path, writers: int, requests: int, seconds: float
) -> Appends:
    create_signing_key(directory / "audit.key")
    upgrade_database(url)  # the tables are made once, before anybody races for them
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.queues.Queue[dict[str, Any]] = context.Queue()
    barrier = context.Barrier(writers)
    processes = []
    for number in range(writers):
        job = Job(url=url, directory=directory, number=number, requests=requests, seconds=seconds)
        processes.append(context.Process(target=write, args=(job, barrier, results), daemon=True))
        processes[-1].start()
    found = [results.get(timeout=START_SECONDS + 2 * seconds) for _ in processes]
    for process in processes:
        process.join()
    if failures := [result["failure"] for result in found if "failure" in result]:
        # A writer that fails breaks the others' barrier; what they say of that is no cause.
        raise RuntimeError(min(failures, key=lambda failure: BrokenBarrierError.__name__ in failure))
    entries = sum(len(result["appends"]) for result in found)
    _verify(url, directory, entries)
    commits = [duration for result in found for duration in result["commits"]]
    lasted = max(result["lasted"] for result in found)
    return Appends(
        database=database,
        writers=writers,
        requests=requests,
        seconds=lasted,
        entries=entries,
        entries_per_second=entries / lasted,
        commits_per_second=len(commits) / lasted,
        entries_per_commit=entries / max(1, len(commits)),
        commit=times(commits),
        append=times([duration for result in found for duration in result["appends"]]),
    )


def write(
    job: Job,
    barrier: multiprocessing.synchronize.Barrier,
    results: "multiprocessing.queues.Queue[dict[str, Any]]",
) -> None:
    """The life of one writer process."""
    try:
        results.put(uvloop.run(_write(job, barrier)))
    except Exception as error:  # noqa: BLE001 - reported by the parent
        barrier.abort()
        results.put({"failure": f"writer {job.number}: {type(error).__name__}: {error}"})


async def _write(job: Job, barrier: multiprocessing.synchronize.Barrier) -> dict[str, Any]:
    appends: list[float] = []

    async def requests(log: AuditLog, client: int, until: float) -> None:
        number = 0
        while time.perf_counter() < until:
            for entry_type, fields in pair(f"{job.number}-{client}-{number}"):
                started = time.perf_counter()
                await log.confirm(log.submit(entry_type, **fields))
                appends.append(time.perf_counter() - started)
            number += 1

    own = job.directory / f"writer-{job.number}"
    own.mkdir()
    with closing(TimedStore(job.url)) as store:
        async with AuditLog.open(
            store=store,
            signer=load_signing_key(job.directory / "audit.key", SETTINGS.origin),
            settings=SETTINGS,
            sealed_head_path=own / "audit.head",
            clock=time.time,  # noqa: TID251 - a benchmark is a composition root
            version="benchmark",
            gateway=f"writer-{job.number}",
        ) as log:
            await asyncio.to_thread(barrier.wait, START_SECONDS)
            store.commits.clear()
            started = time.perf_counter()
            until = started + job.seconds
            await asyncio.gather(*(requests(log, client, until) for client in range(job.requests)))
            lasted, commits = time.perf_counter() - started, list(store.commits)
    return {"appends": appends, "commits": commits, "lasted": lasted}


def _verify(url: str, directory: Path, entries: int) -> None:
    key = load_signing_key(directory / "audit.key", SETTINGS.origin)
    with closing(SqlAuditStore(url)) as store:
        export_log(store, directory / "export", vkey=key.vkey)
    report = verify.verify_export(directory / "export", verify.parse_keys(key.vkey), None)
    found = sum(report.entries_by_type[name] for name in ("request.intent", "request.outcome"))
    if report.exit_code != verify.ExitCode.VALID or found != entries:
        raise RuntimeError(
            f"{entries} entries were acknowledged, {found} are in the log, problems: {report.problems[:3]}"
        )


def table(lines: list[Appends]) -> str:
    """The table of a report, in Markdown."""
    columns = ["database", "writers", "entries/s", "commits/s", "entries per commit"]
    return markdown(
        [*columns, "commit p50 / p99 ms", "append p50 / p99 ms"],
        [
            [
                line.database,
                str(line.writers),
                f"{line.entries_per_second:,.0f}",
                f"{line.commits_per_second:,.0f}",
                f"{line.entries_per_commit:.1f}",
                f"{line.commit.p50:.2f} / {line.commit.p99:.2f}",
                f"{line.append.p50:.2f} / {line.append.p99:.2f}",
            ]
            for line in lines
        ],
    )


def document(lines: list[Appends]) -> list[dict[str, Any]]:
    """The same for a program."""
    return [asdict(line) for line in lines]
