"""
Runs the auditor's verifier on the live log, for the console.

The log is exported to scratch space and verified there by a process of its own, so that requests do not wait,
and an operator sees what an auditor would.  No entry is shown, so none is recorded.  One verification runs at
a time; its progress can be read meanwhile.  A crash loses the verdict, and leaves scratch files until the
next verification.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from appliance.audit.export import export_log
from appliance.audit.store import Leaf, SqlAuditStore
from appliance.audit.verify import MEANINGS, ExitCode
from appliance.errors import ApplianceError, AuditUnavailableError, ConfigurationError
from appliance.infra.settings import WitnessSettings

SHOWN_PROBLEMS = 20
SCRATCH = ".verify."
"""Beginning of the names of scratch directories."""


class Stage(StrEnum):
    NEVER = "never"
    """None was started since the gateway started."""
    COPYING = "copying"
    CHECKING = "checking"
    DONE = "done"
    FAILED = "failed"
    """It failed: there is a reason and no verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    stage: Stage = Stage.NEVER
    began: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    """How long it took; 0 while it runs."""
    entries: int = 0
    """Entries the log had when it began."""
    copied: int = 0
    """Entries read so far."""
    verdict: ExitCode | None = None
    size: int = 0
    """Entries verified: those the last checkpoint covers."""
    root: str = ""
    problems: tuple[str, ...] = ()
    """The first few problems."""
    open_requests: int = 0
    """Requests without an end, those in flight included."""
    failure: str | None = None

    @property
    def is_running(self) -> bool:
        return self.stage in {Stage.COPYING, Stage.CHECKING}

    @property
    def meaning(self) -> str:
        return MEANINGS[self.verdict] if self.verdict is not None else ""


class LogVerification:
    def __init__(
        self,
        *,
        database_url: str,
        scratch: Path,
        vkey: Callable[[], str],
        witnesses: Sequence[WitnessSettings],
        keep_free_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """
        Prepare; `start` runs a verification.

        Connections to `database_url` are closed after each copy.  `scratch` is of this gateway alone; `/tmp`
        is small in containers.  `vkey` returns the current verifier keys, one per line; it is called at each
        start, as keys are rotated.  The copy fails rather than leave less than `keep_free_bytes` on its disk.
        `clock` is Unix time.
        """
        self._database_url, self._scratch = database_url, scratch
        self._vkey, self._witnesses = vkey, tuple(witnesses)
        self._keep_free_bytes, self._clock = keep_free_bytes, clock
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.progress = Progress()

    def start(self) -> bool:
        """Start one in the background; False if one is running."""
        if self.progress.is_running:
            return False
        self.progress = Progress(stage=Stage.COPYING, began=self._clock())
        self._task = asyncio.create_task(self._run())
        return True

    async def stop(self) -> None:
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            await asyncio.to_thread(self._clear)
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self._scratch) as scratch:
                await asyncio.to_thread(self._copy, Path(scratch) / "log")
                self.progress = replace(self.progress, stage=Stage.CHECKING)
                ended = await self._check(Path(scratch) / "log")
        except ApplianceError as error:
            ended = replace(self.progress, stage=Stage.FAILED, failure=str(error))
        except Exception as error:  # noqa: BLE001 - what was altered may break anything
            what = f"{type(error).__name__}: {error}"
            ended = replace(self.progress, stage=Stage.FAILED, failure=what)
        self.progress = replace(ended, seconds=self._clock() - ended.began)

    def _clear(self) -> None:
        for left in self._scratch.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _copy(self, directory: Path) -> None:
        with closing(_WatchedStore(self._database_url, self._report)) as store:
            self.progress = replace(self.progress, entries=store.head().size)
            export_log(store, directory, vkey=self._vkey())

    def _report(self, copied: int) -> None:
        if self._is_stopping:  # a thread cannot be cancelled
            message = "the gateway stops"
            raise AuditUnavailableError(message)
        if shutil.disk_usage(self._scratch).free < self._keep_free_bytes:
            message = "too little disk space for a copy of the log; run `appliance audit verify` elsewhere"
            raise ConfigurationError(message)
        self.progress = replace(self.progress, copied=copied)

    async def _check(self, export: Path) -> Progress:
        arguments = [str(export), "--key", str(export / "vkey"), "--no-payloads", "--json"]
        arguments += ["--state", str(export.parent / "state")]  # scratch as well: `/tmp` may be too small
        for witness in self._witnesses:
            arguments += ["--witness", witness.key]
        if self._witnesses:
            arguments += ["--witnesses-needed", "0"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "appliance.audit.verify", *arguments), stdout=PIPE, stderr=DEVNULL
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode not in set(ExitCode) - {ExitCode.UNUSABLE}:
            message = f"the verifier ended with {process.returncode} and no verdict"
            raise AuditUnavailableError(message)
        report = json.loads(output)
        return replace(
            self.progress,
            stage=Stage.DONE,
            verdict=ExitCode(process.returncode),
            size=report["size"],
            root=report["root"],
            problems=tuple(str(problem) for problem in report["problems"][:SHOWN_PROBLEMS]),
            open_requests=report["open_request_count"],
        )


class _WatchedStore(SqlAuditStore):
    """The log's database; reports how much of it was read."""

    def __init__(self, url: str, report: Callable[[int], None]) -> None:
        super().__init__(url)
        self._report = report

    def leaves(self, start: int, end: int) -> list[Leaf]:
        found = super().leaves(start, end)
        self._report(end)
        return found
