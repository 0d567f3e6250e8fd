"""
Keep one worker running: start it, watch it, start it again, end it without leaving anything behind.

A worker is a tree of processes: API server, engine core, one process per GPU.  Checked by experiment:
when the API server is killed, its children live on and keep the GPU's memory.  So every worker runs
below a guardian, a small process of its own session that adopts whatever loses its parent
(`PR_SET_CHILD_SUBREAPER`) and kills all of it when the worker ends or when our end of its standard
input closes, which the kernel does for us even when we are killed.

It fails towards restarting: whatever the worker does, the answer is to end all of it and start again,
later each time, until too many starts in a row have failed.

Longer than other files because the guardian is part of it: it runs without our packages, from source.
"""

import asyncio
import contextlib
import errno
import inspect
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import aiohttp

from appliance.errors import WorkerStartError
from appliance.serving.launch import LaunchPlan

KEPT_LOGS = 3
TAIL_BYTES = 2**16
LONGEST_LINE = 400
HTTP_OK = 200
SERVICE_UNAVAILABLE = 503

PREFIX = re.compile(r"^\([^)]* pid=\d+\) (?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
EXCEPTION = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Exit|Interrupt)(?::.*|$))")
RELAYED = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "EngineCore encountered an issue",
)
"""Beginnings of messages by which one process of vLLM says that another one failed."""
PHASES = (
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading the target"),
    ("Loading drafter model", "loading the draft"),
    ("Loading safetensors", "loading weights"),
    ("Dynamo bytecode transform", "compiling"),
    ("Compiling a graph", "compiling"),
    ("KV cache size", "making room for the KV cache"),
    ("Capturing CUDA graph", "capturing CUDA graphs"),
    ("Starting vLLM server", "opening the port"),
)
"""What a line of the worker's log says about how far the start is."""


class WorkerEventKind(StrEnum):
    """What happened to a worker; also the log event and the word in the audit log."""

    STARTING = "starting"
    HEALTHY = "healthy"
    DIED = "died"
    RESTARTING = "restarting"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """How far a start is."""

    phase: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things are waited for, in seconds."""

    poll: float = 0.5
    """Between two looks at a starting worker."""
    check: float = 5.0
    """Between two looks at a healthy worker; its end is noticed at once."""
    answer: float = 5.0
    """For one look."""
    unresponsive: float = 120.0
    """Without an answer until a healthy worker counts as dead; longer than any step may take."""
    longest_delay: float = 60.0
    """Most time between two starts."""
    stable: float = 300.0
    """Of health after which the delays start from 1 s again."""
    kill: float = 15.0
    """More than the worker's own drain time, after which it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How one start of the worker went."""

    reached_health: bool
    healthy_seconds: float
    detail: str
    exit_code: int | None


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
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._log = log_directory / f"worker-{worker}.log"
        self._max_restarts = max_restarts
        self._observe = observe
        self._report = report
        self._timing = timing or Timing()
        self._process: asyncio.subprocess.Process | None = None
        self._worker_pid: int | None = None
        self._is_running = False
        self._is_healthy = False
        self._settled = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: str | None = None

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
        failures = deaths = 0
        self._is_running = True
        try:
            async with aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timing.answer)
            ) as http:
                while not self._stopping.is_set():
                    life = await self._live(http, attempt=deaths + 1)
                    if self._stopping.is_set():
                        break
                    self._tell(WorkerEventKind.DIED, life.detail, life.exit_code)
                    failures = 0 if life.reached_health else failures + 1
                    deaths = 0 if life.healthy_seconds >= self._timing.stable else deaths
                    if failures > self._max_restarts:
                        self._give_up(life, failures)
                    delay = restart_delay(deaths, self._timing.longest_delay)
                    deaths += 1
                    self._tell(WorkerEventKind.RESTARTING, f"in {delay:g} s")
                    await _wait_for(self._stopping.wait(), delay)
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
        self._stopping.set()
        self._terminate()
        if self._is_running:
            await self._ended.wait()

    def _give_up(self, life: Life, failures: int) -> None:
        times = "" if failures == 1 else f" in {failures} starts"
        self._failure = (
            f"worker {self._worker} did not become healthy{times}: {life.detail} (log: {self._log})"
        )
        self._tell(WorkerEventKind.GAVE_UP, life.detail, life.exit_code)
        raise WorkerStartError(self._failure)

    async def _live(self, http: aiohttp.ClientSession, *, attempt: int) -> Life:
        """Start the worker once, and watch it until it ends or has to be ended."""
        clock = asyncio.get_running_loop().time
        started, healthy_since = clock(), None
        self._tell(WorkerEventKind.STARTING, f"attempt {attempt} on {self._plan.url}")
        if not port_is_free(self._plan.host, self._plan.port):
            # Another server's answer to our health check would pass for the worker's.
            detail = f"port {self._plan.port} on {self._plan.host} is in use by another process"
            return Life(reached_health=False, healthy_seconds=0.0, detail=detail, exit_code=None)
        try:
            process = await self._start()
            verdict = await self._await_health(http, process, started)
            if verdict is None and self._is_up(process):
                healthy_since = clock()
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
            detail=verdict or _describe_end(process.returncode, self._read_tail()),
            exit_code=process.returncode,
        )

    async def _start(self) -> asyncio.subprocess.Process:
        rotate(self._log)
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", guardian_source(), *self._plan.argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=descriptor,
                env=dict(self._plan.environment),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
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
            if seconds > self._plan.max_startup_seconds:
                return f"not healthy after {self._plan.max_startup_seconds} s, while {phase}"
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
        return process.returncode is None and not self._stopping.is_set()

    async def _status(self, http: aiohttp.ClientSession) -> int | None:
        try:
            async with http.get(f"{self._plan.url}/health") as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _end(self) -> None:
        """End every process of the worker: politely, then not."""
        process = self._process
        if process is None:
            return
        try:
            self._terminate()
            await _wait_for(process.wait(), self._plan.drain_seconds + self._timing.kill)
        finally:
            # Reached on a second cancellation too: from here on nothing is awaited for long.
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            process.stdin.close()
            await _wait_for(process.wait(), self._timing.kill)
            if process.returncode is None:
                process.kill()
            if self._worker_pid is not None and process.returncode in {None, -signal.SIGKILL}:
                # Only matters when somebody killed the guardian: then nobody else would do it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._worker_pid, signal.SIGKILL)
            await process.wait()
            self._process = self._worker_pid = None

    def _terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def _read_tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace")

    def _tell(self, kind: WorkerEventKind, detail: str, exit_code: int | None = None) -> None:
        self._observe(WorkerEvent(kind=kind, worker=self._worker, detail=detail, exit_code=exit_code))


def restart_delay(deaths: int, longest: float) -> float:
    """Seconds to wait after that many deaths before this one: 1, 2, 4, up to the longest."""
    return min(longest, 2.0 ** min(deaths, 30))


def failure_line(log_tail: str) -> str:
    """
    Pick the line that says why a worker failed from the end of its log.

    vLLM relays a failure from process to process, each with a traceback of its own: the last exception
    that is not such a relay is the root.
    """
    lines = [PREFIX.sub("", line).rstrip() for line in log_tail.replace("\r", "\n").splitlines()]
    lines = [line for line in lines if line]
    roots: list[str] = []
    relays: list[str] = []
    for position, line in enumerate(lines):
        if match := EXCEPTION.match(line):
            what = match[1]
            if "validation error" in what:  # pydantic says what is wrong on the next line
                what = "".join(lines[position + 1 : position + 2]).strip().removeprefix("Value error, ")
            (relays if any(text in what for text in RELAYED) else roots).append(what)
        elif ": error: " in line:  # argparse
            roots.append(line.partition(": error: ")[2])
    told = [*relays[:1], *roots[-1:]] or lines[-1:] or ["it wrote nothing"]
    return " ".join(told[-1].split())[:LONGEST_LINE]


def find_phase(log_text: str) -> str | None:
    """Return the latest phase that lines of a starting worker's log tell of, or None."""
    for line in reversed(log_text.splitlines()):
        for needle, phase in PHASES:
            if needle in line:
                return phase
    return None


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


def rotate(log: Path) -> None:
    """Keep the logs of the last starts as `.1` (the latest) to `.3`, in a directory only we can read."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = [log, *(log.with_name(f"{log.name}.{age}") for age in range(1, KEPT_LOGS + 1))]
    for newer, older in reversed(list(pairwise(kept))):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(older)


def guardian_source() -> str:
    """Return the guardian's program, for an interpreter that finds none of our packages."""
    return f"{inspect.getsource(guard)}\nguard()\n"


def guard() -> None:  # noqa: C901, PLR0912, PLR0915 - a program of its own
    """
    Run the command in `sys.argv[1:]`, outlive it, and leave nothing of it behind.

    Prints the command's process id, forwards SIGTERM to it, and ends with its exit status.  End of
    file on standard input means that the supervisor is gone: everything is killed at once.
    """
    import ctypes, glob, os, resource, select, signal, sys  # noqa: E401, I001, PLC0415

    set_pdeathsig, set_child_subreaper = 1, 36
    prctl = ctypes.CDLL(None).prctl
    prctl(set_child_subreaper, 1, 0, 0, 0)
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    guardian, child = os.getpid(), os.fork()
    if child == 0:
        os.setpgid(0, 0)
        # If somebody kills the guardian, the API server still ends its children on the way out.
        prctl(set_pdeathsig, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        if os.getppid() != guardian:
            os._exit(1)
        os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the plan's own command
    os.write(1, f"{child}\n".encode())

    status = None
    while status is None and not select.select([0], [], [], 0)[0]:
        news = signal.sigtimedwait(awaited, 0.2)
        if news is not None and news.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        reaped = child
        while reaped and status is None:
            reaped, ended_with = os.waitpid(-1, os.WNOHANG)
            status = ended_with if reaped == child else None

    victims = [-child]
    while True:
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            reaped, ended_with = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = ended_with if reaped == child else status
        # Whoever dies leaves its children to us, so look again after each death until there is none.
        victims = []
        for path in glob.glob("/proc/[0-9]*/stat"):  # noqa: PTH207 - without pathlib it starts faster
            try:
                with open(path, "rb") as stat:  # noqa: PTH123
                    pid, _, rest = stat.read().partition(b" ")
            except OSError:
                continue
            if int(rest.rpartition(b")")[2].split()[1]) == guardian:
                victims.append(int(pid))

    code = os.waitstatus_to_exitcode(status or 0)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(guardian, -code)
    sys.exit(code)


def _describe_end(returncode: int | None, log_tail: str) -> str:
    line = failure_line(log_tail)
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name
        hint = "; the kernel does that when memory runs out" if returncode == -signal.SIGKILL else ""
        return f"killed by {name}{hint}; last line: {line}"
    return line


async def _wait_for(awaitable: Awaitable[object], seconds: float) -> None:
    """Wait until it is done, but not longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
