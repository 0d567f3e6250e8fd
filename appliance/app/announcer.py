"""
What a start prints on standard output: progress, the ready line, status.  The log goes to standard error.

A key is printed to a terminal only: container engines and service managers keep what a process prints.
"""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, TextIO

from appliance.control.tenants.enrolment import FirstKey
from appliance.infra.data_directory import Installation
from appliance.infra.settings import DEMO_TARGET
from appliance.serving.supervise import StartProgress, WorkerEvent
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import acceptance_length_of

PROGRESS_SECONDS = 10.0
TOY = "a toy of 7 million parameters: it writes what looks like Python, not answers"
CLEAR_LINE = "\r\x1b[K"
UP = "\x1b[1A"
WARNING_FIELDS = ("worker", "host", "path", "reason", "error", "detail")
"""Members of an event that its line on the terminal has."""


class Announcer:
    """Prints to one stream; on a terminal, progress and status rewrite their own lines, the last ones."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._progress_at = 0.0
        self._lock = Lock()  # the status is written by a thread, because a paused terminal blocks
        self._lines = 0
        self._phase = ""
        self._warning = ""
        self._warnings = 0
        self._has_status = self._is_stopping = False

    def say(self, text: str) -> None:
        with self._lock:
            self._stream.write(self._cleared() + text + "\n")
            self._lines = 0
            self._stream.flush()

    def _cleared(self) -> str:
        """What removes the lines that are rewritten; the caller holds the lock."""
        return CLEAR_LINE + (UP + CLEAR_LINE) * (self._lines - 1) if self.is_terminal else ""

    def _rewrite(self, *lines: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        with self._lock:
            if self._is_stopping:
                return
            self._stream.write(self._cleared() + "\n".join(line[:width] for line in lines))
            self._lines = len(lines)
            self._stream.flush()

    def show_status(self, text: str) -> None:
        """Rewrite the status below the newest warning; nothing once the process stops."""
        self._has_status = True
        warnings = f"{self._warning}  ({self._warnings} in the log)" if self._warnings else ""
        lines = [line for line in (warnings, text + self._phase) if line]
        self._rewrite(*lines)

    def note_warning(self, event: Mapping[str, Any]) -> None:
        """Keep an event of the log, which any thread may write, for the line above the status."""
        words = [str(event[name]) for name in WARNING_FIELDS if event.get(name)]
        text = f"{event['timestamp'][11:19]} UTC {event['level']}: {' '.join([str(event['event']), *words])}"
        # Details may quote another program: nothing of it may move the cursor.
        self._warning = "".join(each if each.isprintable() else " " for each in text)
        self._warnings += 1

    def started(self, version: str, installation: Installation) -> None:
        self.say(f"sovereign serving appliance {version}, data in {installation.directory}")

    def show_keys(self, keys: Sequence[FirstKey]) -> None:
        """Show the keys of a first start on a terminal, and elsewhere the files they are in."""
        if not keys:
            return
        self.say("First start: API keys were made, each in a file of mode 0600.")
        for key in keys:
            name = f"{key.purpose} key"
            self.say(f"{name:<16} {f'{key.text}  in {key.file}' if self.is_terminal else f'in {key.file}'}")

    def worker_event(self, event: WorkerEvent) -> None:
        self._progress_at, self._phase = 0.0, ""
        self.say(f"{event.worker}: {event.kind.replace('_', ' ')}, {event.detail}")

    def worker_progress(self, progress: StartProgress) -> None:
        text = f"worker: {progress.phase}, {progress.seconds:.0f} s"
        if self._has_status:
            self._phase = f"; {text}"
        elif self.is_terminal:
            self._rewrite(text)
        elif progress.seconds - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = progress.seconds
            self.say(text)

    def ready(
        self,
        installation: Installation,
        url: str,
        admin_url: str,
        models: list[str],
        *,
        console: bool,
        documentation: bool,
    ) -> None:
        body = {
            "model": models[0] if models else "MODEL",
            "messages": [{"role": "user", "content": "Write a Python function `get_name`."}],
            "max_tokens": 64,
            "temperature": 0,
        }
        has_demo = installation.demo_key.exists()
        key = f"$(cat {shlex.quote(str(installation.demo_key))})" if has_demo else "$KEY"
        self.say("")
        self.say(f"ready            {url}/v1  (model: {', '.join(models)})")
        if models == [DEMO_TARGET.name]:
            self.say(f"{'':<16} {TOY}")
        self.say("")
        self.say(f'curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" \\')
        self.say(f"  -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
        self.say("")
        self.say(f"admin API        {admin_url}/admin/v1")
        if console:
            self.say(f"console          {admin_url}/console  (log in with the admin key)")
        if documentation:
            self.say(f"documentation    {url}/docs")
        self.say(f"metrics          {admin_url}/metrics")
        self.say(f"readiness        {url}/readyz")
        self.say(f"live table       appliance status --data {installation.directory} --url {admin_url}")
        self.say(f"audit            appliance audit verify --data {installation.directory}")
        self.say("Ctrl-C drains and stops.")

    def stopping(self, failure: BaseException | None) -> None:
        self._is_stopping = True
        self.say("stopping: " + ("a part failed" if failure else "letting running requests finish"))


def status_text(snapshots: Iterable[WorkerSnapshot], in_flight: Mapping[WorkerId, int]) -> str:
    """One line about the workers, from what the gateway scraped last."""
    seen = list(snapshots)
    up = [snapshot for snapshot in seen if snapshot.healthy]
    windows = [snapshot.figures.window for snapshot in up]
    drafts = sum(window.drafts for window in windows)
    accepted = sum(window.accepted_tokens for window in windows)
    speed = sum(snapshot.tokens_per_second for snapshot in up)
    modes = Counter(str(snapshot.decision.mode).replace("_", "-") for snapshot in up)
    parts = [
        f"{len(up)} of {len(seen)} workers ready",
        f"{sum(in_flight.values())} running",
        f"{speed:.0f} tokens/s",
    ]
    if drafts:
        parts.append(f"acceptance length {acceptance_length_of(drafts, accepted):.2f}")
    parts += [mode if len(modes) == 1 else f"{count} {mode}" for mode, count in sorted(modes.items())]
    return ", ".join(parts)
