"""
A log of ten million entries: how long starting, verifying and proving take, and what they need.

Entries are inserted in bulk, through the real tree and the real store; only the writer's queue is
excluded.  Filling a directory that was begun resumes where it stopped.  Each step runs in a process of its
own (`benchmarks.audit.step`), on today's source or on another commit's, which has a log of its own.
"""

import asyncio
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from appliance.audit import verify
from appliance.audit.entry import Entry, encode, format_time, new_entry_id
from appliance.audit.export import export_log, export_receipt
from appliance.audit.log import AuditLog
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import Head, Leaf, SqlAuditStore
from appliance.infra.settings import AuditSettings
from benchmarks.audit import step
from benchmarks.audit.entries import pair
from benchmarks.audit.figures import markdown

SETTINGS = AuditSettings(origin="appliance.benchmark/audit")
ROOT = Path(__file__).resolve().parents[2]
BEGIN_MS = 1_800_000_000_000
GROUP = 4096
RECEIPTS = 5
MIB = 2**20
STATE = "--state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that was done to the log, in a process of its own."""

    name: str
    seconds: float
    memory_mib: float
    """The most the process had in memory."""
    finding: str


@dataclass(slots=True, kw_only=True)
class Large:
    """What was measured of one log."""

    commit: str
    root: Path
    """Of the source tree that makes and measures it."""
    directory: Path
    remembers: bool
    """Whether its verifier has `--state`."""
    filled: str = ""
    entries: int = 0
    database_mib: float = 0.0
    export_mib: float = 0.0
    steps: list[Step] = field(default_factory=list)

    @property
    def bytes_per_entry(self) -> float:
        return self.database_mib * MIB / self.entries

    def run(self, name: str, count: int = 0) -> Step:
        """Raises RuntimeError if the step fails."""
        command = [sys.executable, "-P", step.__file__, name, str(self.directory), str(count)]
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        done = subprocess.run(
            command, cwd=self.root, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{self.commit}: {name}: the process ended before it was done")
        seconds, memory, finding = json.loads(done.stdout.splitlines()[-1])
        return Step(name=name, seconds=seconds, memory_mib=memory, finding=finding)


def measure(
    directory: Path,
    entries: int,
    say: Callable[[str], None],
    *,
    commit: str,
    against: str = "",
    starts: int = 3,
) -> list[Large]:
    """
    Fill a log up to so many entries and measure what can be done with it, step by step.

    With `against`, a commit, do the same with its source in turn: its log is measured first in each step.
    """
    with ExitStack() as stack:
        trees = {commit: ROOT}
        if against:
            trees = {against: stack.enter_context(checkout(against)), **trees}
        logs = [_log(name, root, directory / name) for name, root in trees.items()]
        for log in logs:
            log.filled = log.run("fill", entries).finding
        for name in ("open, check, sign", "export", "verify"):
            _run_in_turn(name, logs, say)
        for log in logs:
            log.entries = _size(log.directory)
            log.database_mib = _mib(log.directory.glob("audit.db*"))
            log.export_mib = _mib((log.directory / "export").rglob("*"))
        for name in ("make a receipt", "verify a receipt"):
            _run_in_turn(name, logs, say)
        remembering = [log for log in logs if log.remembers]
        for log in logs:
            if not log.remembers:
                say(f"{log.commit}: its verifier has no {STATE}")
        _run_in_turn("verify --state, first", remembering, say)
        for log in remembering:
            log.run("fill", _size(log.directory) + step.ADDED)
            log.run("open, check, sign")
            shutil.rmtree(log.directory / "export")
            log.run("export")
        _run_in_turn(f"verify --state, {step.ADDED:,} new entries", remembering, say)
        # Last: a gateway records its own keys, and the entries above name another.
        for name in ("start, empty log", "start"):
            _run_in_turn(name, logs, say, starts)
    return logs


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The source of a commit, in a directory for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch:
        root = Path(scratch) / "source"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", root, commit], cwd=ROOT, check=True)
        try:
            yield root
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", root], cwd=ROOT, check=True)


def fill(directory: Path, entries: int, say: Callable[[str], None]) -> float | None:
    """Add entries until there are so many; return how many were added per second, if any were."""
    with closing(SqlAuditStore(_url(directory))) as store:
        head = store.head()
        tree, before = CompactRange(head.size, head.subtrees), head.size
        odd = before % 2  # a gateway has written to it: the next entry is an intent all the same
        started = told = time.perf_counter()
        while tree.size < entries:
            grown, leaves = tree.copy(), []
            for index in range(tree.size, min(tree.size + GROUP, entries)):
                leaves.append(_leaf(index, index + odd))
                grown.append(leaves[-1].leaf_hash)
            store.append(leaves, expected=Head.of(tree), new=Head.of(grown))
            tree = grown
            if (now := time.perf_counter()) - told > 10:
                told = now
                say(f"{tree.size:,} of {entries:,} entries")
        added = tree.size - before
        return added / (time.perf_counter() - started) if added else None


def _leaf(index: int, number: int) -> Leaf:
    """Entry `index`: by turns an intent, and the outcome of the same request."""
    request_id = new_entry_id(BEGIN_MS + number // 2, (number // 2).to_bytes(10))
    entry_type, fields = pair(request_id)[number % 2]
    entry = Entry(
        log=SETTINGS.origin,
        id=new_entry_id(BEGIN_MS + number // 2, (number + 2**70).to_bytes(10)),
        type=entry_type,
        time=format_time(BEGIN_MS + number // 2),
        fields=fields,
    )
    leaf = encode(entry)
    return Leaf(
        index=index, leaf=leaf, leaf_hash=hash_leaf(leaf), type=entry_type.value, request_id=request_id
    )


def _log(commit: str, root: Path, directory: Path) -> Large:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "verified.state").unlink(missing_ok=True)
    if not (directory / "audit.key").exists():
        create_signing_key(directory / "audit.key")
    (directory / "log.keys").write_text(_signer(directory).vkey, encoding="utf-8")
    verifier = [sys.executable, root / "appliance" / "audit" / "verify.py", "--help"]
    options = subprocess.run(verifier, capture_output=True, text=True, check=True).stdout
    return Large(commit=commit, root=root, directory=directory, remembers=STATE in options)


def _run_in_turn(name: str, logs: Sequence[Large], say: Callable[[str], None], count: int = 0) -> None:
    for log in logs:
        if name == "export":
            shutil.rmtree(log.directory / "export", ignore_errors=True)
        done = log.run(name, count)
        log.steps.append(done)
        say(f"{log.commit}: {name}: {done.seconds:.2f} s, {done.memory_mib:.0f} MiB, {done.finding}")


def _size(directory: Path) -> int:
    """Entries of the log: asked of the database, which a store would upgrade."""
    with closing(sqlite3.connect(directory / "audit.db")) as database:
        return int(database.execute("SELECT size FROM audit_head").fetchone()[0])


def _mib(files: Iterator[Path]) -> float:
    return sum(file.stat().st_size for file in files if file.is_file()) / MIB


def _open(directory: Path) -> tuple[float, str]:
    """Open the log as a gateway does at its start; on closing, the newest head is signed."""

    async def open_and_close() -> tuple[float, int]:
        started = time.perf_counter()
        async with AuditLog.open(
            store=store,
            signer=_signer(directory),
            settings=SETTINGS,
            sealed_head_path=directory / "audit.head",
            clock=time.time,  # noqa: TID251 - a benchmark is a composition root
            version="benchmark",
        ) as log:
            return time.perf_counter() - started, log.size

    with closing(SqlAuditStore(_url(directory))) as store:
        seconds, size = asyncio.run(open_and_close())
    return seconds, f"{size:,} entries"


def _export(directory: Path) -> tuple[float, str]:
    target = directory / "export"
    if target.exists():
        target.rename(directory / f"export-{time.time_ns()}")
    started = time.perf_counter()
    with closing(SqlAuditStore(_url(directory))) as store:
        size = export_log(store, target, vkey=_signer(directory).vkey)
    return time.perf_counter() - started, f"{size:,} entries"


def _verify(directory: Path) -> tuple[float, str]:
    started = time.perf_counter()
    key = verify.parse_keys(_signer(directory).vkey)
    report = verify.verify_export(directory / "export", key, None)
    return time.perf_counter() - started, f"{report.exit_code.name.lower()}, {report.size:,} entries"


def _receipt(directory: Path) -> tuple[float, str]:
    found = []
    with closing(SqlAuditStore(_url(directory))) as store:
        size = store.head().size
        for number in range(RECEIPTS):
            started = time.perf_counter()
            leaf, text = export_receipt(store, size * number // RECEIPTS)
            found.append(time.perf_counter() - started)
            (directory / "receipt.tlog-proof").write_text(text, encoding="utf-8")
            (directory / "receipt.leaf").write_bytes(leaf)
    return statistics.median(found), f"median of {RECEIPTS}"


def _verify_receipt(directory: Path) -> tuple[float, str]:
    key = verify.parse_keys(_signer(directory).vkey)
    text = (directory / "receipt.tlog-proof").read_bytes()
    leaf = (directory / "receipt.leaf").read_bytes()
    started = time.perf_counter()
    report = verify.verify_receipt(text, leaf, key, None)
    return time.perf_counter() - started, report.exit_code.name.lower()


def _url(directory: Path) -> str:
    return f"sqlite:///{directory.absolute()}/audit.db"


def _signer(directory: Path) -> Any:  # noqa: ANN401 - whatever signs
    return load_signing_key(directory / "audit.key", SETTINGS.origin)


def table(logs: Sequence[Large]) -> str:
    """The table of a report, in Markdown; the last log is today's."""
    size = [
        f"{log.commit}: {log.entries:,} entries, {log.bytes_per_entry:.0f} bytes an entry in a database of "
        f"{log.database_mib:,.0f} MiB; export {log.export_mib:,.0f} MiB; inserted in bulk: {log.filled}.\n"
        for log in logs
    ]
    found = [{done.name: done for done in log.steps} for log in logs]
    columns = [f"{unit}, {log.commit}" for unit in ("seconds", "MiB") for log in logs]
    ratios = ["ratio of seconds", "ratio of MiB"] if len(logs) > 1 else []
    rows = []
    for name, today in found[-1].items():
        steps = [steps.get(name) for steps in found]
        seconds = [f"{done.seconds:.3f}" if done else "-" for done in steps]
        memory = [f"{done.memory_mib:,.0f}" if done else "-" for done in steps]
        compared = ["-", "-"] if ratios else []
        if ratios and (before := steps[0]):
            compared = [
                f"{today.seconds / before.seconds:.3f}",
                f"{today.memory_mib / before.memory_mib:.2f}",
            ]
        rows.append([name, *seconds, *memory, *compared, today.finding])
    return "\n".join(size) + "\n" + markdown(["step", *columns, *ratios, "found"], rows)


def document(logs: Sequence[Large]) -> list[dict[str, Any]]:
    """The same for a program."""
    return [
        {
            **asdict(log, dict_factory=lambda items: {k: v for k, v in items if not isinstance(v, Path)}),
            "bytes_per_entry": log.bytes_per_entry,
        }
        for log in logs
    ]
