"""
A gateway's writer in a separate process, to be killed or to lose its database.

    python -m tests.writer_process DIRECTORY URL GATEWAY PREFIX SETTINGS

Requests begin and end for as long as standard input is open; then the log is closed in order.
Standard output has one JSON line, written by one call, for each append that returned
(`[index, entry id]`, with the index -1 where another gateway integrates it) and `"refused"` for each
that did not.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog
from appliance.audit.pending import NOT_PLACED
from appliance.audit.signing_keys import load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.errors import AuditEntryError, AuditForkError, AuditUnavailableError
from appliance.infra.settings import AuditSettings
from tests.audit_log import ORIGIN, intent, outcome

REPOSITORY = Path(__file__).resolve().parent.parent
CLIENTS = 4
FORKED = 3
PAUSE_SECONDS = 0.02


def _ignore(_gateway, _why):
    """Observe nothing."""


def open_gateway(
    directory,
    store,
    gateway,
    clock=time.time,  # noqa: TID251 - a root of its own
    on_break=_ignore,
    **settings,
):
    """Open the log as the gateway of that name does; each has its own sealed head."""
    given = {"checkpoint_seconds": 0.05, **settings}
    return AuditLog.open(
        store=store,
        signer=load_signing_key(directory / "audit.key", ORIGIN),
        settings=AuditSettings(origin=ORIGIN, **given),
        sealed_head_path=directory / f"{gateway}.head",
        clock=clock,
        version="0.1.0",
        gateway=gateway,
        on_break=on_break,
    )


class WriterProcess:
    """One such process, seen from the test."""

    def __init__(self, directory, url, gateway, prefix, source=REPOSITORY, **settings):
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.writer_process", directory, url, gateway, prefix),
                json.dumps(settings),
            ],
            cwd=source,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.acknowledged = []
        self.refused = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, entries):
        """Wait until so many appends have returned, all in all."""
        deadline = time.monotonic() + 60
        while len(self.acknowledged) < entries:
            assert self._process.poll() is None, self._process.stderr.read().decode()
            assert time.monotonic() < deadline, f"{len(self.acknowledged)} of {entries} entries"
            time.sleep(0.01)

    def kill(self):
        """End it without a word."""
        self._process.kill()
        self._wait()

    def close(self):
        """Let it close its log; return its exit status and what it said about errors."""
        self._process.stdin.close()
        return self._wait()

    def _wait(self):
        self._process.wait(60)
        self._reader.join()
        self._process.stdin.close()
        errors = self._process.stderr.read().decode()
        self._process.stdout.close()
        self._process.stderr.close()
        return self._process.returncode, errors

    def _read(self):
        for line in self._process.stdout:
            # A line that was cut off was not acknowledged in full.
            if not line.endswith(b"\n"):
                return
            said = json.loads(line)
            if said == "refused":
                self.refused += 1
            else:
                self.acknowledged.append(said)


def assert_kept(promised, leaves):
    """Every acknowledged entry is in the log once, at its index if it was told one."""
    places = {decode(leaf.leaf).id: leaf.index for leaf in leaves}
    assert len(places) == len(leaves)
    assert len({entry_id for _, entry_id in promised}) == len(promised)
    for index, entry_id in promised:
        assert places[entry_id] == (places[entry_id] if index == NOT_PLACED else index)


def tell(said):
    """Report one fact, whole."""
    os.write(1, f"{json.dumps(said)}\n".encode())


async def _client(log, prefix, stopping):
    number = 0
    while not stopping.is_set():
        request_id = f"{prefix}-{number}"
        number += 1
        try:
            for entry_type, fields in (
                (EntryType.REQUEST_INTENT, intent(request_id)),
                (EntryType.REQUEST_OUTCOME, outcome(request_id)),
            ):
                receipt = await log.confirm(log.submit(entry_type, **fields))
                tell([receipt.index, receipt.entry_id])
        except AuditForkError:
            raise
        except (AuditUnavailableError, AuditEntryError):
            # As a client would: it was refused, and comes back with another request.
            tell("refused")
            await asyncio.sleep(PAUSE_SECONDS)


async def _main(directory, url, gateway, prefix, settings):
    store = SqlAuditStore(url)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_the_end():
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(stopping.set)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    async with open_gateway(directory, store, gateway, **json.loads(settings)) as log:
        await asyncio.gather(*(_client(log, f"{prefix}-{number}", stopping) for number in range(CLIENTS)))
    store.close()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        try:
            asyncio.run(_main(Path(sys.argv[1]), *sys.argv[2:6]))
        except AuditForkError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(FORKED)
