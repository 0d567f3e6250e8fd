"""
The writer process of the crash suite: a real audit log, and a report of everything it promised.

    python -m tests.faults.writer

A task is a line of JSON on standard input, `{"task": ..., "directory": ..., "traced": ...}`.  Each
but `recover`, which nothing harms, runs in a process of its own, forked off after the imports, and
dies with it: what a fault does to one task leaves the next one alone.  A traced task waits until a
tracer holds it before it touches anything that is to be counted.

It reports on standard output, one line of JSON and one system call each, so that a line is there
whole or not at all: `pid`; `acknowledged` (index, entry id and leaf hash of an entry whose append has
returned; the id alone for one in the spool); `refused` (type and request); `published` (a checkpoint
that others may hold from now on); `cosigned` (status of a witness's answer); `stamped` (a time stamp
that was kept, with its size); `forwarding` and `forwarded` (a forwarder began; index of an entry that it
has sent); `checked` (entries that a whole pass of the self-check found sound); `disposing` (a disposal
began, of so many entries); `stopped` (one of our errors ended the task); and from the parent `ended` (exit
status, or minus the signal).
"""

import asyncio
import ctypes
import json
import os
import sys
import time
import traceback
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import alembic.command  # noqa: F401 - loaded once, here: a new database needs it
from cryptography import x509
from sqlalchemy import event

from appliance.audit.disposal import store as disposal_store
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.durability import selfcheck
from appliance.audit.durability.durable import DurableLog
from appliance.audit.durability.selfcheck import SelfCheck
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.forward import forwarder, reader
from appliance.audit.merkle import TILE_WIDTH, CompactRange
from appliance.audit.pending import Kept
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.authority import Authority
from appliance.audit.timestamps.timestamping import import_response
from appliance.audit.witness.home import WitnessHome
from appliance.errors import ApplianceError, AuditError, AuditUnavailableError
from appliance.infra.data_directory import locate
from tests.audit_log import intent, open_log, outcome, settings_for, signer_in
from tests.consistency import AsLeft, assert_consistent
from tests.forwarding import Collected, indices, make_forwarder, split_frames

GROUPS = 2
GROUP_REQUESTS = 3
CHECKPOINT_ENTRIES = 4
FORWARDED_AT_ONCE = 3
PAGE_BYTES = 4096
FRAME_BYTES = PAGE_BYTES + 24
FULL_WAL_FRAMES = 1000
"""SQLite moves its write-ahead log into the database when a commit leaves this many frames in it."""
STOPPED = 3
PATIENCE_SECONDS = 100
PR_SET_PTRACER = 0x59616D61
ANY_PROCESS = -1


def tell(**report) -> None:
    """Report one fact, whole."""
    os.write(1, json.dumps(report).encode() + b"\n")


class TellingStore(SqlAuditStore):
    """The real store; it also reports checkpoints once they can be seen, and remembers leaf hashes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.leaf_hash_at: dict[int | None, str] = {}
        self.is_away = False
        """Whether it takes no entries."""

    def append(self, leaves, **heads) -> None:
        if self.is_away:
            raise AuditUnavailableError("the database is away")
        self.leaf_hash_at |= {leaf.index: leaf.leaf_hash.hex() for leaf in leaves}
        super().append(leaves, **heads)

    def save_checkpoint(self, checkpoint) -> None:
        super().save_checkpoint(checkpoint)
        tell(published=checkpoint.note)


def open_store(directory: Path) -> TellingStore:
    """The store of the log in `directory`."""
    return TellingStore(locate(settings_for(directory)).database_url)


def create(directory: Path, hold: Callable[[], None]) -> None:
    """Make the database, as a first start does."""
    hold()
    open_store(directory).close()


def write(directory: Path, hold: Callable[[], None]) -> None:
    """Continue a log: requests in groups, checkpoints in between; the database is left open at the end."""
    store = open_store(directory)
    hold()
    asyncio.run(_record(directory, store, GROUPS))


def close(directory: Path, hold: Callable[[], None]) -> None:
    """Continue a log, and be held only when it closes its database: SQLite then tidies up."""
    store = open_store(directory)
    asyncio.run(_record(directory, store, 1))
    hold()
    store.close()


def fill(directory: Path, _hold: Callable[[], None]) -> None:
    """Write until the next few commits make SQLite move its write-ahead log into the database."""
    store = open_store(directory)
    wal = f"{store._engine.url.database}-wal"

    async def fill_() -> None:
        async with open_log(_settings(directory), store) as log:
            while os.path.getsize(wal) < (FULL_WAL_FRAMES - 16) * FRAME_BYTES:  # noqa: ASYNC240, PTH202 - nobody waits for this loop
                await log.sink.append(EntryType.AUDIT_READ, actor="cli:root", operation="tail")

    asyncio.run(fill_())


def pad(directory: Path, _hold: Callable[[], None]) -> None:
    """Write until the next task completes a tile in the middle of its entries."""
    store = open_store(directory)

    async def pad_() -> None:
        async with open_log(_settings(directory), store) as log:
            count = TILE_WIDTH - 6 - log.log.state().size % TILE_WIDTH
            reading = {"actor": "cli:root", "operation": "tail"}
            for pending in [log.sink.submit(EntryType.AUDIT_READ, **reading) for _ in range(count)]:
                await log.sink.confirm(pending)

    asyncio.run(pad_())
    store.close()


def spool(directory: Path, hold: Callable[[], None]) -> None:
    """Continue to record while the database fails, and end before it works again."""
    store = open_store(directory)

    async def spool_() -> None:
        async with open_log(_settings(directory, durability="spool"), store) as log:
            store.is_away = True
            hold()
            await _record_with(log.sink, store, GROUPS)
            os._exit(0)

    asyncio.run(spool_())


def drain(directory: Path, hold: Callable[[], None]) -> None:
    """Start, and bring into the log what waits in the spool."""
    store = open_store(directory)
    hold()
    asyncio.run(_record(directory, store, 0))


def carelessly(directory: Path, hold: Callable[[], None]) -> None:
    """Write with `synchronous=NORMAL`: the power-cut test must fail for it."""
    store = open_store(directory)

    @event.listens_for(store._engine, "checkout")
    def relax(connection, _record, _proxy) -> None:
        connection.execute("PRAGMA synchronous = NORMAL")

    hold()
    asyncio.run(_record(directory, store, GROUPS))


def cosign(directory: Path, hold: Callable[[], None]) -> None:
    """Run the witness in the directory for one cosignature."""
    witness = WitnessHome(directory=directory).open(time.time)  # noqa: TID251 - a root of its own
    request = (directory / "request").read_text(encoding="utf-8")
    hold()
    tell(cosigned=witness.add_checkpoint(request).status)


def stamp(directory: Path, hold: Callable[[], None]) -> None:
    """Keep the time stamp in the directory, made with the certificate next to it."""
    store = open_store(directory)
    certificates = x509.load_pem_x509_certificates((directory / "stamp.pem").read_bytes())
    response = (directory / "stamp.tsr").read_bytes()
    hold()
    tell(stamped=import_response(store, Authority(certificates=tuple(certificates)), response).size)
    os._exit(0)


def forward(directory: Path, hold: Callable[[], None]) -> None:
    """Forward the log, keeping the cursor after each few entries."""
    store = open_store(directory)
    reader.BATCH_ENTRIES, forwarder.SAVE_SECONDS, forwarder.MARK_BYTES = FORWARDED_AT_ONCE, 0.0, 1

    class Telling(Collected):
        async def send(self, data: bytes) -> None:
            for message in split_frames(data):
                for index in indices([message]):
                    tell(forwarded=index)

    async def forward_() -> None:
        # One thread makes all calls, so that they can be counted.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await make_forwarder(store, Telling(), window_bytes=0).forward(until_sent=True)

    tell(forwarding=True)
    hold()
    asyncio.run(forward_())


def check(directory: Path, hold: Callable[[], None]) -> None:
    """Check the whole log, a tile a round, from where a former check stopped."""
    selfcheck.LEAST_TILES = 1
    store = open_store(directory)
    head = store.head()
    root = b64encode(CompactRange(head.size, head.subtrees).root()).decode()
    hold()
    while True:
        one = SelfCheck(
            store,
            directory / "audit.checked",
            verify_seconds=1.0,
            clock=time.time,  # noqa: TID251 - a root of its own
            rest=lambda _seconds: None,
        )
        before = one.found.time
        one.round(head.size, root)
        if one.found.time > before:
            tell(checked=one.found.size)
            os._exit(0)


def dispose(directory: Path, hold: Callable[[], None]) -> None:
    """Carry out the disposal that is recorded, in as many transactions as it has tiles."""
    store = open_store(directory)
    disposal_store.TILES = 1
    disposing = Disposing(store=store)
    recorded = disposing.recorded()
    tell(disposing=recorded.below if recorded else 0)
    hold()
    if recorded:
        list(disposing.carry_out(recorded))
    os._exit(0)


def recover(directory: Path, _hold: Callable[[], None]) -> None:
    """Start as after a crash, stop in order, and export what an auditor would be given."""
    with closing(AsLeft(locate(settings_for(directory)).database_url)) as left:
        assert_consistent(left)
    store = open_store(directory)

    async def start_and_stop() -> None:
        async with open_log(_settings(directory), store):
            pass

    asyncio.run(start_and_stop())
    export_log(store, directory / "export", vkey=signer_in(directory).vkey)
    store.close()


TASKS = {
    task.__name__: task
    for task in (
        *(create, write, close, fill, pad, spool, drain, carelessly, cosign, stamp, forward, check, dispose),
        recover,
    )
}


async def _record(directory: Path, store: TellingStore, groups: int) -> None:
    async with open_log(_settings(directory), store) as log:
        await _record_with(log.sink, store, groups)


async def _record_with(log: DurableLog, store: TellingStore, groups: int) -> None:
    run = time.monotonic_ns()  # request ids are never reused
    for group in range(groups):
        names = [f"{run}-{group}-{number}" for number in range(GROUP_REQUESTS)]
        begun = await _append(log, store, EntryType.REQUEST_INTENT, names, intent)
        await _append(log, store, EntryType.REQUEST_OUTCOME, begun, outcome)


async def _append(log: DurableLog, store: TellingStore, entry_type, names, fields) -> list[str]:
    """Hand over entries together and report what became of each; return those that are durable."""
    waiting = []
    for name in names:
        try:
            waiting.append((name, log.submit(entry_type, **fields(name))))
        except AuditError:
            tell(refused=[entry_type.value, name])
    done = []
    for name, pending in waiting:
        try:
            receipt = await log.confirm(pending)
        except AuditError:
            tell(refused=[entry_type.value, name])
        else:
            index = receipt.index if receipt.kept is Kept.LOGGED else None
            tell(acknowledged=[index, receipt.entry_id, store.leaf_hash_at.get(index)])
            done.append(name)
    return done


def _settings(directory: Path, **audit):
    return settings_for(directory, checkpoint_entries=CHECKPOINT_ENTRIES, **audit)


def wait_for_tracer() -> None:
    """Return once a tracer holds this process."""
    # Where the kernel lets only ancestors trace (Yama), this lets any process of the same user.
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(ANY_PROCESS), 0, 0, 0)
    tell(pid=os.getpid())
    deadline = time.monotonic() + PATIENCE_SECONDS
    while b"TracerPid:\t0\n" in Path("/proc/self/status").read_bytes():
        assert time.monotonic() < deadline, "no tracer came"
        time.sleep(0.002)
    # Seized is not yet stopped; the tracer needs a moment to take hold.
    time.sleep(0.02)


def serve() -> None:
    """Run tasks as they come."""
    for line in sys.stdin:
        order = json.loads(line)
        task = partial(TASKS[order["task"]], Path(order["directory"]))
        hold = wait_for_tracer if order["traced"] else lambda: None
        if order["task"] == recover.__name__:
            status = _run(task, hold)
        else:
            child = os.fork()
            if child == 0:
                # As a killed process would: without any cleanup.
                os._exit(_run(task, hold))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        tell(ended=status)


def _run(task, hold: Callable[[], None]) -> int:
    """Run one task; returns its exit status."""
    try:
        task(hold)
    except ApplianceError as error:
        tell(stopped=f"{type(error).__name__}: {error}")
        return STOPPED
    except BaseException:  # noqa: BLE001 - a child must not return into the parent's loop
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve()
