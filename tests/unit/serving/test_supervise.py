"""Supervision of a small program that can fail in every way."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from appliance.errors import ControlRefusedError, WorkerStartError
from appliance.infra.settings import PoolSettings
from appliance.serving.guardian import guardian_source
from appliance.serving.launch import LaunchPlan
from appliance.serving.life import SupervisorTiming, restart_delay_seconds
from appliance.serving.plans import ChosenPlan
from appliance.serving.restart import RestartClient
from appliance.serving.restart_request import CandidateDraft, RestartRequest
from appliance.serving.supervise import Supervisor, WorkerEventKind, free_port, port_is_free
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_log import bound, failure_line, find_phase, rotate
from appliance.serving.worker_protocol import RESTART_FILE
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import Reason

pytestmark = pytest.mark.usefixtures("loopback")
LOGS = Path(__file__).parent / "logs"
FAST = SupervisorTiming(poll=0.02, check=0.02, answer=2.0, unresponsive=10.0, longest_delay=0.05, kill=3.0)
FAKE = """
import http.server, os, signal, subprocess, sys, time
port, mode = int(sys.argv[1]), sys.argv[2]
print("(Worker pid=1) INFO 11-21 00:00:00 [x.py:1] Starting to load model x", flush=True)
if mode == "raises":
    raise ValueError("the model is not to my taste")
if mode == "sleeps":
    time.sleep(60)
if mode == "slow":
    time.sleep(0.5)
if mode in ("parent", "stubborn"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(60)"])
if mode in ("stubborn", "stuck"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

class Handler(http.server.BaseHTTPRequestHandler):
    answered = 0
    def do_GET(self):
        Handler.answered += 1
        if mode == "chatty":
            print(f"line {Handler.answered:09} of a worker that says much", flush=True)
        if mode in ("hangs", "stuck") and Handler.answered > 2:
            time.sleep(60)
        if mode == "dies" and Handler.answered > 2:
            print("RuntimeError: I am tired", flush=True)
            os._exit(3)
        self.send_response(503 if mode == "broken engine" and Handler.answered > 2 else 200)
        self.end_headers()
    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        with open(os.environ["APPLIANCE_RESTART_FILE"], "wb") as file:
            file.write(request)
        self.send_response(202)
        self.end_headers()
        os.kill(os.getpid(), signal.SIGTERM)
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Fake:
    """A supervised fake worker, and all events of its supervisor."""

    def __init__(
        self,
        directory,
        mode,
        *,
        target_only=None,
        max_restarts=0,
        timing=FAST,
        drain_seconds=1,
        max_startup_seconds=20,
        node=None,
        choose=None,
        **more,
    ):
        port = free_port("127.0.0.1")
        self.request = directory / "w1.restart"

        def plan(mode):
            return LaunchPlan(
                argv=(sys.executable, "-S", "-c", FAKE, str(port), mode),
                environment={"PATH": os.defpath, RESTART_FILE: str(self.request)},
                url=f"http://127.0.0.1:{port}",
                host="127.0.0.1",
                port=port,
                control_port=port + 1,
                model="fake",
                drain_seconds=drain_seconds,
                max_startup_seconds=max_startup_seconds,
                answers=node != "further",
                in_group=node is not None,
            )

        self.plan = plan(mode)
        self.worker = Worker(worker_id=WorkerId("w1"), url=self.plan.url, control_port=port)
        self.events, self.progress = [], []
        self.supervisor = Supervisor(
            self.plan,
            target_only=plan(target_only) if target_only else None,
            choose=(lambda request: choose(request, plan)) if choose else None,
            restart_file=self.request,
            worker="w1",
            log_directory=directory,
            max_restarts=max_restarts,
            observe=self.events.append,
            report=self.progress.append,
            timing=timing,
            **more,
        )

    @property
    def said(self):
        return [event.kind.value for event in self.events]

    @property
    def plans(self):
        """Which plan each start was made by, and by which the worker became healthy."""
        return [
            (event.kind.value, "without" if event.hard_off else "with")
            for event in self.events
            if event.kind in {WorkerEventKind.STARTING, WorkerEventKind.HEALTHY}
        ]

    async def healthy_times(self, count):
        await self.until(lambda: self.said.count("healthy") == count)

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - the observer is not asynchronous
                await asyncio.sleep(0.01)


def poll_until_dead(url):
    """Poll a fake that dies while it answers; it may not listen yet."""
    answered = False
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            answered = True
        except OSError:
            if answered:
                return
            time.sleep(0.01)


def descendants(ancestor):
    """Living processes below one, at any depth."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == ancestor and fields[0] != "Z":
                found |= {int(entry.name), *descendants(int(entry.name))}
    return found


def are_gone(processes):
    """Whether none of them is alive; a zombie is not."""
    return not any(is_alive(process) for process in processes)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_reports_every_event_of_a_workers_life(tmp_path):
    """Starting, healthy, stopped: in that order, and no other."""
    fake = Fake(tmp_path, "slow")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        await fake.supervisor.stop()
    assert fake.said == ["starting", "healthy", "stopped"]
    assert fake.progress[-1].phase in {"starting Python", "loading the target"}


async def test_restarts_a_dead_worker(tmp_path):
    """
    Each death is reported with the class of the exception, and followed by a start.

    The worker has served, so the message may quote a request.
    """
    fake = Fake(tmp_path, "dies")
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: fake.said.count("healthy") == 3)
        await fake.supervisor.stop()
    assert fake.said[:8] == ["starting", "healthy", "died", "restarting"] * 2
    died = fake.events[2]
    assert (died.detail, died.exit_code) == ("RuntimeError", 3)
    assert [fake.events[3].detail, fake.events[7].detail] == ["in 0.05 s", "in 0.05 s"]


async def test_gives_up_after_too_many_failed_starts(tmp_path):
    """The error names the worker, the count, the cause and the log file."""
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
    """The message names the phase in which it hangs."""
    fake = Fake(tmp_path, "sleeps", max_startup_seconds=1)
    with pytest.raises(WorkerStartError, match="not healthy after 1 s, while loading the target"):
        await fake.supervisor.run()


async def test_ends_a_worker_that_no_longer_answers(tmp_path):
    fake = Fake(
        tmp_path,
        "hangs",
        timing=SupervisorTiming(poll=0.02, check=0.02, answer=0.1, unresponsive=0.3, kill=3.0),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: "died" in fake.said)
        await fake.supervisor.stop()
    assert "did not answer for 0.3 s" in fake.events[fake.said.index("died")].detail


async def test_a_worker_that_no_longer_answers_gets_no_time_to_drain(tmp_path):
    """Its requests cannot finish, and clients wait for the next one."""
    timing = SupervisorTiming(poll=0.02, check=0.02, answer=0.1, unresponsive=0.3, kill=0.3)
    fake = Fake(tmp_path, "stuck", timing=timing, drain_seconds=600)
    running = asyncio.ensure_future(fake.supervisor.run())
    await fake.until(lambda: "died" in fake.said)
    running.cancel()
    await asyncio.wait({running})


async def test_ends_a_worker_whose_engine_died(tmp_path):
    """vLLM answers 503 then; if it does not end by itself, it is ended."""
    timing = SupervisorTiming(poll=0.02, check=0.02, kill=0.3)
    fake = Fake(tmp_path, "broken engine", timing=timing)
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: "died" in fake.said)
        await fake.supervisor.stop()
    assert fake.events[fake.said.index("died")].detail == "its engine died"


@pytest.mark.parametrize("mode", ["parent", "stubborn"])
async def test_stop_ends_the_whole_tree(tmp_path, mode):
    """Children, children in a session of their own, and processes that ignore SIGTERM."""
    fake = Fake(tmp_path, mode, timing=SupervisorTiming(poll=0.02, check=0.02, kill=1.5), drain_seconds=0)
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        processes = descendants(os.getpid())
        assert len(processes) >= 4
        await fake.supervisor.stop()
    assert are_gone(processes)


async def test_cancellation_ends_the_whole_tree(tmp_path):
    """A failing task group ends the worker."""
    fake = Fake(tmp_path, "parent")
    task = asyncio.create_task(fake.supervisor.run())
    await fake.supervisor.healthy()
    processes = descendants(os.getpid())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert are_gone(processes)


async def test_a_killed_guardian_is_noticed(tmp_path):
    """The worker ends and is started again."""
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


async def test_port_in_use_is_not_mistaken_for_the_worker(tmp_path):
    """A port in use is a failed start, even if a server answers there."""
    fake = Fake(tmp_path, "serves")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", fake.plan.port)
    async with server:
        assert not port_is_free("127.0.0.1", fake.plan.port)
        with pytest.raises(WorkerStartError, match=f"port {fake.plan.port} on 127.0.0.1 is in use"):
            await fake.supervisor.run()
    assert not fake.supervisor.log.exists()


async def test_stops_during_the_restart_delay(tmp_path):
    """`stop` does not wait for the delay."""
    fake = Fake(tmp_path, "raises", max_restarts=9, timing=SupervisorTiming(poll=0.02))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: fake.said.count("restarting") == 2)
        await fake.supervisor.stop()
    assert fake.said[-1] == "stopped"


async def test_a_restart_changes_the_plan_and_is_no_failure(tmp_path):
    """Without the draft and with it again: no death is reported, and there is no delay."""
    fake = Fake(
        tmp_path, "serves", target_only="serves", timing=SupervisorTiming(poll=0.02, check=0.02, kill=3.0)
    )
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=False))
        await fake.healthy_times(2)
        fake.supervisor.restart(RestartRequest(with_draft=True))
        await fake.healthy_times(3)
        await fake.supervisor.stop()
    assert fake.said == ["starting", "healthy", *["recycling", "starting", "healthy"] * 2, "stopped"]
    assert fake.plans == [
        *[("starting", "with"), ("healthy", "with")],
        *[("starting", "without"), ("healthy", "without")],
        *[("starting", "with"), ("healthy", "with")],
    ]
    assert [event.exit_code for event in fake.events if event.kind is WorkerEventKind.RECYCLING] == [0, 0]


@pytest.mark.parametrize("refused", [None, PermissionError(errno.EPERM, "by a sandbox")])
async def test_a_signal_that_comes_too_late_costs_no_exit_status(tmp_path, monkeypatch, refused):
    """The worker ends by the first one; the event loop learns its exit status only after the second."""
    waitpid = os.waitpid
    if refused:
        monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=refused))

    def late(process, options):
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        time.sleep(0.3)
        return waitpid(process, options)

    monkeypatch.setattr(os, "waitpid", late)
    fake = Fake(tmp_path, "serves")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=True))
        await asyncio.sleep(0.15)
        fake.supervisor.restart(RestartRequest(with_draft=True))
        await fake.healthy_times(2)
        await fake.supervisor.stop()
    (recycling,) = (event for event in fake.events if event.kind is WorkerEventKind.RECYCLING)
    assert recycling.exit_code == 0


async def test_a_death_later_is_answered_by_the_same_plan(tmp_path):
    """A worker that was restarted without its draft does not get it back by accident."""
    fake = Fake(tmp_path, "serves", target_only="dies")
    async with asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=False))
        await fake.until(lambda: fake.plans.count(("healthy", "without")) == 2)
        await fake.supervisor.stop()
    assert fake.said[2:8] == ["recycling", "starting", "healthy", "died", "restarting", "starting"]
    assert fake.plans[-2:] == [("starting", "without"), ("healthy", "without")]


@pytest.mark.parametrize(("with_draft", "plan"), [(False, "without"), (True, "with")])
async def test_restart_request_file_takes_effect_once(tmp_path, with_draft, plan):
    """The plugin writes it and ends its server; the supervisor removes it."""
    fake = Fake(
        tmp_path, "serves", target_only="serves", timing=SupervisorTiming(poll=0.02, check=0.02, kill=3.0)
    )
    async with (
        asyncio.timeout(20),
        RestartClient.open(token="any", tls=WorkerTls(PoolSettings())) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        await client.restart(
            fake.worker, request=RestartRequest(with_draft=with_draft), reason=Reason.COLLAPSED
        )
        await fake.healthy_times(2)
        assert not fake.request.exists()
        await fake.supervisor.stop()
    assert fake.said == ["starting", "healthy", "recycling", "starting", "healthy", "stopped"]
    assert fake.plans[2:] == [("starting", plan), ("healthy", plan)]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"with_draft": 1}', "\udcff"])
async def test_malformed_restart_request_counts_as_a_death(tmp_path, content):
    """The file is removed, and the worker starts again by the same plan."""
    fake = Fake(tmp_path, "serves", target_only="serves")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.request.write_text(content, errors="surrogateescape")
        os.kill(fake.supervisor._worker_pid, signal.SIGKILL)
        await fake.healthy_times(2)
        assert not fake.request.exists()
        await fake.supervisor.stop()
    assert fake.said[2:5] == ["died", "restarting", "starting"]
    assert fake.plans[-1] == ("healthy", "with")


async def test_restart_request_of_an_earlier_process_is_dropped(tmp_path):
    """The settings decide about a first start."""
    fake = Fake(tmp_path, "serves", target_only="serves")
    fake.request.write_text('{"with_draft": false}')
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        assert not fake.request.exists()
        await fake.supervisor.stop()
    assert fake.said == ["starting", "healthy", "stopped"]
    assert fake.plans[-1] == ("healthy", "with")


async def test_a_worker_that_ignores_sigterm_is_restarted_all_the_same(tmp_path):
    """None of its processes is left after its drain time, and the new one gets the port."""
    fake = Fake(
        tmp_path,
        "stubborn",
        target_only="serves",
        timing=SupervisorTiming(poll=0.02, check=0.02, kill=0.5),
        drain_seconds=0,
    )
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        processes = descendants(os.getpid())
        assert len(processes) >= 4
        fake.supervisor.restart(RestartRequest(with_draft=False))
        await fake.healthy_times(2)
        assert are_gone(processes)
        await fake.supervisor.stop()
    assert fake.said == ["starting", "healthy", "recycling", "starting", "healthy", "stopped"]
    assert fake.events[2].exit_code == -signal.SIGKILL


async def test_plan_that_never_works_is_rolled_back(tmp_path):
    """A new plan must not end a service that worked."""
    fake = Fake(tmp_path, "serves", target_only="raises", max_restarts=1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=False))
        await fake.healthy_times(2)
        await fake.supervisor.stop()
    assert [plan for kind, plan in fake.plans if kind == "starting"] == ["with", "without", "without", "with"]
    assert fake.plans[-1] == ("healthy", "with")
    assert "gave_up" not in fake.said


TRIED = CandidateDraft(draft=f"sha256:{'a' * 64}", promotion="P1")


def on_trial(mode):
    """Choose a plan of this mode for a draft on trial, and the usual one otherwise."""

    def choose(request, plan):
        if request.candidate is None:
            return ChosenPlan(plan=plan("serves"))
        return ChosenPlan(plan=replace(plan(mode), draft=request.candidate.draft), is_trial=True)

    return choose


async def test_draft_under_test_that_never_starts_falls_back(tmp_path):
    """A draft that breaks the engine costs a restart, and not the worker."""
    fake = Fake(tmp_path, "serves", choose=on_trial("raises"), max_restarts=1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=True, candidate=TRIED))
        await fake.healthy_times(2)
        await fake.supervisor.stop()
    starts = [event.draft for event in fake.events if event.kind is WorkerEventKind.STARTING]
    assert starts == ["", TRIED.draft, TRIED.draft, ""]
    assert "gave_up" not in fake.said


async def test_draft_is_chosen_again_after_a_worker_under_test_died(tmp_path):
    """Before each start: the same during the trial, and another one afterwards."""
    over = []

    def choose(request, plan):
        if request.candidate is None or over:
            return ChosenPlan(plan=plan("serves"))
        return ChosenPlan(plan=replace(plan("serves"), draft=request.candidate.draft), is_trial=True)

    fake = Fake(tmp_path, "serves", choose=choose)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=True, candidate=TRIED))
        await fake.healthy_times(2)
        os.kill(fake.supervisor._worker_pid, signal.SIGKILL)
        await fake.healthy_times(3)
        over.append(True)
        os.kill(fake.supervisor._worker_pid, signal.SIGKILL)
        await fake.healthy_times(4)
        await fake.supervisor.stop()
    drafts = [event.draft for event in fake.events if event.kind is WorkerEventKind.HEALTHY]
    assert drafts == ["", TRIED.draft, TRIED.draft, ""]


async def test_restart_requested_while_a_draft_is_read_is_accepted_first(tmp_path):
    """Reading a large draft takes seconds, and an obsolete plan is not started."""
    reading, go_on = threading.Event(), threading.Event()

    def choose(request, plan):
        if request.candidate is not None:
            reading.set()
            assert go_on.wait(10)
            return ChosenPlan(plan=replace(plan("serves"), draft=request.candidate.draft), is_trial=True)
        return ChosenPlan(plan=plan("serves"))

    fake = Fake(tmp_path, "serves", choose=choose)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=True, candidate=TRIED))
        await fake.until(reading.is_set)
        fake.supervisor.restart(RestartRequest(with_draft=True))
        go_on.set()
        await fake.healthy_times(2)
        await fake.supervisor.stop()
    assert TRIED.draft not in [event.draft for event in fake.events if event.kind is WorkerEventKind.STARTING]


async def test_restart_ends_the_restart_delay(tmp_path, monkeypatch):
    """A request takes effect at once, even while the supervisor waits after a death."""
    monkeypatch.setattr("appliance.serving.supervise.restart_delay_seconds", lambda *_: 600.0)
    fake = Fake(tmp_path, "raises", target_only="serves", max_restarts=9)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.until(lambda: fake.said[-1:] == ["restarting"])
        fake.supervisor.restart(RestartRequest(with_draft=False))
        await fake.supervisor.healthy()
        await fake.supervisor.stop()
    assert fake.events[-1].hard_off
    assert fake.said[-4:] == ["recycling", "starting", "healthy", "stopped"]


async def test_a_worker_with_one_plan_is_restarted_by_it(tmp_path):
    """There is no draft to leave out."""
    fake = Fake(tmp_path, "serves")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        fake.supervisor.restart(RestartRequest(with_draft=False))
        await fake.healthy_times(2)
        await fake.supervisor.stop()
    assert fake.plans[2:] == [("starting", "with"), ("healthy", "with")]


async def test_unsupervised_worker_is_not_restarted(tmp_path):
    """Neither before its supervisor runs nor after: it would not come back."""
    fake = Fake(tmp_path, "serves")
    with pytest.raises(ControlRefusedError, match="worker w1 is not kept running here"):
        fake.supervisor.restart(RestartRequest(with_draft=True))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        await fake.supervisor.stop()
    with pytest.raises(ControlRefusedError, match="not kept running"):
        fake.supervisor.restart(RestartRequest(with_draft=True))


@pytest.mark.parametrize("node", ["first", "further"])
async def test_a_node_of_several_that_ends_is_not_started_alone(tmp_path, node):
    """The others would wait for it for ever: all nodes must be started again together."""
    fake = Fake(tmp_path, "dies", node=node, max_restarts=3)
    running = asyncio.create_task(fake.supervisor.run())
    await fake.supervisor.healthy()
    if node == "further":
        # The supervisor does not poll it, so the test does, until it dies.
        await asyncio.to_thread(poll_until_dead, fake.plan.url)
    with pytest.raises(WorkerStartError, match=r"worker w1 ended: RuntimeError"):
        await running
    assert fake.said == ["starting", "healthy", "died", "gave_up"]


async def test_a_further_node_is_healthy_without_an_answer(tmp_path):
    """It serves no HTTP; nor can it be restarted alone."""
    fake = Fake(tmp_path, "sleeps", node="further")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        with pytest.raises(ControlRefusedError, match="several nodes"):
            fake.supervisor.restart(RestartRequest(with_draft=False))
        await fake.supervisor.stop()
    assert fake.said == ["starting", "healthy", "stopped"]


async def test_stop_before_run_does_not_wait():
    """A supervisor that never ran has nothing to end."""
    await Fake(Path("nowhere"), "serves").supervisor.stop()


def test_guardian_kills_everything_when_its_supervisor_is_gone():
    """The kernel closes the pipe of a killed supervisor; the guardian needs nothing else."""
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


def test_guardian_reports_a_command_it_cannot_run():
    """In the worker's log, as for a missing interpreter."""
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
    """Any log gives exactly one line."""
    assert failure_line(log) == expected


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("ValueError: the patient said", "ValueError"),
        ("ValueError: a\nRuntimeError: Worker failed with error 'the patient said'", "ValueError"),
        (
            "RuntimeError: Worker failed with error 'the patient said'",
            "RuntimeError: Worker failed with error",
        ),
        (
            "pydantic.ValidationError: 1 validation error\n  Value error, the patient said",
            "it logged no exception",
        ),
        ("usage\napi_server.py: error: the patient said", "it logged no exception"),
        ("the patient said", "it logged no exception"),
        ("", "it logged no exception"),
    ],
)
def test_of_a_worker_that_has_served_no_text_is_repeated(log, expected):
    """It may quote a request."""
    assert failure_line(log, has_served=True) == expected


def test_names_the_latest_phase():
    """Lines without a phase change nothing."""
    assert (
        find_phase("x Starting to load model y\nLoading safetensors checkpoint shards: 50%\nnoise")
        == "loading weights"
    )
    assert find_phase("noise") is None


def test_restart_delay_grows_with_each_death():
    """1, 2, 4 seconds and so on up to a minute, without randomness."""
    assert [restart_delay_seconds(deaths, 60.0) for deaths in (0, 1, 2, 3, 6, 7, 1000)] == [
        1,
        2,
        4,
        8,
        60,
        60,
        60,
    ]


def test_keeps_the_last_three_logs(tmp_path):
    """The log of the first failed start explains the later ones."""
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


async def test_log_of_a_running_worker_is_rotated(tmp_path):
    """Its log rotates while it writes, repeatedly, and every line in it is complete."""
    fake = Fake(tmp_path, "chatty", largest_log=400)
    seen: set[int] = set()

    def has_begun_anew() -> bool:
        older = tmp_path / "worker-w1.log.1"
        seen.update([older.stat().st_ino] if older.exists() else [])
        return len(seen) > 5

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(fake.supervisor.run())
        await fake.supervisor.healthy()
        await fake.until(has_begun_anew)
        await fake.supervisor.stop()
    logs = sorted(tmp_path.glob("worker-w1.log*"))
    assert [log.suffix for log in logs] == [".log", ".1", ".2", ".3"]
    assert fake.said == ["starting", "healthy", "stopped"]
    for log in logs:
        assert log.stat().st_mode & 0o777 == 0o600
        assert log.stat().st_size < 1000
        assert b"\0" not in log.read_bytes()
    said = [line for log in logs[1:] for line in log.read_text().splitlines()]
    assert said
    assert {line.partition(" ")[0] for line in said} <= {"line", "(Worker"}


def test_log_that_cannot_be_copied_is_not_rotated(tmp_path, monkeypatch):
    """A full disk must not cost the log that explains it."""
    log = tmp_path / "worker-w1.log"
    log.write_text("a long line\n" * 100)

    def fail(*_):
        (tmp_path / ".worker-w1.log.copy").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("appliance.serving.worker_log.shutil.disk_usage", lambda _: SimpleNamespace(free=1300))
        assert bound(log, 100) is False
        assert [file.name for file in tmp_path.iterdir()] == ["worker-w1.log"]
    monkeypatch.setattr("appliance.serving.worker_log.shutil.copy", fail)
    assert bound(log, 100) is False
    assert [file.name for file in tmp_path.iterdir()] == ["worker-w1.log"]
    assert log.stat().st_size == 1200
    assert bound(tmp_path / "gone.log", 100) is False
