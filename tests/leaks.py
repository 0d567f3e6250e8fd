"""
A pytest plugin that searches everything the appliance wrote during a run for what it must not keep.

While tests run it notes each prompt their HTTP clients send, and collects what is printed by appliance
processes and commands; fixtures add the operator logs and metrics of gateways in the test's own
process.  Data directories, worker logs, spools and exports lie below pytest's temporary directory
anyway.  When the run is over, `grep` looks through all of it, for those prompts and for anything
that has the form of an API key or a bearer token.  One finding fails the run, with file and line.

A key may stand where it is made to be shown: in the admin key's file and in what a first start
and `appliance key` print.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from demo.process import ApplianceProcess

PROMPT = "what ails my neighbour in the third house, doctor"
"""What the shared request bodies ask; a clear sign where it is found."""
COMPLETION = "that_is_between_her_and_me_alone"
"""What the scripted worker answers, among other things."""
KEY = r"sk-[a-z2-7]{8}-[A-Za-z0-9_-]{43}"
BEARER_TOKEN = r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
CONVERSATION = (
    "messages",
    "prompt",
    "input",
    "instructions",
    "system",
    "query",
    "documents",
    "texts",
    "text",
)
"""Members of a body that hold what somebody said."""
PLAIN = re.compile(r"[ !#-\[\]-~]{24,160}")
"""A piece of text that is spelt the same in JSON, YAML, SQL and a traceback."""
DISTINCT = 10
"""Fewer different characters than this are padding, which is also found where nothing leaked."""
LARGEST_BODY = 2**20
SHOWN_ONCE = re.compile(r"^(?:(?:admin|demo tenant) key +sk-|curl .*'Authorization: Bearer sk-)")
"""Lines of a first start that show a key, as they should."""
EXEMPT = ("admin.key", "*.kept-by-the-client", "*.py")
"""Files that may hold what is searched for: the admin key's, mode 0600; what a test wrote as a client;
copies of the sources, since some prompts of the tests are code."""
LARGEST_REPORT = 20


@dataclass(slots=True)
class Leaks:
    """What was said in this run, and what was written; the plugin's state."""

    directory: Path | None = None
    """Pytest's temporary directory: everything below it is searched."""
    said: set[str] = field(default_factory=lambda: {PROMPT, COMPLETION})
    processes: list[ApplianceProcess] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    _kept: int = 0

    def hear(self, body: Any) -> None:
        """Note what a request says, if it is a body at all."""
        if isinstance(body, str | bytes) and len(body) <= LARGEST_BODY:
            try:
                content = json.loads(body)
            except (ValueError, RecursionError):
                return
        else:
            content = body
        for name in CONVERSATION if isinstance(content, dict) else ():
            for text in _strings(content.get(name)):
                pieces = [piece for piece in PLAIN.findall(text) if len(set(piece)) >= DISTINCT]
                self.said.update(sorted(pieces, key=len)[-1:])

    def keep(self, origin: str, text: str) -> None:
        """Add what a part of the appliance printed to what is searched."""
        if self.directory is None:
            return
        self._kept += 1
        at = self.directory / "collected" / f"{self._kept:05}-{re.sub(r'[^a-z0-9.-]+', '-', origin.lower())}"
        at.parent.mkdir(exist_ok=True)
        lines = ("\n" if SHOWN_ONCE.match(line) else line for line in text.splitlines(keepends=True))
        at.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")

    def look(self) -> list[str]:
        """Search; one line for each finding."""
        for process in self.processes:
            self.keep(f"process {process.process.pid}", "".join(process.output))
        return [] if self.directory is None else search(self.directory, self.said)


def search(directory: Path, said: set[str]) -> list[str]:
    """
    Find keys, bearer tokens and any of these words in the files below a directory.

    Returns:
        `file:line:what` for each, as grep says it.
    """
    words = "\n".join(sorted(said))
    keys = f"{KEY}|{BEARER_TOKEN}"
    return [*_grep(directory, "-F", "-f", "-", words=words), *_grep(directory, "-E", "-e", keys)]


def _grep(directory: Path, *what: str, words: str = "") -> list[str]:
    command = ["grep", "-r", "-a", "-n", "-o", "-s", "-D", "skip", *(f"--exclude={name}" for name in EXEMPT)]
    # A process of its own, not `subprocess.run`, which this plugin has taken over.
    grep = subprocess.Popen(
        [*command, *what, "."],
        cwd=directory,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    found, _ = grep.communicate(words.encode())
    return found.decode(errors="replace").splitlines()


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _watch_clients(leaks: Leaks, patch: pytest.MonkeyPatch) -> None:
    """Hear every body that goes out through the two HTTP libraries of this process."""

    def hear_httpx(request: httpx.Request) -> None:
        with contextlib.suppress(httpx.RequestNotRead):
            leaks.hear(request.content)

    send, send_async, ask = httpx.Client.send, httpx.AsyncClient.send, aiohttp.ClientSession._request

    @functools.wraps(send)
    def sending(client: httpx.Client, request: httpx.Request, **more: Any) -> httpx.Response:
        hear_httpx(request)
        return send(client, request, **more)

    @functools.wraps(send_async)
    async def sending_async(client: httpx.AsyncClient, request: httpx.Request, **more: Any) -> httpx.Response:
        hear_httpx(request)
        return await send_async(client, request, **more)

    @functools.wraps(ask)
    async def asking(session: aiohttp.ClientSession, *where: Any, **more: Any) -> aiohttp.ClientResponse:
        leaks.hear(more.get("json") or more.get("data"))
        return await ask(session, *where, **more)

    patch.setattr(httpx.Client, "send", sending)
    patch.setattr(httpx.AsyncClient, "send", sending_async)
    patch.setattr(aiohttp.ClientSession, "_request", asking)


def _watch_processes(leaks: Leaks, patch: pytest.MonkeyPatch) -> None:
    """Keep what appliance processes and commands of this run print."""
    start, finish = ApplianceProcess.__init__, subprocess.Popen.communicate

    @functools.wraps(start)
    def starting(process: ApplianceProcess, *arguments: Any, **more: Any) -> None:
        leaks.processes.append(process)
        start(process, *arguments, **more)

    @functools.wraps(finish)
    def finishing(process: subprocess.Popen, *arguments: Any, **more: Any) -> tuple[Any, Any]:
        printed = finish(process, *arguments, **more)
        if shows := _command(process.args):
            for text in printed if shows != "key" else printed[1:]:
                leaks.keep(f"appliance {shows}", text if isinstance(text, str) else (text or b"").decode())
        return printed

    patch.setattr(ApplianceProcess, "__init__", starting)
    patch.setattr(subprocess.Popen, "communicate", finishing)


def _command(arguments: Any) -> str | None:
    """The first word after `python -m appliance`, or None for another command."""
    words = [str(word) for word in arguments] if isinstance(arguments, list | tuple) else []
    return words[3] if words[1:3] == ["-m", "appliance"] and words[0] == sys.executable else None


class Plugin:
    """The hooks."""

    def __init__(self) -> None:
        self.leaks, self._patch = Leaks(), pytest.MonkeyPatch()
        self.elsewhere: list[str] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Listen from the first test on."""
        self.leaks.directory = session.config._tmp_path_factory.getbasetemp()
        _watch_clients(self.leaks, self._patch)
        _watch_processes(self.leaks, self._patch)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Search before the directory may be removed; a finding fails the run."""
        self._patch.undo()
        self.leaks.findings = list(dict.fromkeys([*self.elsewhere, *self.leaks.look()]))
        if self.leaks.findings:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

        if (report := getattr(session.config, "workeroutput", None)) is not None:
            report["leaks"] = self.leaks.findings

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what one of several test processes found in its own directory."""
        found = getattr(node, "workeroutput", {}).get("leaks", ())
        self.elsewhere.extend(f"./popen-{node.gateway.id}{line[1:]}" for line in found)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was found where."""
        found = self.leaks.findings
        if found:
            terminalreporter.section("keys or prompts that were written down", red=True)
            for line in found[:LARGEST_REPORT]:
                terminalreporter.write_line(f"{self.leaks.directory}/{line[:300]}")
            terminalreporter.write_line(f"{len(found)} findings; what may not be kept: tests/leaks.py")


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the run."""
    config.pluginmanager.register(Plugin(), "leaks")


@pytest.fixture(scope="session")
def wrote(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Add what a part of the appliance in this process wrote to what is searched at the end."""
    plugin = pytestconfig.pluginmanager.get_plugin("leaks")
    assert isinstance(plugin, Plugin)
    return plugin.leaks.keep
