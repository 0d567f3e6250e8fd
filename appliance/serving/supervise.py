"""
Keep one worker running: start it, watch it, start it again, end it without leaving anything behind.

Each worker runs below a guardian (`serving.guardian`), which ends all of its processes when it ends,
or when we do.

It fails towards restarting: whatever the worker does, the answer is to end all of it and start again,
later each time, until too many starts in a row have failed.  A restart that somebody wished for is
no failure, and if the plan it changed to never works, the one that did is taken again.

One node of a worker on several is not started again: whoever started the nodes has to start all of them.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import aiohttp

from appliance.errors import ControlRefusedError, WorkerStartError
from appliance.serving.guardian import guardian_source
from appliance.serving.launch import LaunchPlan
from appliance.serving.life import Life, Timing, restart_delay
from appliance.serving.plans import Choose, WorkerPlans
from appliance.serving.restart_request import Wish
from appliance.serving.worker_log import LARGEST_LOG, bound, describe_end, find_phase, read_tail, rotate

HTTP_OK = 200
SERVICE_UNAVAILABLE = 503


class WorkerEventKind(StrEnum):
    """What happened to a worker; also the log event and the word in the audit log."""

    STARTING = "starting"
    HEALTHY = "healthy"
    DIED = "died"
    RESTARTING = "restarting"
    RECYCLING = "recycling"
    """It has ended because somebody wished it to be started anew, which follows at once."""
    STOPPED = "stopped"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """One change in a worker's life."""

    kind: WorkerEventKind
    worker: str
    detail: str
    """One line, for operators; what the worker itself said last where it died."""
    exit_code: int | None = None
    """Exit status; minus the number of the signal that ended it; None while it runs."""
    hard_off: bool = False
    """Whether it runs, or is about to, without the draft that the settings want."""
    draft: str = ""
    """Content digest of the draft it runs with, or is about to; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """How far a start is."""

    phase: str
    seconds: float


class Supervisor:
    """
    Runs one worker from a plan until told to stop.

    `run` belongs into a task group; when it returns or raises, no process of the worker is left.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        worker: str,
        log_directory: Path,
        max_restarts: int,
        observe: Callable[[WorkerEvent], None],
        report: Callable[[StartProgress], None] | None = None,
        timing: Timing | None = None,
        target_only: LaunchPlan | None = None,
        restart_file: Path | None = None,
        choose: Choose | None = None,
        largest_log: int = LARGEST_LOG,
    ) -> None:
        """
        Prepare; nothing is started before `run`.

        Args:
            plan: how to start the worker, first and whenever its draft is wished for.
            worker: its name.
            log_directory: where its log goes.
            max_restarts: failed starts in a row that are answered with another.
            observe: told of every change.
            report: told how far a start is.
            timing: how long things are waited for.
            target_only: how to start it without its draft, if that can be wished for.
            restart_file: where the worker leaves the wish to be started anew before it ends.
            choose: finds the draft for each start; None where there is only that of `plan`.
            largest_log: bytes after which a healthy worker's log is begun anew.
        """
        self._plans = WorkerPlans(plan, target_only=target_only, restart_file=restart_file, choose=choose)
        self._worker = worker
        self._log = log_directory / f"worker-{worker}.log"
        self._largest_log = largest_log
        self._max_restarts = max_restarts
        self._observe = observe
        self._report = report
        self._timing = timing or Timing()
        self._process: asyncio.subprocess.Process | None = None
        self._guardian: int | None = None
        """Descriptor of the guardian's process: its number may be another's by the time it is used."""
        self._worker_pid: int | None = None
        self._is_running = False
        self._is_healthy = False
        self._settled = asyncio.Event()
        self._is_stopping = False
        self._interrupted = asyncio.Event()
        """Set while the worker, or the wait for its next start, is to end."""
        self._ended = asyncio.Event()
        self._failure: str | None = None
        self._failures = self._deaths = 0

    @property
    def log(self) -> Path:
        """File that holds what the worker of the latest start wrote."""
        return self._log

    async def run(self) -> None:
        """
        Keep the worker running until `stop` is called or this is cancelled.

        Raises:
            WorkerStartError: more than `max_restarts` starts in a row did not reach health.
        """
        self._is_running = True
        self._plans.forget_wishes()
        try:
            async with aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timing.answer)
            ) as http:
                while not self._is_stopping:
                    await self._answer_end(await self._live(http))
            self._tell(WorkerEventKind.STOPPED, "on request")
        finally:
            self._is_healthy = False
            self._ended.set()
            self._settled.set()

    async def healthy(self) -> None:
        """
        Wait until the worker answers.

        Raises:
            WorkerStartError: it will not, because the supervisor gave up or was stopped.
        """
        while not self._is_healthy:
            if self._ended.is_set():
                raise WorkerStartError(self._failure or f"worker {self._worker} was stopped")
            await self._settled.wait()

    async def stop(self) -> None:
        """Let the worker finish its requests, end it, and wait until nothing of it is left."""
        self._is_stopping = True
        self._interrupted.set()
        self._signal(signal.SIGTERM)
        if self._is_running:
            await self._ended.wait()

    def restart(self, wish: Wish) -> None:
        """
        Have the worker finish its requests, end, and start again at once; returns before any of it.

        A worker that has one plan only is started by it again.  A draft on trial that does not start is
        left for the one in service.

        Raises:
            ControlRefusedError: it is not being kept running, or is one of several nodes: it would not come
                back.
        """
        if not self._is_running or self._is_stopping or self._ended.is_set():
            message = f"worker {self._worker} is not kept running here, so it cannot be restarted"
            raise ControlRefusedError(message)
        if self._plans.current.in_group:
            message = f"worker {self._worker} runs on several nodes: start all of them again together"
            raise ControlRefusedError(message)
        self._plans.wish(wish)
        self._interrupted.set()
        self._signal(signal.SIGTERM)

    async def _answer_end(self, life: Life) -> None:
        if self._is_stopping or self._recycles(life.exit_code):
            return
        delay = self._answer_death(life)
        await _wait_for(self._interrupted.wait(), delay)
        self._recycles(None)

    def _recycles(self, exit_code: int | None) -> bool:
        """Whether somebody wishes the worker to be started anew; if so, everything begins from zero."""
        if self._is_stopping:
            return False
        self._interrupted.clear()
        if not self._plans.take_wish():
            return False
        self._failures = self._deaths = 0
        self._tell(WorkerEventKind.RECYCLING, self._described("to start again"), exit_code)
        return True

    def _answer_death(self, life: Life) -> float:
        """Tell of a worker's death and decide what follows; seconds until the next start."""
        self._tell(WorkerEventKind.DIED, life.detail, life.exit_code)
        if self._plans.current.in_group:
            self._give_up(life, 1)
        self._failures = 0 if life.reached_health else self._failures + 1
        self._deaths = 0 if life.healthy_seconds >= self._timing.stable else self._deaths
        if self._failures > self._max_restarts:
            if not self._plans.go_back():
                self._give_up(life, self._failures)
            self._failures = self._deaths = 0
            self._tell(WorkerEventKind.RESTARTING, self._described("at once, as it last worked"))
            return 0.0
        delay = restart_delay(self._deaths, self._timing.longest_delay)
        self._deaths += 1
        self._tell(WorkerEventKind.RESTARTING, f"in {delay:g} s")
        return delay

    def _described(self, what: str) -> str:
        return f"{what}, without its draft" if self._plans.is_hard_off else what

    def _give_up(self, life: Life, failures: int) -> NoReturn:
        times = "" if failures == 1 else f" in {failures} starts"
        what = "ended" if life.reached_health else f"did not become healthy{times}"
        self._failure = f"worker {self._worker} {what}: {life.detail} (log: {self._log})"
        self._tell(WorkerEventKind.GAVE_UP, life.detail, life.exit_code)
        raise WorkerStartError(self._failure)

    async def _live(self, http: aiohttp.ClientSession) -> Life:
        """Start the worker once, and watch it until it ends or has to be ended."""
        clock = asyncio.get_running_loop().time
        # Reads whole drafts, maybe; what is wished for meanwhile is answered before anything is started.
        await self._plans.prepare()
        if self._interrupted.is_set():
            return Life(reached_health=False, healthy_seconds=0.0, detail="not started", exit_code=None)
        started, healthy_since = clock(), None
        plan = self._plans.current
        self._tell(WorkerEventKind.STARTING, self._described(f"attempt {self._deaths + 1} on {plan.url}"))
        if not port_is_free(plan.host, plan.port):
            # Another server's answer to our health check would pass for the worker's.
            detail = f"port {plan.port} on {plan.host} is in use by another process"
            return Life(reached_health=False, healthy_seconds=0.0, detail=detail, exit_code=None)
        try:
            process = await self._start()
            verdict = await self._await_health(http, process, started)
            if verdict is None and self._is_up(process):
                healthy_since = clock()
                self._plans.saw_health()
                self._is_healthy = True
                self._settled.set()
                self._tell(WorkerEventKind.HEALTHY, f"after {healthy_since - started:.1f} s")
                verdict = await self._watch(http, process)
        finally:
            self._is_healthy = False
            self._settled.clear()
            await self._end()
        return Life(
            reached_health=healthy_since is not None,
            healthy_seconds=clock() - healthy_since if healthy_since is not None else 0.0,
            detail=verdict or describe_end(process.returncode, read_tail(self._log)),
            exit_code=process.returncode,
        )

    async def _start(self) -> asyncio.subprocess.Process:
        rotate(self._log)
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", guardian_source(), *self._plans.current.argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=descriptor,
                env=dict(self._plans.current.environment),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # it ended at once, or a sandbox forbids it
            self._guardian = os.pidfd_open(process.pid)
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(ValueError):  # empty when the guardian could not even start
            self._worker_pid = int(await process.stdout.readline())
        return process

    async def _await_health(
        self, http: aiohttp.ClientSession, process: asyncio.subprocess.Process, started: float
    ) -> str | None:
        """Wait for health or the end; the reason to end the worker if neither comes in time."""
        clock, phase, read = asyncio.get_running_loop().time, "starting Python", 0
        while self._is_up(process):
            if await self._status(http) == HTTP_OK:
                return None
            seconds = clock() - started
            if seconds > self._plans.current.max_startup_seconds:
                return f"not healthy after {self._plans.current.max_startup_seconds} s, while {phase}"
            if self._report is not None:
                with self._log.open("rb") as log:
                    log.seek(read)
                    fresh = log.read()
                read += len(fresh)
                phase = find_phase(fresh.decode(errors="replace")) or phase
                self._report(StartProgress(phase=phase, seconds=seconds))
            await _wait_for(process.wait(), self._timing.poll)
        return None

    async def _watch(self, http: aiohttp.ClientSession, process: asyncio.subprocess.Process) -> str | None:
        """Wait for the end of a healthy worker; the reason to end it if it does not do so itself."""
        clock = asyncio.get_running_loop().time
        answered = clock()
        while self._is_up(process):
            await _wait_for(process.wait(), self._timing.check)
            if self._is_up(process) and self._plans.is_wished:
                await _wait_for(process.wait(), self._plans.current.drain_seconds)
                return None  # one that has not ended by itself is ended
            await asyncio.to_thread(bound, self._log, self._largest_log)
            status = await self._status(http) if self._is_up(process) else None
            if status == HTTP_OK:
                answered = clock()
            elif status == SERVICE_UNAVAILABLE:
                # vLLM ends by itself a few seconds after its engine died; its last words are telling.
                await _wait_for(process.wait(), self._timing.kill)
                return "its engine died" if self._is_up(process) else None
            elif clock() - answered > self._timing.unresponsive:
                return f"did not answer for {self._timing.unresponsive:g} s"
        return None

    def _is_up(self, process: asyncio.subprocess.Process) -> bool:
        return process.returncode is None and not self._interrupted.is_set()

    async def _status(self, http: aiohttp.ClientSession) -> int | None:
        if not self._plans.current.answers:
            return HTTP_OK  # that it runs is all there is to see
        try:
            async with http.get(f"{self._plans.current.url}/health") as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _end(self) -> None:
        """End every process of the worker: politely, then not."""
        process = self._process
        if process is None:
            return
        try:
            self._signal(signal.SIGTERM)
            await _wait_for(process.wait(), self._plans.current.drain_seconds + self._timing.kill)
        finally:
            # Reached on a second cancellation too: from here on nothing is awaited for long.
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            process.stdin.close()
            await _wait_for(process.wait(), self._timing.kill)
            self._signal(signal.SIGKILL)
            if self._worker_pid is not None and process.returncode in {None, -signal.SIGKILL}:
                # Only matters when somebody killed the guardian: then nobody else would do it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._worker_pid, signal.SIGKILL)
            await process.wait()
            if self._guardian is not None:
                os.close(self._guardian)
            self._process = self._guardian = self._worker_pid = None

    def _signal(self, number: signal.Signals) -> None:
        """
        Send the guardian a signal, if it has not ended.

        Not by `Process.send_signal`: it asks the kernel first whether the process has ended, and if so takes
        the exit status away from the event loop, which then reports 255
        (https://github.com/python/cpython/issues/87744).
        """
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._guardian is not None:
                signal.pidfd_send_signal(self._guardian, number)
            else:
                os.kill(self._process.pid, number)

    def _tell(self, kind: WorkerEventKind, detail: str, exit_code: int | None = None) -> None:
        self._observe(
            WorkerEvent(
                kind=kind,
                worker=self._worker,
                detail=detail,
                exit_code=exit_code,
                hard_off=self._plans.is_hard_off,
                draft=self._plans.current.draft,
            )
        )


def free_port(host: str) -> int:
    """Return a port nobody listens on now; somebody else may still take it before the worker does."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether a worker could listen there; an address that is not ours is left to vLLM to report."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


async def _wait_for(awaitable: Awaitable[object], seconds: float) -> None:
    """Wait until it is done, but not longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
