"""
A log of ten million entries: how long verifying and proving take, and what it needs.

Entries are inserted in bulk, through the real tree and the real store; only the writer's queue is
excluded.  Filling a directory that was begun resumes where it stopped.  Each step that is measured
runs in a process of its own, so that its memory is its own.
"""

import asyncio
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
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
from benchmarks.audit.entries import pair
from benchmarks.audit.figures import markdown

SETTINGS = AuditSettings(origin="appliance.benchmark/audit")
BEGIN_MS = 1_800_000_000_000
GROUP = 4096
RECEIPTS = 5
KIB, MIB = 1024, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that was done to the log, in a process of its own."""

    name: str
    seconds: float
    memory_mib: float
    """The most the process had in memory."""
    finding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """What was measured of one log."""

    entries: int
    filled_per_second: float | None
    """Entries; None when they were there already."""
    database_mib: float
    bytes_per_entry: float
    export_mib: float
    steps: tuple[Step, ...]


def measure(directory: Path, entries: int, say: Callable[[str], None]) -> Large:
    """Fill the log in `directory` up to so many entries, and measure what can be done with it."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "audit.key").exists():
        create_signing_key(directory / "audit.key")
    speed = fill(directory, entries, say)
    steps = []
    for name, work in (
        ("open, check, sign", _open),
        ("export", _export),
        ("verify", _verify),
        ("make a receipt", _receipt),
        ("verify a receipt", _verify_receipt),
    ):
        steps.append(_apart(name, work, directory))
        say(f"{name}: {steps[-1].seconds:.2f} s, {steps[-1].memory_mib:.0f} MiB, {steps[-1].finding}")
    size = sum(file.stat().st_size for file in directory.glob("audit.db*"))
    exported = sum(file.stat().st_size for file in (directory / "export").rglob("*") if file.is_file())
    return Large(
        entries=entries,
        filled_per_second=speed,
        database_mib=size / MIB,
        bytes_per_entry=size / entries,
        export_mib=exported / MIB,
        steps=tuple(steps),
    )


def fill(directory: Path, entries: int, say: Callable[[str], None]) -> float | None:
    """Add entries until there are so many; return how many were added per second, if any were."""
    with closing(SqlAuditStore(_url(directory))) as store:
        head = store.head()
        tree, before = CompactRange(head.size, head.subtrees), head.size
        started = told = time.perf_counter()
        while tree.size < entries:
            grown, leaves = tree.copy(), []
            for index in range(tree.size, min(tree.size + GROUP, entries)):
                leaves.append(_leaf(index))
                grown.append(leaves[-1].leaf_hash)
            store.append(leaves, expected=Head.of(tree), new=Head.of(grown))
            tree = grown
            if (now := time.perf_counter()) - told > 10:
                told = now
                say(f"{tree.size:,} of {entries:,} entries")
        added = tree.size - before
        return added / (time.perf_counter() - started) if added else None


def _leaf(index: int) -> Leaf:
    """Entry `index`: by turns an intent, and the outcome of the same request."""
    request_id = new_entry_id(BEGIN_MS + index // 2, (index // 2).to_bytes(10))
    entry_type, fields = pair(request_id)[index % 2]
    entry = Entry(
        log=SETTINGS.origin,
        id=new_entry_id(BEGIN_MS + index // 2, (index + 2**70).to_bytes(10)),
        type=entry_type,
        time=format_time(BEGIN_MS + index // 2),
        fields=fields,
    )
    leaf = encode(entry)
    return Leaf(
        index=index, leaf=leaf, leaf_hash=hash_leaf(leaf), type=entry_type.value, request_id=request_id
    )


def _apart(name: str, work: Callable[[Path], tuple[float, str]], directory: Path) -> Step:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, directory, sender))
    process.start()
    sender.close()
    try:
        seconds, finding, memory = receiver.recv()
    except EOFError as error:
        raise RuntimeError(f"{name}: the process ended before it was done") from error
    finally:
        process.join()
    return Step(name=name, seconds=seconds, memory_mib=memory / KIB, finding=finding)


def _run(
    work: Callable[[Path], tuple[float, str]], directory: Path, sender: multiprocessing.connection.Connection
) -> None:
    seconds, finding = work(directory)
    # Not ru_maxrss: that would begin with what the parent had when it made this process.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    sender.send((seconds, finding, int(peak.split()[1])))


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


def table(found: Large) -> str:
    """The table of a report, in Markdown."""
    filled = f"{found.filled_per_second:,.0f} entries/s" if found.filled_per_second else "there already"
    size = f"{found.database_mib:,.0f} MiB, {found.bytes_per_entry:.0f} bytes an entry"
    return (
        f"Inserted in bulk: {filled}. Database: {size}. Export: {found.export_mib:,.0f} MiB.\n\n"
        + markdown(
            ["step", "seconds", "memory MiB", "found"],
            [
                [step.name, f"{step.seconds:.3f}", f"{step.memory_mib:,.0f}", step.finding]
                for step in found.steps
            ],
        )
    )


def document(found: Large) -> dict[str, Any]:
    """The same for a program."""
    return asdict(found)
