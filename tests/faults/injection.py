"""
Harms one system call of a real writer, then asks an auditor what is left.

The method is that of Tessera (transparency-dev/tessera, integration/fault/posix/fault_test.go): a
clean run under strace counts the calls; then, for each of them, a copy of the same log is written
to with that one call failing, and an independent check reads what is on the disk.  Beyond it, here
the process is also killed at each call, every entry it acknowledged must be found again, and so
must every checkpoint it published.

A signal is delivered on entering the call, which then does not happen: killed at the Nth call is
killed between the N-1st and the Nth.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from appliance.audit import verify
from tests.audit_log import signer_in
from tests.faults.writer import STOPPED

REPOSITORY = Path(__file__).resolve().parents[2]
CALLS = ("openat", "write", "pwrite64", "fsync", "fdatasync", "ftruncate", "rename", "renameat2", "unlink")
"""Calls that change files, or make changes durable; those of Python and SQLite on Linux."""
FAULTS = {
    "killed": "signal=SIGKILL:when={n}",
    "EIO once": "error=EIO:when={n}",
    "ENOSPC from then on": "error=ENOSPC:when={n}+",
}
"""Neither the log nor SQLite treats the two errors differently, so each comes in one of the two ways."""
PAGE_WRITE = "pwrite64"
"""SQLite writes many pages between two syncs: three of four calls."""
LOG_FILES = r"audit\.(?:db|head)[^\"/>,)]*"
"""The database with SQLite's files next to it, and the sealed head."""
CHECK_FILES = r"audit\.checked(?:\.new)?"
SPOOL_FILES = r"spool(?:/\d+\.spool)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The fault: a task of the writer, and how it is harmed."""

    task: str
    template: str
    """Log it starts from."""
    files: str = LOG_FILES
    """Pattern of the files whose calls are harmed, relative to the log's directory, which is one, too."""
    calls: tuple[str, ...] = CALLS


PLOTS = {
    "create": Plot(task="create", template="new"),
    "write": Plot(task="write", template="closed"),
    "move": Plot(task="write", template="full"),
    "close": Plot(task="close", template="closed"),
    "spool": Plot(task="spool", template="closed", files=SPOOL_FILES),
    # Two threads run it; only one of them makes these calls.
    "drain": Plot(
        task="drain",
        template="spooled",
        files=f"{LOG_FILES}|{SPOOL_FILES}",
        calls=("pwrite64", "fdatasync", "rename", "unlink"),
    ),
    "stamp": Plot(task="stamp", template="stampable"),
    "forward": Plot(task="forward", template="small"),
    "check": Plot(task="check", template="tiled", files=CHECK_FILES),
    "dispose": Plot(task="dispose", template="disposable"),
}
"""Making the database; writing entries and checkpoints; the same when SQLite moves its write-ahead log
into the database; closing it; writing to the spool while the database takes nothing; bringing what was
spooled into the log; keeping a time stamp; forwarding the log to a SIEM; the self-check, which keeps its
progress; removing disposed entries."""
PATIENCE_SECONDS = 120
AT_A_TIME = 2
"""Writers that run side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one task of the writer reported, and what strace saw of it."""

    told: list[dict]
    ended: int
    """Exit status, or minus the signal."""
    trace: str = ""

    def reports(self, kind: str) -> list:
        """Return all reports of one kind."""
        return [report[kind] for report in self.told if kind in report]

    @property
    def outcome(self) -> str:
        """The outcome of the process, in one word."""
        if self.ended == -signal.SIGKILL:
            return "killed"
        if self.ended == STOPPED:
            return "stopped"
        if self.ended:
            return "crashed"
        return "refused" if self.reports("refused") else "unharmed"


class WriterServer:
    """One writer process, ready to run tasks one after the other; `close` ends it."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process runs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.writer"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def run(self, task: str, directory: Path, strace: Sequence[str] | None = None) -> Run:
        """Run one task, under strace when options for it are given."""
        # A task that hangs ends the server, and so the test.
        watchdog = threading.Timer(PATIENCE_SECONDS, self._process.kill)
        watchdog.start()
        try:
            order = {"task": task, "directory": str(directory), "traced": strace is not None}
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            if strace is None:
                return self._listen("ended")
            before = self._listen("pid")
            pid = before.told[-1]["pid"]
            with tempfile.NamedTemporaryFile() as output:
                tracing = ["strace", "-f", "-y", "-o", output.name, *strace, "-p", str(pid)]
                with subprocess.Popen(tracing, stderr=subprocess.PIPE) as tracer:
                    run = self._listen("ended")
                    tracer.communicate()
                trace = Path(output.name).read_text(errors="replace")
            return Run(told=[*before.told, *run.told], ended=run.ended, trace=trace)
        finally:
            watchdog.cancel()

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    @property
    def errors(self) -> str:
        """What the server and its tasks wrote on standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]

    def _listen(self, last: str) -> Run:
        """Take reports up to one of this kind."""
        told = [self._next()]
        while last not in told[-1]:
            told.append(self._next())
        return Run(told=told, ended=told[-1].get("ended", 0))

    def _next(self) -> dict:
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            message = f"the writer hung or went away: {self.errors}"
            raise AssertionError(message)
        return json.loads(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A log to start from, and what was promised when it was made."""

    directory: Path
    told: list[dict] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A plot with its template, and the calls that its task makes."""

    name: str
    plot: Plot
    template: Template
    calls: dict[str, int]
    paths: tuple[str, ...]
    """Files of the log that the calls name, relative to its directory."""

    def points(self, every: int) -> Iterator[tuple[str, int]]:
        """Yield every call and its number, but of the writes of pages the last and each of this many."""
        for call, count in self.calls.items():
            step = every if call == PAGE_WRITE else 1
            for number in sorted({*range(1, count + 1, step), count}):
                yield call, number


def look_at(server: WriterServer, name: str, template: Template, scratch: Path) -> Scene:
    """Run a task unharmed on a copy of its template, and count its calls on the log's files."""
    plot, directory = PLOTS[name], scratch / name
    shutil.copytree(template.directory, directory)
    run = server.run(plot.task, directory, [f"--trace={','.join(f'?{call}' for call in plot.calls)}"])
    assert run.outcome == "unharmed", (run, server.errors)
    named = re.compile(rf'{re.escape(str(directory))}(?:/({plot.files}))?(?=[">])')
    lines = [line for line in run.trace.splitlines() if named.search(line) and "resumed>" not in line]
    made = [re.match(r"(\d+) +(\w+)\(", line).groups() for line in lines]
    # strace counts calls by thread: were there two, `when=N` would not mean one call.
    threads = Counter(call for _, call in set(made))
    assert set(threads.values()) == {1}, f"one thread makes these calls:\n{run.trace}"
    paths = {match[1] or "" for line in lines for match in named.finditer(line)}
    complaint = judge(server, directory, template.told, run)
    assert complaint is None, complaint
    shutil.rmtree(directory)
    calls = Counter(call for _, call in made)
    return Scene(name=name, plot=plot, template=template, calls=dict(calls), paths=tuple(sorted(paths)))


def harm(
    server: WriterServer, scene: Scene, directory: Path, call: str, fault: str
) -> tuple[str, str | None]:
    """
    Run the scene in a new directory with one fault.

    Args:
        server: runs the task, and the recovery after it.
        scene: what to run, on what.
        directory: does not exist yet; removed again unless there is a complaint.
        call: system call to harm.
        fault: what is done to it, as `inject=CALL:` of strace takes it.

    Returns:
        What became of the writer, and a complaint when the log is not what it should be.
    """
    shutil.copytree(scene.template.directory, directory)
    paths = [f"--trace-path={(directory / path) if path else directory}" for path in scene.paths]
    run = server.run(scene.plot.task, directory, [f"--trace={call}", *paths, f"--inject={call}:{fault}"])
    if "INJECTED" not in run.trace and run.outcome != "killed":
        return run.outcome, f"nothing was injected; the trace reads:\n{run.trace}"
    complaint = judge(server, directory, scene.template.told, run)
    if complaint is None:
        shutil.rmtree(directory)
    return run.outcome, complaint


def judge(server: WriterServer, directory: Path, before: list[dict], run: Run) -> str | None:
    """
    Start the log again, export it and verify the export here, where the log was never open.

    Args:
        server: runs the recovery.
        directory: of the log.
        before: what had been reported before the run.
        run: what was harmed.

    Returns:
        What is wrong, or None.
    """
    if run.outcome == "crashed":
        return f"the writer ended with a defect: {server.errors}"
    recovered = server.run("recover", directory)
    if recovered.ended:
        return (
            f"the log does not start again: {recovered.told} {server.errors if recovered.ended == 1 else ''}"
        )
    told = Run(told=[*before, *run.told], ended=run.ended)
    key = verify.parse_key(signer_in(directory).vkey)
    published, held = told.reports("published"), None
    if published:
        try:
            held = verify.verify_note(published[-1].encode(), key)
        except verify.InvalidError as error:
            return f"a published checkpoint is invalid: {error}"
    report = verify.verify_export(directory / "export", key, held)
    expected = verify.ExitCode.ERASED if report.gone_below else verify.ExitCode.VALID
    if report.exit_code is not expected:
        return f"the auditor finds: {verify.render(report)}"
    if told.reports("disposing"):
        return _undisposed(server, directory, key)
    leaves = list(verify.read_leaves(directory / "export", report.size))
    return (
        _missing(leaves, told)
        or _contradictions(leaves, told)
        or _lost_stamps(directory, told)
        or (_skipped(server, directory, told, report.size) if told.reports("forwarding") else None)
        or (_unchecked(server, directory, report.size) if (directory / "audit.checked").exists() else None)
    )


def _unchecked(server: WriterServer, directory: Path, size: int) -> str | None:
    """Check the log again from what the file has, and say why that is not a whole pass."""
    run = server.run("check", directory)
    if run.reports("checked") == [size]:
        return None
    return f"the self-check does not continue: {run.told} {server.errors}"


def _lost_stamps(directory: Path, run: Run) -> str | None:
    """Name the first time stamp that was kept and is gone; the auditor found those that are there whole."""
    found = {path.name.partition("-")[2] for path in (directory / "export" / "timestamps").glob("*")}
    gone = [size for size in run.reports("stamped") if f"{size}.tsr" not in found]
    return f"the time stamp of {gone[0]} entries was kept, and is gone" if gone else None


def _undisposed(server: WriterServer, directory: Path, key: verify.Key) -> str | None:
    """Run the disposal again: everything it disposes of is gone then, and the auditor finds nothing."""
    again = server.run("dispose", directory)
    if again.ended:
        return f"the disposal does not continue: {again.told} {server.errors}"
    shutil.rmtree(directory / "export")
    recovered = server.run("recover", directory)
    if recovered.ended:
        return f"the log does not start after the disposal: {recovered.told} {server.errors}"
    report = verify.verify_export(directory / "export", key, None)
    if report.exit_code is not verify.ExitCode.ERASED or report.left_entries or not report.kept_entries:
        return f"after the disposal the auditor finds: {verify.render(report)}"
    return None


def _skipped(server: WriterServer, directory: Path, told: Run, size: int) -> str | None:
    """Forward what is left, and name the first entry that was never forwarded."""
    again = server.run("forward", directory)
    if again.ended:
        return f"forwarding does not continue: {again.told} {server.errors}"
    sent = {*told.reports("forwarded"), *again.reports("forwarded")}
    return next((f"entry {index} was never forwarded" for index in range(size) if index not in sent), None)


def _missing(leaves: list[bytes], run: Run) -> str | None:
    """Name the first acknowledged entry that is not where it was said to be."""
    ids = {json.loads(leaf)["id"] for leaf in leaves}
    for index, entry_id, leaf_hash in run.reports("acknowledged"):
        if index is None:
            if entry_id not in ids:
                return f"entry {entry_id} was acknowledged from the spool, and is not in the log"
            continue
        if index >= len(leaves):
            return f"entry {index} was acknowledged, and the log ends at {len(leaves)}"
        leaf = leaves[index]
        if sha256(b"\x00" + leaf).hexdigest() != leaf_hash or json.loads(leaf)["id"] != entry_id:
            return f"entry {index} is not the one that was acknowledged"
    return None


def _contradictions(leaves: list[bytes], run: Run) -> str | None:
    """Name the first request that was refused and yet is recorded as served."""
    entries = [json.loads(leaf) for leaf in leaves]
    served = {entry["request_id"] for entry in entries if entry["type"] == "request.outcome"}
    begun = {entry["request_id"] for entry in entries if entry["type"] == "request.intent"}
    for kind, request_id in run.reports("refused"):
        if kind == "request.intent" and request_id in served:
            return f"request {request_id} was refused, and is recorded as served"
        if kind == "request.outcome" and request_id not in begun:
            return f"request {request_id} was begun, and its intent is gone"
    return None


@dataclass(slots=True)
class Tally:
    """The outcomes by task, call and fault; and every violation."""

    outcomes: dict[tuple[str, str, str], Counter] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def add(self, scene: Scene, call: str, number: int, fault: str, found: tuple[str, str | None]) -> None:
        """Count one case."""
        outcome, complaint = found
        self.outcomes.setdefault((scene.name, call, fault), Counter())[outcome] += 1
        if complaint:
            self.complaints.append(f"{scene.name}, {fault} at {call} {number}: {complaint}")

    def outcomes_of(self, scene: Scene, fault: str) -> set[str]:
        """The outcomes of all cases of this scene and fault."""
        cells = [cell for key, cell in self.outcomes.items() if (key[0], key[2]) == (scene.name, fault)]
        return {outcome for cell in cells for outcome in cell}

    def table(self) -> str:
        """Return the outcomes as a Markdown table."""
        lines = [
            f"| Task | Call | Made | {' | '.join(FAULTS)} |",
            f"|---|---|---|{'---|' * len(FAULTS)}",
        ]
        for task, call in sorted({key[:2] for key in self.outcomes}):
            cells = [self.outcomes.get((task, call, fault), Counter()) for fault in FAULTS]
            texts = [", ".join(f"{count} {word}" for word, count in cell.most_common()) for cell in cells]
            made = max(cell.total() for cell in cells)
            lines.append(f"| {task} | `{call}` | {made} | {' | '.join(texts)} |")
        return "\n".join(lines) + "\n"
