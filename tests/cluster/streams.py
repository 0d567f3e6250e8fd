"""
Streams that clients in a pod keep running through a Service, while a test replaces the pods behind it.
"""

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster.cluster import PYTHON, Namespace
from tests.cluster.connections import soon
from tests.cluster.release import CLIENT, MODEL

STREAM_SECONDS = 1500
"""Maximum time of all streams together, so that an aborted test leaves none."""
CLIENTS = """
import http.client, json, os, sys, threading, time, urllib.parse
url, key, model, number, tokens, place, seconds = sys.argv[1:]
host = urllib.parse.urlsplit(url).netloc
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
began, lock, opened = time.monotonic(), threading.Lock(), set()
until = began + float(seconds)
records = open(place, "w")

def stream(client, seen):
    messages = [{"role": "user", "content": "def add_%d(a, b):" % client}]
    body = {"model": model, "messages": messages, "max_tokens": int(tokens), "stream": True}
    body["ignore_eos"] = True
    connection = http.client.HTTPConnection(host, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        seen["status"], seen["retry_after"] = answer.status, answer.getheader("Retry-After")
        if answer.status != 200:
            seen["text"] = answer.read().decode(errors="replace")[:300]
            return
        for line in answer:
            line = line.strip()
            if line == b"data: [DONE]":
                seen["done"] = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    seen["text"] = json.dumps(chunk)[:300]
                for choice in chunk.get("choices", ()):
                    seen["finish"] = choice.get("finish_reason") or seen["finish"]
                seen["chunks"] += 1
                with lock:
                    if client not in opened:
                        opened.add(client)
                        if len(opened) == int(number):
                            open(place + ".all", "w").close()
    finally:
        connection.close()

def work(client):
    while not os.path.exists(place + ".stop") and time.monotonic() < until:
        seen = {"client": client, "began": time.time(), "status": None, "finish": None, "done": False}
        seen.update(chunks=0, text="", error=None, retry_after=None)
        try:
            stream(client, seen)
        except (OSError, http.client.HTTPException) as error:
            seen["error"] = repr(error)
        seen["seconds"] = time.time() - seen["began"]
        with lock:
            print(json.dumps(seen), file=records, flush=True)
        if seen["status"] != 200 or seen["error"]:
            time.sleep(0.5)

threads = [threading.Thread(target=work, args=(client,)) for client in range(int(number))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@dataclass(frozen=True)
class Report:
    """One record for each stream: `status`, `error` (connection), `done`, `finish`, `text`, `retry_after`."""

    records: tuple[dict[str, Any], ...]

    @property
    def complete(self) -> list[dict[str, Any]]:
        return [each for each in self.records if each["status"] == 200 and each["done"] and each["finish"]]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Refused, reset and cut ones, and those with another status."""
        return [each for each in self.records if each not in self.complete]


@dataclass(frozen=True)
class Streams:
    """Clients that run."""

    namespace: Namespace
    pod: str
    place: str
    _clients: "Future[str]"

    def report(self) -> Report:
        """Streams that have ended; after the `with`, all."""
        if self._clients.done():
            self._clients.result()
        lines = self.namespace.exec(self.pod, "cat", self.place).stdout.splitlines()
        return Report(tuple(json.loads(line) for line in lines))

    def started(self) -> bool:
        """Whether each client has received something."""
        if self._clients.done():
            self._clients.result()
        return self.namespace.exec(self.pod, "test", "-e", f"{self.place}.all", check=False).returncode == 0


@contextmanager
def streams(
    namespace: Namespace, url: str, key: str, number: int = 20, *, tokens: int = 32, pod: str = CLIENT
) -> Iterator[Streams]:
    """
    Clients that each open the next stream when their last one has ended, in a pod that runs.

    They have all received something when this returns, and their last streams have ended after the `with`.
    """
    place = f"/tmp/{uuid.uuid4().hex}"
    words = (url, key, MODEL, str(number), str(tokens), place, str(STREAM_SECONDS))
    command = ("exec", "--stdin", pod, "--", PYTHON, "-I", "-", *words)
    with ThreadPoolExecutor(1) as side_by_side:
        clients = side_by_side.submit(
            namespace.kubectl, *command, stdin=CLIENTS, seconds=STREAM_SECONDS + 300
        )
        running = Streams(namespace, pod, place, clients)
        try:
            assert soon(running.started, STREAM_SECONDS), running.report().failed[:3]
            yield running
        finally:
            namespace.exec(pod, "touch", f"{place}.stop", check=False)
    clients.result()
