"""
What a start prints on standard output: progress, the ready line.  The log goes to standard error.

A key is printed to a terminal only: container engines and service managers keep what a process prints.
"""

import json
import shlex
from collections.abc import Sequence
from typing import TextIO

from appliance.control.tenants.enrolment import FirstKey
from appliance.infra.data_directory import Installation
from appliance.infra.settings import DEMO_TARGET
from appliance.serving.supervise import StartProgress, WorkerEvent

PROGRESS_SECONDS = 10.0
TOY = "a toy of 7 million parameters: it writes what looks like Python, not answers"
CLEAR_LINE = "\r\x1b[K"


class Announcer:
    """Prints to one stream; on a terminal, progress rewrites its own line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._progress_at = 0.0

    def say(self, text: str) -> None:
        self._stream.write((CLEAR_LINE if self._terminal else "") + text + "\n")
        self._stream.flush()

    def started(self, version: str, installation: Installation) -> None:
        self.say(f"sovereign serving appliance {version}, data in {installation.directory}")

    def show_keys(self, keys: Sequence[FirstKey]) -> None:
        """Show the keys of a first start on a terminal, and elsewhere the files they are in."""
        if not keys:
            return
        self.say("First start: API keys were made, each in a file of mode 0600.")
        for key in keys:
            name = f"{key.purpose} key"
            self.say(f"{name:<16} {f'{key.text}  in {key.file}' if self._terminal else f'in {key.file}'}")

    def worker_event(self, event: WorkerEvent) -> None:
        self._progress_at = 0.0
        self.say(f"{event.worker}: {event.kind.replace('_', ' ')}, {event.detail}")

    def worker_progress(self, progress: StartProgress) -> None:
        text = f"worker: {progress.phase}, {progress.seconds:.0f} s"
        if self._terminal:
            self._stream.write(CLEAR_LINE + text)
            self._stream.flush()
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
        self.say("stopping: " + ("a part failed" if failure else "letting running requests finish"))
