"""
The output file and the error file of a batch, made from its journal.

Synchronous: called in a thread.  A crash before their rows exist leaves bytes that the next start
removes, and the journal, from which they are made again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from appliance.errors import InvalidRequestError
from appliance.gateway.batch.batch import FILE_PREFIX, Batch, FilePurpose, StopReason, StoredFile
from appliance.gateway.batch.journal import ResultJournal
from appliance.gateway.batch.lines import LineCutter, parse_line
from appliance.gateway.batch.results import LineResult, never_run
from appliance.gateway.batch.vault import FileVault


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Without the empty ones; durable, without a row yet."""

    output: StoredFile | None = None
    errors: StoredFile | None = None
    failed: int = 0  # lines in the error file

    @property
    def files(self) -> list[StoredFile]:
        return [stored for stored in (self.output, self.errors) if stored is not None]


def write_outputs(
    vault: FileVault, batch: Batch, journal: ResultJournal, rest: Iterable[LineResult], *, now: int
) -> Outputs:
    """The journal's results, then `rest` in the error file; raises StorageUnavailableError."""
    writers = {True: _Lines(vault, batch), False: _Lines(vault, batch)}
    try:
        for result in journal.results():
            writers[result.succeeded].add(result)
        for result in rest:
            writers[False].add(result)
        return Outputs(
            output=writers[True].finish("output", now),
            errors=writers[False].finish("errors", now),
            failed=writers[False].count,
        )
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise


def lines_never_run(
    pieces: Iterable[bytes],
    endpoint: str,
    done: Iterable[int],
    stop: StopReason,
    *,
    max_line_bytes: int,
    new_id: Callable[[], str],
) -> Iterator[LineResult]:
    """Yield a result for every unfinished line of the input."""
    cutter, finished = LineCutter(max_line_bytes), frozenset(done)

    def cut() -> Iterator[tuple[int, bytes]]:
        for piece in pieces:
            yield from cutter.feed(piece)
        yield from cutter.end()

    for number, text in cut():
        if number not in finished:
            try:
                line = parse_line(number, text, endpoint)
            except InvalidRequestError:
                continue  # not checked: the batch ended first
            yield never_run(number, line.custom_id, line_id=new_id(), code=stop.code, message=stop.message)


class _Lines:
    def __init__(self, vault: FileVault, batch: Batch) -> None:
        self._vault = vault
        self._batch = batch
        self.count = 0

    def add(self, result: LineResult) -> None:
        if not self.count:
            self._place = self._vault.new_place(self._batch.tenant, sealed=self._batch.sealed)
            self._writer = self._vault.write(self._place)
        self.count += 1
        self._writer.write(f"{result.line}\n".encode())

    def finish(self, what: str, now: int) -> StoredFile | None:
        if not self.count:
            return None
        self._writer.finish()
        return StoredFile(
            file_id=f"{FILE_PREFIX}{self._place.ulid}",
            tenant=self._batch.tenant,
            gateway=self._vault.gateway,
            filename=f"{self._batch.batch_id}_{what}.jsonl",
            purpose=FilePurpose.BATCH_OUTPUT,
            size=self._writer.size,
            sealed=self._batch.sealed,
            created_at=now,
            expires_at=now + self._batch.output_seconds,
        )

    def discard(self) -> None:
        if self.count:
            self._writer.discard()
            self._vault.remove(self._batch.tenant, f"{FILE_PREFIX}{self._place.ulid}")
