"""
Streamed traffic for tests of speculation: some clients that send one kind of prompt after the other.
"""

import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

from demo.process import ApplianceProcess
from demo.training.corpus import held_out_prompts, load_corpus


def code() -> Callable[[], str]:
    """Return a source of prompts the demo draft is good at."""
    prompts = cycle(held_out_prompts(load_corpus(), count=16))
    return lambda: next(prompts)


def noise() -> Callable[[], str]:
    """Return a source of prompts no draft is good at."""
    digits = random.Random(7)
    return lambda: "".join(digits.choice("0123456789abcdef") for _ in range(600))


class Traffic:
    """A few clients, each with one stream open at a time."""

    def __init__(
        self,
        appliance: ApplianceProcess,
        *,
        clients: int,
        prompt: Callable[[], str],
        pause_seconds: float = 0.0,
    ) -> None:
        self.prompt = prompt
        self.failures: list[str] = []
        self.longest_gap = 0.0
        """Longest time between two frames of one stream, in seconds."""
        self.answers = 0
        self._appliance = appliance
        self._clients = clients
        self._pause_seconds = pause_seconds
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._of_kind = 0
        self._kind_since = time.monotonic()

    @contextmanager
    def running(self) -> Iterator["Traffic"]:
        """Send for as long as the context lasts."""
        threads = [threading.Thread(target=self._send_on) for _ in range(self._clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join(120)

    def turn_to(self, prompt: Callable[[], str]) -> None:
        """Change the kind of prompts, and return once no stream of the old kind is left."""
        with self._lock:
            self.prompt, turned = prompt, time.monotonic()
            self._kind_since, self._of_kind = turned, 0
        deadline = turned + 60
        while self._of_kind < self._clients:
            assert time.monotonic() < deadline, "the old streams did not end"
            time.sleep(0.02)

    def _send_on(self) -> None:
        kind = 0.0
        while not self._stopping.is_set():
            with self._lock:
                prompt, since = self.prompt(), self._kind_since
                if kind != since:
                    kind = since
                    self._of_kind += 1
            try:
                self._stream(prompt)
            except (OSError, ValueError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.5)
            self._stopping.wait(self._pause_seconds)

    def _stream(self, prompt: str) -> None:
        body = {
            "model": "demo-coder", "prompt": prompt, "max_tokens": 96,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        request = urllib.request.Request(
            self._appliance.url + "/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._appliance.key}", "Content-Type": "application/json"},
        )
        pieces, done = 0, False
        with urllib.request.urlopen(request, timeout=60) as response:
            last: float | None = None
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                now = time.monotonic()
                self.longest_gap = max(self.longest_gap, now - last if last is not None else 0.0)
                last, done = now, line.startswith(b"data: [DONE]")
                if not done:
                    content = json.loads(line[6:])
                    assert "error" not in content, content
                    pieces += 1
        assert done, "the stream broke off"
        assert pieces > 0, "the stream was empty"
        self.answers += 1
