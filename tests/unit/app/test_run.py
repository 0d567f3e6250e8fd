"""What happens to the parts of a process when one fails or a signal comes."""

import asyncio
import io
import json
import re

import pytest

from appliance.app.announcer import Announcer, status_text
from appliance.app.run import _until_stopped, open_log
from appliance.infra.data_directory import locate
from appliance.infra.logs import configure_logs, open_log_file
from appliance.infra.settings import LogSettings, load_settings
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.speculation.evidence import Acceptance
from appliance.speculation.state import SpeculationFigures
from appliance.speculation.values import Decision, SpecDecodeCounters, SpeculationMode


class Parts:
    """Two parts that run until they are cancelled, or fail when told; records what happened, in order."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fails = asyncio.Event()

    async def part(self, name: str) -> None:
        try:
            await self.fails.wait()
            raise OSError(name)
        except asyncio.CancelledError:
            self.happened.append(f"{name} ended")
            raise

    async def forever(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.happened.append("other ended")

    async def drain(self) -> None:
        self.happened.append("drained")

    async def run(self, stop: asyncio.Event) -> None:
        announcer = Announcer(io.StringIO())
        await _until_stopped(stop, announcer, self.part("one"), self.forever(), drain=self.drain)


async def test_the_failure_of_a_part_stops_all_of_them():
    """Requests drain first, and the process ends with the failure."""
    parts = Parts()
    running = asyncio.ensure_future(parts.run(asyncio.Event()))
    await asyncio.sleep(0)
    parts.fails.set()
    with pytest.raises(OSError, match="one"):
        await running
    assert parts.happened == ["drained", "other ended"]


async def test_a_signal_stops_all_parts():
    parts, stop = Parts(), asyncio.Event()
    running = asyncio.ensure_future(parts.run(stop))
    await asyncio.sleep(0)
    stop.set()
    await running
    assert parts.happened == ["drained", "one ended", "other ended"]


@pytest.mark.parametrize(
    ("style", "terminal", "is_in_file"),
    [("auto", True, True), ("auto", False, False), ("json", True, False), ("console", True, False)],
)
def test_log_is_in_a_file_only_where_a_person_reads_the_terminal(
    tmp_path, capsys, style: str, terminal: bool, is_in_file: bool
):
    """The file is named; a pipe gets JSON on standard error, as a service manager expects."""
    installation = locate(load_settings(environment={}, overrides={"data": {"directory": str(tmp_path)}}))
    installation.logs.mkdir()
    said = io.StringIO()
    logger = open_log(LogSettings(format=style), installation, Announcer(said), terminal=terminal)
    logger.info("started", port=8080)
    if is_in_file:
        logger._logger.close()
    file = installation.logs / "appliance.log"
    written = capsys.readouterr().err
    assert file.exists() == (str(file) in said.getvalue()) == (written == "") == is_in_file
    if style != "console":
        assert json.loads(file.read_text() if is_in_file else written)["event"] == "started"


class Terminal(io.StringIO):
    """What a terminal that understands the few sequences of a rewritten line would show."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        shown, row = [""], 0
        for piece in re.split(r"(\n|\r\x1b\[K|\x1b\[1A)", self.getvalue()):
            match piece:
                case "\n":
                    row += 1
                    shown += [""] * (row == len(shown))
                case "\r\x1b[K":
                    shown[row] = ""
                case "\x1b[1A":
                    row -= 1
                case text:
                    shown[row] += text
        return shown


def test_status_and_newest_warning_are_the_last_lines_of_a_terminal(tmp_path):
    """What is said pushes them down; a stop removes them, and the log has every event."""
    installation = locate(load_settings(environment={}, overrides={"data": {"directory": str(tmp_path)}}))
    installation.logs.mkdir()
    terminal = Terminal()
    announcer = Announcer(terminal)
    logger = open_log(LogSettings(), installation, announcer, terminal=True)
    announcer.show_status("1 of 1 workers ready")
    logger.info("started")
    announcer.show_status("0 of 1 workers ready")
    assert terminal.lines()[1:] == ["0 of 1 workers ready"]
    logger.warning("worker_health_changed", worker="w1", detail="no answer\x1b[2J", state="down")
    logger.error("worker_gave_up", worker="w2")
    announcer.show_status("0 of 2 workers ready")
    first, warning, status = terminal.lines()
    assert first.startswith("log ")
    assert warning[8:] == " UTC error: worker_gave_up w2  (2 in the log)"
    assert status == "0 of 2 workers ready"
    announcer.say("said")
    announcer.show_status("1 of 2 workers ready")
    assert terminal.lines()[1:] == ["said", warning, "1 of 2 workers ready"]
    announcer.stopping(None)
    announcer.show_status("after the end")
    assert terminal.lines()[1:] == ["said", "stopping: letting running requests finish", ""]
    logger._logger.close()
    events = (installation.logs / "appliance.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == [
        "started",
        "worker_health_changed",
        "worker_gave_up",
    ]


def test_control_characters_of_a_warning_do_not_reach_the_terminal():
    terminal = Terminal()
    announcer = Announcer(terminal)
    announcer.note_warning(
        {"event": "worker_died", "level": "error", "timestamp": "2026-01-02T03:04:05Z", "detail": "a\x1b[2Jb"}
    )
    announcer.show_status("1 of 1 workers ready")
    assert terminal.lines()[0] == "03:04:05 UTC error: worker_died a [2Jb  (1 in the log)"


def test_pipe_gets_no_status():
    said = io.StringIO()
    announcer = Announcer(said)
    assert not announcer.is_terminal
    announcer.stopping(None)
    assert said.getvalue() == "stopping: letting running requests finish\n"


def test_status_sums_what_the_workers_that_are_up_reported():
    """Acceptance length is over all drafts, not the mean of the workers' lengths."""

    def seen(name: str, *, healthy: bool, drafts: int, accepted: int, mode: SpeculationMode):
        window = SpecDecodeCounters(
            drafts=drafts, draft_tokens=3 * drafts, accepted_tokens=accepted, accepted_per_position=()
        )
        return WorkerSnapshot(
            worker=Worker(worker_id=WorkerId(name), url=f"http://{name}:8000", mode=mode),
            healthy=healthy,
            tokens_per_second=100.4,
            decision=Decision(mode=mode),
            figures=SpeculationFigures(acceptance=Acceptance(total=window)),
        )

    on, off = SpeculationMode.SPECULATIVE, SpeculationMode.TARGET_ONLY
    one = seen("a", healthy=True, drafts=100, accepted=200, mode=on)
    two = seen("b", healthy=True, drafts=300, accepted=0, mode=off)
    down = seen("c", healthy=False, drafts=1000, accepted=9, mode=on)
    assert status_text([one, two, down], {WorkerId("a"): 2, WorkerId("b"): 1}) == (
        "2 of 3 workers ready, 3 running, 201 tokens/s, acceptance length 1.50, 1 speculative, 1 target-only"
    )
    assert status_text([down], {}) == "0 of 1 workers ready, 0 running, 0 tokens/s"


def test_log_file_rotates_by_size(tmp_path):
    file = open_log_file(tmp_path / "appliance.log", largest=200, kept=2)
    logger = configure_logs(LogSettings(), terminal=False, file=file)
    for count in range(20):
        logger.info("counted", count=count)
    file.close()
    kept = sorted(tmp_path.iterdir())
    assert [each.name for each in kept] == ["appliance.log", "appliance.log.1", "appliance.log.2"]
    assert all(each.stat().st_size <= 200 for each in kept)
    newest = kept[0].read_text().splitlines()[-1]
    assert json.loads(newest)["count"] == 19
