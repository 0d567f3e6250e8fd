"""Keeping a worker running, with a small program in its place that can fail in every way."""

import asyncio
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from appliance.errors import WorkerStartError
from appliance.serving.guardian import guardian_source
from appliance.serving.launch import LaunchPlan
from appliance.serving.supervise import Supervisor, Timing, free_port, port_is_free, restart_delay
from appliance.serving.worker_log import failure_line, find_phase, rotate

LOGS = Path(__file__).parent / "logs"
FAST = Timing(poll=0.02, check=0.02, answer=1.0, unresponsive=0.3, longest_delay=0.05, kill=3.0)
FAKE = """
import http.server, os, signal, subprocess, sys, time
port, mode = int(sys.argv[1]), sys.argv[2]
print("(Worker pid=1) INFO 11-21 00:00:00 [x.py:1] Starting to load model x", flush=True)
if mode == "raises":
    raise ValueError("the model is not to my taste")
if mode == "sleeps":
    time.sleep(60)
if mode in ("parent", "stubborn"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(60)"])
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

class Handler(http.server.BaseHTTPRequestHandler):
    answered = 0
    def do_GET(self):
        Handler.answered += 1
        if mode == "hangs" and Handler.answered > 2:
            time.sleep(60)
        if mode == "dies" and Handler.answered > 2:
            print("RuntimeError: I am tired", flush=True)
            os._exit(3)
        self.send_response(503 if mode == "broken engine" and Handler.answered > 2 else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True, scope="module")
def loopback():
    """A fresh network namespace, which `make unit` runs in, has its loopback switched off."""
    name, get_flags, set_flags, up = b"lo", 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(probe, get_flags, struct.pack("16s24x", name)))
        if not flags & up:
            fcntl.ioctl(probe, set_flags, struct.pack("16sh22x", name, flags | up))


class Fake:
    """A supervised fake worker, and everything its supervisor said."""

    def __init__(
        self, directory, mode, *, max_restarts=0, timing=FAST, drain_seconds=1, max_startup_seconds=20
    ):
        port = free_port("127.0.0.1")
        self.plan = LaunchPlan(
            argv=(sys.executable, "-c", FAKE, str(port), mode),
            environment={"PATH": os.defpath},
            url=f"http://127.0.0.1:{port}",
            host="127.0.0.1",
            port=port,
            model="fake",
            drain_seconds=drain_seconds,
            max_startup_seconds=max_startup_seconds,
        )
        self.events, self.progress = [], []
        self.supervisor = Supervisor(
            self.plan,
            worker="w1",
            log_directory=directory,
            max_restarts=max_restarts,
            observe=self.events.append,
            report=self.progress.append,
            timing=timing,
        )

    @property
    def said(self):
        return [event.kind.value for event in self.events]

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the observer is not asynchronous
                await asyncio.sleep(0.01)


def descendants(ancestor):
    """Living processes below one, however deep."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == ancestor and fields[0] != "Z":
                found |= {int(entry.name), *descendants(int(entry.name))}
    return found


def are_gone(processes):
    """Whether none of them lives; one that nobody has asked about yet does not."""
    return not any(is_alive(process) for process in processes)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_tells_the_whole_life_of_a_worker(tmp_path):
    """Starting, healthy, stopped: in that order, and nothing else."""
    fake = Fake(tmp_path, "serves")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        await fake.supervisor.stop()
    assert fake.said == ["starting", "healthy", "stopped"]
    assert fake.progress[-1].phase in {"starting Python", "loading the target"}


async def test_starts_a_dead_worker_again(tmp_path):
    """Each death is told with what the worker said last, and answered with a start."""
    fake = Fake(tmp_path, "dies")
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: fake.said.count("healthy") == 3)
        await fake.supervisor.stop()
    assert fake.said[:8] == ["starting", "healthy", "died", "restarting"] * 2
    died = fake.events[2]
    assert (died.detail, died.exit_code) == ("RuntimeError: I am tired", 3)
    assert [fake.events[3].detail, fake.events[7].detail] == ["in 0.05 s", "in 0.05 s"]


async def test_gives_up_after_too_many_failed_starts(tmp_path):
    """The error names the worker, the count, the worker's own words and its log."""
    fake = Fake(tmp_path, "raises", max_restarts=1)
    with pytest.raises(WorkerStartError) as failure:
        await fake.supervisor.run()
    assert fake.said == ["starting", "died", "restarting", "starting", "died", "gave_up"]
    assert "worker w1 did not become healthy in 2 starts" in str(failure.value)
    assert "ValueError: the model is not to my taste" in str(failure.value)
    assert str(fake.supervisor.log) in str(failure.value)
    with pytest.raises(WorkerStartError, match="not to my taste"):
        await fake.supervisor.healthy()


async def test_gives_up_a_start_that_takes_too_long(tmp_path):
    """The phase it hangs in is part of the message."""
    fake = Fake(tmp_path, "sleeps", max_startup_seconds=1)
    with pytest.raises(WorkerStartError, match="not healthy after 1 s, while loading the target"):
        await fake.supervisor.run()


async def test_ends_a_worker_that_no_longer_answers(tmp_path):
    """A worker that hangs is as dead as one that ended."""
    fake = Fake(
        tmp_path, "hangs", timing=Timing(poll=0.02, check=0.02, answer=0.1, unresponsive=0.3, kill=3.0)
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: "died" in fake.said)
        await fake.supervisor.stop()
    assert "did not answer for 0.3 s" in fake.events[fake.said.index("died")].detail


async def test_ends_a_worker_whose_engine_died(tmp_path):
    """vLLM answers 503 then; if it does not end by itself, it is ended."""
    timing = Timing(poll=0.02, check=0.02, kill=0.3)
    fake = Fake(tmp_path, "broken engine", timing=timing)
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: "died" in fake.said)
        await fake.supervisor.stop()
    assert fake.events[fake.said.index("died")].detail == "its engine died"


@pytest.mark.parametrize("mode", ["parent", "stubborn"])
async def test_stop_ends_the_whole_tree(tmp_path, mode):
    """Children, children in a session of their own, and whoever ignores SIGTERM."""
    fake = Fake(tmp_path, mode, timing=Timing(poll=0.02, check=0.02, kill=1.5), drain_seconds=0)
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        processes = descendants(os.getpid())
        assert len(processes) >= 4
        await fake.supervisor.stop()
    assert are_gone(processes)


async def test_cancellation_ends_the_whole_tree(tmp_path):
    """A task group that falls apart takes the worker with it."""
    fake = Fake(tmp_path, "parent")
    task = asyncio.create_task(fake.supervisor.run())
    await fake.supervisor.healthy()
    processes = descendants(os.getpid())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert are_gone(processes)


async def test_a_killed_guardian_is_noticed(tmp_path):
    """Somebody kills the process between us and the worker: the worker ends and comes back."""
    fake = Fake(tmp_path, "serves")
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        processes = descendants(os.getpid())
        os.kill(fake.supervisor._process.pid, signal.SIGKILL)
        await fake.until(lambda: fake.said.count("healthy") == 2)
        assert are_gone(processes)
        await fake.supervisor.stop()
    assert fake.events[2].exit_code == -signal.SIGKILL


async def test_never_mistakes_another_server_for_the_worker(tmp_path):
    """A taken port is a failed start, whatever answers there."""
    fake = Fake(tmp_path, "serves")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", fake.plan.port)
    async with server:
        assert not port_is_free("127.0.0.1", fake.plan.port)
        with pytest.raises(WorkerStartError, match=f"port {fake.plan.port} on 127.0.0.1 is in use"):
            await fake.supervisor.run()
    assert not fake.supervisor.log.exists()


async def test_stops_while_it_waits_to_start_again(tmp_path):
    """Nobody waits a minute for a stop."""
    fake = Fake(tmp_path, "raises", max_restarts=9, timing=Timing(poll=0.02))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: fake.said.count("restarting") == 2)
        await fake.supervisor.stop()
    assert fake.said[-1] == "stopped"


async def test_stop_before_run_does_not_wait():
    """A supervisor that never ran has nothing to end."""
    await Fake(Path("nowhere"), "serves").supervisor.stop()


def test_guardian_kills_everything_when_its_supervisor_is_gone():
    """The kernel closes our end of the pipe when we are killed; that is all the guardian needs."""
    tree = (
        "import subprocess, sys; subprocess.Popen(['setsid', 'sleep', '60']); subprocess.run(['sleep', '60'])"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", guardian_source(), sys.executable, "-c", tree],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as guardian:
        worker = int(guardian.stdout.readline())
        while len(processes := descendants(guardian.pid)) < 3:
            pass
        assert worker in processes
        guardian.stdin.close()
        assert guardian.wait(10) == -signal.SIGKILL
    assert are_gone(processes)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("pass", 0),
    ],
)
def test_guardian_ends_as_its_worker_did(program, status):
    """The exit status in the audit log is the worker's own."""
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", guardian_source(), sys.executable, "-I", "-S", "-c", program],
        input=None,
        stdin=(pipe := os.pipe())[0],
        capture_output=True,
        timeout=20,
        check=False,
    )
    for end in pipe:
        os.close(end)
    assert answer.returncode == status


def test_guardian_says_what_it_cannot_run():
    """A missing interpreter is a line in the worker's log, not a silence."""
    reader, writer = os.pipe()
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", guardian_source(), "/no/such/python"],
        stdin=reader,
        capture_output=True,
        timeout=20,
        check=False,
    )
    os.close(reader)
    os.close(writer)
    assert answer.returncode == 1
    assert failure_line(answer.stderr.decode()) == "FileNotFoundError: [Errno 2] No such file or directory"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("model-does-not-exist", "HFValidationError: Repo id must be in the form"),
        ("draft-of-another-width", "AssertionError: Tried to load weights of size torch.Size([256, 768])"),
        ("port-in-use", "OSError: [Errno 98] Address already in use"),
        ("kv-cache-does-not-fit", "ValueError: Available memory on node 0 (5.47/8.59 GiB) on kv cache"),
        ("context-too-long", "User-specified max_model_len (999999) is greater than the derived"),
        ("unknown-argument", "unrecognized arguments: --nonsense"),
        ("engine-died", "EngineDeadError: EngineCore encountered an issue."),
    ],
)
def test_finds_the_root_in_real_logs(log, expected):
    """Recorded from vLLM 0.32.0: three nested tracebacks, one reason."""
    line = failure_line((LOGS / f"{log}.log").read_text())
    assert line.startswith(expected)
    assert "\n" not in line
    assert len(line) <= 400


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "it wrote nothing"),
        ("Killed", "Killed"),
        (
            (
                "(Worker_TP3 pid=7) ERROR 11-21 00:00:00 [multiproc_executor.py:953] "
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
                "\nRuntimeError: Engine core initialization failed."
            ),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        ("    raise ValueError('a line of code')\nall is well", "all is well"),
    ],
)
def test_finds_the_root_in_short_logs(log, expected):
    """Whatever there is, one line comes out."""
    assert failure_line(log) == expected


def test_names_the_latest_phase():
    """A line that says nothing about progress changes nothing."""
    assert (
        find_phase("x Starting to load model y\nLoading safetensors checkpoint shards: 50%\nnoise")
        == "loading weights"
    )
    assert find_phase("noise") is None


def test_waits_longer_after_each_death():
    """1, 2, 4 and so on up to a minute: the same every time, so that tests and operators can count."""
    assert [restart_delay(deaths, 60.0) for deaths in (0, 1, 2, 3, 6, 7, 1000)] == [1, 2, 4, 8, 60, 60, 60]


def test_keeps_the_last_three_logs(tmp_path):
    """The log of the start that failed first is what explains the others."""
    log = tmp_path / "logs" / "worker-w1.log"
    for content in ("one", "two", "three", "four", "five"):
        rotate(log)
        log.write_text(content)
    kept = {file.name: file.read_text() for file in log.parent.iterdir()}
    assert kept == {
        "worker-w1.log": "five",
        "worker-w1.log.1": "four",
        "worker-w1.log.2": "three",
        "worker-w1.log.3": "two",
    }
    assert log.parent.stat().st_mode & 0o777 == 0o700
