"""
Supervise one worker: start it, check its health, restart it, and end all of its processes.

Each worker runs below a guardian (`serving.guardian`), which ends all of its processes when it ends or when
the supervisor does.

Fails towards restarting: whatever happens to the worker, the supervisor ends all of it and starts it again,
with a growing delay, until too many starts in a row have failed.  A requested restart is not a failure; if
the plan it changed to never works, the supervisor rolls back to the plan that did.

One node of a worker on several is not restarted here: all nodes must be started together.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import ssl
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
from appliance.serving.life import SupervisorTiming, WorkerRun, restart_delay_seconds
from appliance.serving.plans import Choose, WorkerPlans
from appliance.serving.restart_request import RestartRequest
from appliance.serving.worker_log import LARGEST_LOG, bound, describe_end, find_phase, read_tail, rotate

HTTP_OK = 200
SERVICE_UNAVAILABLE = 503
OWN_PORTS = range(20_000, 32_766)
"""Below those that Linux gives to outgoing connections (ip_local_port_range)."""


class WorkerEventKind(StrEnum):
    """What happened to a worker; also the log event and a value in the audit log."""

    STARTING = "starting"
    HEALTHY = "healthy"
    DIED = "died"
    RESTARTING = "restarting"
    RECYCLING = "recycling"
    """It has ended because of a restart request; the next start follows at once."""
    STOPPED = "stopped"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    kind: WorkerEventKind
    worker: str
    detail: str
    """One line for operators; the worker's last error if it died."""
    exit_code: int | None = None
    """Exit status; minus the signal number if a signal ended it; None while it runs."""
    hard_off: bool = False
    """Whether it runs, or is about to, without the draft that the settings name."""
    draft: str = ""
    """Content digest of the draft it runs with, or is about to; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    phase: str
    seconds: float


class Supervisor:
    """Supervises one worker; when `run` returns or raises, no process of the worker is left."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        worker: str,
        log_directory: Path,
        max_restarts: int,
        observe: Callable[[WorkerEvent], None],
        report: Callable[[StartProgress], None] | None = None,
        timing: SupervisorTiming | None = None,
        target_only: LaunchPlan | None = None,
        restart_file: Path | None = None,
        choose: Choose | None = None,
        largest_log: int = LARGEST_LOG,
        open_ruleset: Callable[[], int] | None = None,
    ) -> None:
        """
        `max_restarts` failed starts in a row end it; a healthy worker's log rotates at `largest_log` bytes.

        `restart_file` is where the worker leaves a restart request before it ends.  Without `target_only` the
        worker cannot run without its draft; without `choose` its draft is always that of `plan`.
        `open_ruleset` opens the descriptor that each start is restricted by (`sovereignty.file_wall`).
        """
        self._plans = WorkerPlans(plan, target_only=target_only, restart_file=restart_file, choose=choose)
        self._worker = worker
        self._log = log_directory / f"worker-{worker}.log"
        self._largest_log = largest_log
        self._open_ruleset = open_ruleset
        self._max_restarts = max_restarts
        self._observe = observe
        self._report = report
        self._timing = timing or SupervisorTiming()
        self._process: asyncio.subprocess.Process | None = None
        self._guardian: int | None = None
        """A pidfd: the guardian's process id may belong to another process by the time it is used."""
        self._worker_pid: int | None = None
        self._is_running = False
        self._is_healthy = False
        self._settled = asyncio.Event()
        self._is_stopping = False
        self._interrupted = asyncio.Event()
        """Set while the worker, or the delay before its next start, is to end."""
        self._ended = asyncio.Event()
        self._failure: str | None = None
        self._failures = self._deaths = 0

    @property
    def log(self) -> Path:
        return self._log

    async def run(self) -> None:
        """Keep the worker running until `stop`; WorkerStartError after too many failed starts in a row."""
        self._is_running = True
        self._plans.discard_requests()
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
        """Wait until the worker is healthy; WorkerStartError if the supervisor gave up or was stopped."""
        while not self._is_healthy:
            if self._ended.is_set():
                raise WorkerStartError(self._failure or f"worker {self._worker} was stopped")
            await self._settled.wait()

    async def stop(self) -> None:
        """Let the worker finish its requests, end it, and wait until none of its processes is left."""
        self._is_stopping = True
        self._interrupted.set()
        self._signal(signal.SIGTERM)
        if self._is_running:
            await self._ended.wait()

    def restart(self, request: RestartRequest) -> None:
        """
        Let the worker finish its requests, end, and start again at once; returns before any of it.

        A worker with one plan is restarted by that plan.  Raises ControlRefusedError if the worker is not
        supervised here, or is one of several nodes, and so would not return.
        """
        if not self._is_running or self._is_stopping or self._ended.is_set():
            message = f"worker {self._worker} is not kept running here, so it cannot be restarted"
            raise ControlRefusedError(message)
        if self._plans.current.in_group:
            message = f"worker {self._worker} runs on several nodes: start all of them again together"
            raise ControlRefusedError(message)
        self._plans.request_restart(request)
        self._interrupted.set()
        self._signal(signal.SIGTERM)

    async def _answer_end(self, life: WorkerRun) -> None:
        if self._is_stopping or self._recycles(life.exit_code):
            return
        delay = self._answer_death(life)
        await _wait_for(self._interrupted.wait(), delay)
        self._recycles(None)

    def _recycles(self, exit_code: int | None) -> bool:
        """Accept a pending restart request, if there is one; the failure counts then start from zero."""
        if self._is_stopping:
            return False
        self._interrupted.clear()
        if not self._plans.accept_request():
            return False
        self._failures = self._deaths = 0
        self._tell(WorkerEventKind.RECYCLING, self._described("to start again"), exit_code)
        return True

    def _answer_death(self, life: WorkerRun) -> float:
        """Report a worker's death and decide what follows; returns seconds until the next start."""
        self._tell(WorkerEventKind.DIED, life.detail, life.exit_code)
        if self._plans.current.in_group:
            self._give_up(life, 1)
        self._failures = 0 if life.reached_health else self._failures + 1
        self._deaths = 0 if life.healthy_seconds >= self._timing.stable else self._deaths
        if self._failures > self._max_restarts:
            if not self._plans.roll_back():
                self._give_up(life, self._failures)
            self._failures = self._deaths = 0
            self._tell(WorkerEventKind.RESTARTING, self._described("at once, as it last worked"))
            return 0.0
        delay = restart_delay_seconds(self._deaths, self._timing.longest_delay)
        self._deaths += 1
        self._tell(WorkerEventKind.RESTARTING, f"in {delay:g} s")
        return delay

    def _described(self, what: str) -> str:
        return f"{what}, without its draft" if self._plans.is_hard_off else what

    def _give_up(self, life: WorkerRun, failures: int) -> NoReturn:
        times = "" if failures == 1 else f" in {failures} starts"
        what = "ended" if life.reached_health else f"did not become healthy{times}"
        self._failure = f"worker {self._worker} {what}: {life.detail} (log: {self._log})"
        self._tell(WorkerEventKind.GAVE_UP, life.detail, life.exit_code)
        raise WorkerStartError(self._failure)

    async def _live(self, http: aiohttp.ClientSession) -> WorkerRun:
        clock = asyncio.get_running_loop().time
        # May read whole drafts; a restart requested meanwhile is accepted before anything is started.
        await self._plans.prepare()
        if self._interrupted.is_set():
            return WorkerRun(reached_health=False, healthy_seconds=0.0, detail="not started", exit_code=None)
        started, healthy_since = clock(), None
        plan = self._plans.current
        self._tell(WorkerEventKind.STARTING, self._described(f"attempt {self._deaths + 1} on {plan.url}"))
        for port in (plan.port, plan.control_port):
            # Another server's answer to the health check, or to control, would pass for the worker's.
            if not port_is_free(plan.host, port):
                detail = f"port {port} on {plan.host} is in use by another process"
                return WorkerRun(reached_health=False, healthy_seconds=0.0, detail=detail, exit_code=None)
        try:
            process = await self._start()
            verdict = await self._await_health(http, process, started)
            if verdict is None and self._is_up(process):
                healthy_since = clock()
                self._plans.record_health()
                self._is_healthy = True
                self._settled.set()
                self._tell(WorkerEventKind.HEALTHY, f"after {healthy_since - started:.1f} s")
                verdict = await self._watch(http, process)
        finally:
            self._is_healthy = False
            self._settled.clear()
            await self._end()
        return WorkerRun(
            reached_health=healthy_since is not None,
            healthy_seconds=clock() - healthy_since if healthy_since is not None else 0.0,
            detail=verdict
            or describe_end(process.returncode, read_tail(self._log), has_served=healthy_since is not None),
            exit_code=process.returncode,
        )

    async def _start(self) -> asyncio.subprocess.Process:
        rotate(self._log)
        with contextlib.ExitStack() as stack:
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            stack.callback(os.close, log)
            ruleset = None if self._open_ruleset is None else self._open_ruleset()
            if ruleset is not None:
                stack.callback(os.close, ruleset)
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", guardian_source(ruleset), *self._plans.current.argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(self._plans.current.environment),
                start_new_session=True,
                pass_fds=() if ruleset is None else (ruleset,),
            )
        with contextlib.suppress(OSError):  # it ended at once, or a sandbox forbids it
            self._guardian = os.pidfd_open(process.pid)
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(ValueError):  # empty if the guardian could not start
            self._worker_pid = int(await process.stdout.readline())
        return process

    async def _await_health(
        self, http: aiohttp.ClientSession, process: asyncio.subprocess.Process, started: float
    ) -> str | None:
        """Wait for health or the end; returns why the worker must be ended if neither comes in time."""
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
        """Wait for the end of a healthy worker; returns why it must be ended if it does not end by itself."""
        clock = asyncio.get_running_loop().time
        answered = clock()
        while self._is_up(process):
            await _wait_for(process.wait(), self._timing.check)
            if self._is_up(process) and self._plans.restart_requested:
                await _wait_for(process.wait(), self._plans.current.drain_seconds)
                return None  # the caller ends it if it has not ended by itself
            await asyncio.to_thread(bound, self._log, self._largest_log)
            status = await self._status(http) if self._is_up(process) else None
            if status == HTTP_OK:
                answered = clock()
            elif status == SERVICE_UNAVAILABLE:
                # vLLM ends by itself a few seconds after its engine died, and logs the cause.
                await _wait_for(process.wait(), self._timing.kill)
                return "its engine died" if self._is_up(process) else None
            elif clock() - answered > self._timing.unresponsive:
                return f"did not answer for {self._timing.unresponsive:g} s"
        return None

    def _is_up(self, process: asyncio.subprocess.Process) -> bool:
        return process.returncode is None and not self._interrupted.is_set()

    async def _status(self, http: aiohttp.ClientSession) -> int | None:
        if not self._plans.current.answers:
            return HTTP_OK  # it has no health check: running counts as healthy
        try:
            async with http.get(f"{self._plans.current.url}/health", ssl=self._health_tls()) as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def _health_tls(self) -> ssl.SSLContext | bool:
        """Presents the worker's certificate, as it is now; the supervisor need not verify its own worker."""
        if self._plans.current.certificate is None:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(*self._plans.current.certificate, "")
        return context

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            self._signal(signal.SIGTERM)
            # One that failed has nothing to finish, and its clients wait for the next.
            drains = self._interrupted.is_set() or self._plans.restart_requested
            drain_seconds = self._plans.current.drain_seconds if drains else 0
            await _wait_for(process.wait(), drain_seconds + self._timing.kill)
        finally:
            # Reached on a second cancellation too: from here on no wait is long.
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            process.stdin.close()
            await _wait_for(process.wait(), self._timing.kill)
            self._signal(signal.SIGKILL)
            if self._worker_pid is not None and process.returncode in {None, -signal.SIGKILL}:
                # Only matters if the guardian was killed: then no other process would do it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._worker_pid, signal.SIGKILL)
            await process.wait()
            if self._guardian is not None:
                os.close(self._guardian)
            self._process = self._guardian = self._worker_pid = None

    def _signal(self, number: signal.Signals) -> None:
        """
        Send the guardian a signal, if it has not ended.

        Not by `Process.send_signal`: it polls the process, and may take its exit status away from the event
        loop, which then reports 255 (https://github.com/python/cpython/issues/87744).
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
    """
    A port that nothing listens on now, nor on the next one, where the worker is controlled.

    Another process may still take them before the worker does, but no outgoing connection: a worker binds
    its port half a minute later.
    """
    while True:
        port = secrets.choice(OWN_PORTS)
        if port_is_free(host, port) and port_is_free(host, port + 1):
            return port


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
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
