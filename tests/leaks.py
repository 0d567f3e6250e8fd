"""
A pytest plugin that searches everything the appliance wrote during a run for what it must not store.

While tests run it records each prompt their HTTP clients send and each completion they receive, and
collects what appliance processes and commands print; fixtures add the operator logs and metrics of
gateways in the test's own process.  Data directories, worker logs, spools and exports lie below pytest's
temporary directory; a fixture that writes elsewhere calls `look_in` before it removes its directory.
When the run is over, `grep` searches all of it for those texts and for anything that has the form of an
API key or a bearer token.  What it finds is reported as failed test cases, one for each test that sent
or received the text.

With pytest-xdist each process records, and the controller searches all of their directories at the end,
so a process that crashes takes with it only what it had collected in memory.  A child process of a test
that sends requests itself calls `watch_clients`; it inherits the record's path in its environment.

A key may stand where it is made to be shown: in the files of a first start's keys and in what
`appliance key` prints.
"""

import contextlib
import functools
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import pytest
from typer.testing import CliRunner

from demo.process import ApplianceProcess

PROMPT = "what ails my neighbour in the third house, doctor"
"""The prompt of shared request bodies; a clear sign of a leak."""
COMPLETION = "that_is_between_her_and_me_alone"
"""A part of the answers of the scripted worker."""
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
"""Members of a body that contain prompts or completions."""
ANSWER = {"choices", "output", "content", "delta", "response"}
"""Members of an answer, or of an event of a stream, that hold a completion."""
COMPLETED = {"content", "text", "delta", "reasoning", "reasoning_content", "thinking", "refusal"} | {
    "arguments",
    "partial_json",
}
"""Members below them whose text the model wrote."""
PLAIN = re.compile(r"[ !#-\[\]-~]{24,}")
"""A run of text that is spelt the same in JSON, YAML, SQL and a traceback."""
PIECE = 48
"""Characters of a run that are searched for; short, so that a copy that was cut is found too."""
DISTINCT = 10
"""Fewer different characters than this are padding, which is also found where nothing leaked."""
LARGEST_BODY = 2**20
RECORD = "this-run.leaks"
"""The file in a process's directory with its texts, and the findings elsewhere."""
EXEMPT = ("admin.key", "demo.key", "*.kept-by-the-client", "*.py", RECORD)
"""Files and directories that may hold what is searched for: a first start's keys, mode 0600; what a test or
its client wrote as a client; copies of the sources, since some prompts of the tests are code; the
plugin's own."""
LARGEST_REPORT = 20
VARIABLE = "RECORD_OF_LEAKS"
"""Environment variable with the record's path, for child processes."""
SHARED, SECRET = "the shared prompt or answer", "a key or token"
"""Names of the cases that belong to no one test."""


class Finding(NamedTuple):
    """One text where it must not be."""

    place: str
    """`file:line`."""
    text: str


@dataclass(slots=True)
class Leaks:
    """The texts of this process, and its files."""

    directory: Path | None = None
    """Pytest's temporary directory: everything below it is searched."""
    record: Path | None = None
    said: dict[str, str] = field(default_factory=lambda: dict.fromkeys((PROMPT[:PIECE], COMPLETION), SHARED))
    """Pieces of prompts and completions, with the first test that sent or received each."""
    processes: list[ApplianceProcess] = field(default_factory=list)
    _kept: int = 0

    def hear(self, body: Any) -> None:
        """Record the prompt of a request with a body."""
        content = _parse(body)
        for name in CONVERSATION if isinstance(content, dict) else ():
            for text in _strings(content.get(name)):
                self._say(text)

    def hear_answer(self, body: bytes | bytearray | str) -> None:
        """Record a completion, if this is JSON or a stream of events that holds one."""
        texts: dict[str, list[str]] = {}
        for event in _events(body):
            if isinstance(event, dict) and ANSWER & event.keys():
                where = [event.get(name) for name in ("type", "index", "output_index")]
                for path, text in _completed(event, str(where)):
                    texts.setdefault(path, []).append(text)
        for parts in texts.values():
            self._say("".join(parts))

    def keep(self, origin: str, text: str) -> None:
        """Add what a part of the appliance printed to what is searched."""
        if self.directory is None:
            return
        self._kept += 1
        at = self.directory / "collected" / f"{self._kept:05}-{re.sub(r'[^a-z0-9.-]+', '-', origin.lower())}"
        at.parent.mkdir(exist_ok=True)
        at.write_text(text, encoding="utf-8", errors="surrogateescape")

    def keep_processes(self) -> None:
        """Keep what the appliance processes of this process's tests printed."""
        for process in self.processes:
            self.keep(f"process {process.process.pid}", "".join(process.output))

    def look_in(self, directory: Path) -> None:
        """Search a directory that is about to be removed; findings are reported at the end of the run."""
        if self.record is not None:
            said, _ = read_records([self.record])
            for place, text in search(directory, {**said, **self.said}):
                self._write("found", f"{directory}/{place}", text)

    def _say(self, text: str) -> None:
        runs = [run for run in PLAIN.findall(text) if len(set(run[:PIECE])) >= DISTINCT]
        # The first, since a copy is cut at its end, and the longest, which is the least likely by chance.
        for run in {*runs[:1], *sorted(runs, key=len)[-1:]}:
            piece = run[:PIECE]
            if piece not in self.said:
                self.said[piece] = os.environ.get("PYTEST_CURRENT_TEST", "no test ()").rpartition(" ")[0]
                self._write("said", piece, self.said[piece])

    def _write(self, *what: str) -> None:
        if self.record is not None:
            with self.record.open("a", encoding="utf-8") as record:
                record.write(json.dumps(what) + "\n")


LEAKS = Leaks(record=Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None)
"""Those of this process: a test process, or a child of one."""
hear, hear_answer, keep, look_in = LEAKS.hear, LEAKS.hear_answer, LEAKS.keep, LEAKS.look_in


def read_records(records: Iterable[Path]) -> tuple[dict[str, str], list[Finding]]:
    """The texts, with the first test that sent each, and findings in removed directories."""
    said: dict[str, str] = {}
    found: list[Finding] = []
    for record in records:
        for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
            kind, *what = json.loads(line)
            if kind == "said":
                said.setdefault(*what)
            else:
                found.append(Finding(*what))
    return said, found


def search(directory: Path, said: Iterable[str]) -> list[Finding]:
    """Find keys, bearer tokens and any of these words in the files below a directory."""
    greps = (_grep(directory, "-F", "-f", "-"), _grep(directory, "-E", "-e", f"{KEY}|{BEARER_TOKEN}"))
    printed = ""
    for grep, words in zip(greps, ("\n".join(sorted(said)), ""), strict=True):
        found, wrong = grep.communicate(words.encode())
        if wrong:
            raise RuntimeError(wrong.decode())
        printed += found.decode(errors="replace")
    lines = dict.fromkeys(re.findall(r"^(.+)\0(\d+):(.*)$", printed, re.MULTILINE))
    return [Finding(f"{file}:{number}", text) for file, number, text in lines]


def _grep(directory: Path, *what: str) -> subprocess.Popen[bytes]:
    # -s: a file may be removed meanwhile.
    command = ["grep", "-r", "-a", "-n", "-o", "-s", "-Z", "-D", "skip", *what]
    return subprocess.Popen(
        [*command, *(f"--{kind}={name}" for name in EXEMPT for kind in ("exclude", "exclude-dir")), "."],
        cwd=directory,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _parse(body: Any) -> Any:
    """The content of a JSON body; what is parsed already stays as it is."""
    if not isinstance(body, str | bytes | bytearray):
        return body
    try:
        return json.loads(body) if len(body) <= LARGEST_BODY else None
    except (ValueError, RecursionError):
        return None


def _events(body: bytes | bytearray | str) -> Iterator[Any]:
    text = body if isinstance(body, str) else body.decode(errors="replace")
    if text.startswith(("data:", "event:", ":")):
        yield from (_parse(line[5:]) for line in text.splitlines() if line.startswith("data:"))
    else:
        yield _parse(text)


def _completed(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Texts of a completion, with where they belong: the same in each event that continues a text."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            index = inner.get("index", number) if isinstance(inner, dict) else number
            yield from _completed(inner, f"{path}.{index}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, str) and name in COMPLETED:
                yield f"{path}.{name}", inner
            else:
                yield from _completed(inner, f"{path}.{name}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def watch_clients(leaks: Leaks, patch: pytest.MonkeyPatch) -> None:
    """Record the traffic of the HTTP libraries of this process."""
    _watch_httpx(leaks, patch)
    _watch_aiohttp(leaks, patch)
    _watch_standard_library(leaks, patch)


def _watch_httpx(leaks: Leaks, patch: pytest.MonkeyPatch) -> None:
    send, send_async = httpx.Client.send, httpx.AsyncClient.send
    read, read_async = httpx.Response.iter_bytes, httpx.Response.aiter_bytes

    def hear_request(request: httpx.Request) -> None:
        with contextlib.suppress(httpx.RequestNotRead):
            leaks.hear(request.content)

    @functools.wraps(send)
    def sending(client: httpx.Client, request: httpx.Request, **more: Any) -> httpx.Response:
        hear_request(request)
        return send(client, request, **more)

    @functools.wraps(send_async)
    async def sending_async(client: httpx.AsyncClient, request: httpx.Request, **more: Any) -> httpx.Response:
        hear_request(request)
        return await send_async(client, request, **more)

    # Every way to read a response goes through these two.
    @functools.wraps(read)
    def reading(response: httpx.Response, *size: Any, **more: Any) -> Iterator[bytes]:
        answer = _Answer(leaks)
        with contextlib.closing(answer), contextlib.closing(read(response, *size, **more)) as pieces:
            for piece in pieces:
                answer.add(piece)
                yield piece

    @functools.wraps(read_async)
    async def reading_async(response: httpx.Response, *size: Any, **more: Any) -> AsyncIterator[bytes]:
        answer = _Answer(leaks)
        with contextlib.closing(answer):
            async with contextlib.aclosing(read_async(response, *size, **more)) as pieces:
                async for piece in pieces:
                    answer.add(piece)
                    yield piece

    patch.setattr(httpx.Client, "send", sending)
    patch.setattr(httpx.AsyncClient, "send", sending_async)
    patch.setattr(httpx.Response, "iter_bytes", reading)
    patch.setattr(httpx.Response, "aiter_bytes", reading_async)


def _watch_aiohttp(leaks: Leaks, patch: pytest.MonkeyPatch) -> None:
    ask, read = aiohttp.ClientSession._request, aiohttp.ClientResponse.read

    @functools.wraps(ask)
    async def asking(session: aiohttp.ClientSession, *where: Any, **more: Any) -> aiohttp.ClientResponse:
        leaks.hear(more.get("json") or more.get("data"))
        return await ask(session, *where, **more)

    @functools.wraps(read)
    async def reading(response: aiohttp.ClientResponse) -> bytes:
        body = await read(response)
        leaks.hear_answer(body)
        return body

    patch.setattr(aiohttp.ClientSession, "_request", asking)
    patch.setattr(aiohttp.ClientResponse, "read", reading)


def _watch_standard_library(leaks: Leaks, patch: pytest.MonkeyPatch) -> None:
    """`urllib.request`, `requests` and `urllib3` send through `http.client` too."""
    client, answer = http.client.HTTPConnection, http.client.HTTPResponse
    send, read, read_line, close = client.send, answer.read, answer.readline, answer.close

    @functools.wraps(send)
    def sending(connection: http.client.HTTPConnection, data: Any) -> None:
        leaks.hear(data)
        send(connection, data)

    def add(response: http.client.HTTPResponse, piece: bytes) -> bytes:
        vars(response).setdefault("heard", _Answer(leaks)).add(piece)
        return piece

    @functools.wraps(read)
    def reading(response: http.client.HTTPResponse, amt: int | None = None) -> bytes:
        # `readline` reads some bytes at a time.
        return add(response, read(response)) if amt is None else read(response, amt)

    @functools.wraps(read_line)
    def reading_line(response: http.client.HTTPResponse, limit: int = -1) -> bytes:
        return add(response, read_line(response, limit))

    @functools.wraps(close)
    def closing(response: http.client.HTTPResponse) -> None:
        if (heard := vars(response).pop("heard", None)) is not None:
            heard.close()
        close(response)

    patch.setattr(client, "send", sending)
    patch.setattr(answer, "read", reading)
    patch.setattr(answer, "readline", reading_line)
    patch.setattr(answer, "close", closing)


class _Answer:
    """The body of one response, recorded as a whole once it is closed."""

    def __init__(self, leaks: Leaks) -> None:
        self._leaks, self._body = leaks, bytearray()

    def add(self, piece: bytes) -> None:
        if len(self._body) <= LARGEST_BODY:
            self._body += piece

    def close(self) -> None:
        self._leaks.hear_answer(self._body)


def _watch_processes(leaks: Leaks, patch: pytest.MonkeyPatch) -> None:
    """Keep what appliance processes and commands of this run print."""
    start, finish, invoke = ApplianceProcess.__init__, subprocess.Popen.communicate, CliRunner.invoke

    @functools.wraps(start)
    def starting(process: ApplianceProcess, *arguments: Any, **more: Any) -> None:
        leaks.processes.append(process)
        start(process, *arguments, **more)

    @functools.wraps(finish)
    def finishing(process: subprocess.Popen, *arguments: Any, **more: Any) -> tuple[Any, Any]:
        printed = finish(process, *arguments, **more)
        if words := _command(process.args):
            for text in printed[_shows(words) :]:
                leaks.keep(f"appliance {words[0]}", text if isinstance(text, str) else (text or b"").decode())
        return printed

    @functools.wraps(invoke)
    def invoking(runner: CliRunner, app: Any, args: Any = None, **more: Any) -> Any:
        result = invoke(runner, app, args, **more)
        words = args.split() if isinstance(args, str) else [*(args or ()), "without arguments"]
        leaks.keep(f"appliance {words[0]}", result.stderr if _shows(words) else result.output)
        return result

    patch.setattr(CliRunner, "invoke", invoking)
    patch.setattr(ApplianceProcess, "__init__", starting)
    patch.setattr(subprocess.Popen, "communicate", finishing)


def _shows(words: Sequence[str]) -> bool:
    """Whether a command prints, to its standard output, a key or content as it is made to."""
    return words[0] == "key" or [*words[:2]] == ["audit", "open"]


def _command(arguments: Any) -> list[str]:
    """The words after `python -m appliance`; none for another command."""
    words = [str(word) for word in arguments] if isinstance(arguments, list | tuple) else []
    return words[3:] if words[1:3] == ["-m", "appliance"] and words[0] == sys.executable else []


class Plugin:
    """The hooks."""

    def __init__(self) -> None:
        self.leaks, self._patch = LEAKS, pytest.MonkeyPatch()
        self._crashed: list[str] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Record from the first test on."""
        self.leaks.directory = session.config._tmp_path_factory.getbasetemp()
        self.leaks.record = self.leaks.directory / RECORD
        self._patch.setenv(VARIABLE, str(self.leaks.record))
        watch_clients(self.leaks, self._patch)
        _watch_processes(self.leaks, self._patch)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Remember a test process that crashed."""
        if error:
            self._crashed.append(node.gateway.id)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Search before the directory may be removed, and report before reports are written."""
        self._patch.undo()
        self.leaks.keep_processes()
        if hasattr(session.config, "workerinput"):
            return
        for name, text in self._cases():
            place = __name__.replace(".", "/") + ".py"
            session.config.hook.pytest_runtest_logreport(
                report=pytest.TestReport(
                    nodeid=f"{place}::test_nothing_is_written[{name}]",
                    location=(place, None, f"test_nothing_is_written[{name}]"),
                    keywords={},
                    outcome="failed",
                    longrepr=text,
                    when="call",
                )
            )
            if session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _cases(self) -> Iterator[tuple[str, str]]:
        """Name and report of each failed case."""
        directory = self.leaks.directory
        assert directory is not None
        said, elsewhere = read_records([directory / RECORD, *sorted(directory.glob(f"popen-*/{RECORD}"))])
        said = {**said, **self.leaks.said}
        cases: dict[str, list[Finding]] = {}
        for finding in (*elsewhere, *search(directory, said)):
            cases.setdefault(said.get(finding.text, SECRET), []).append(finding)
        for name, found in cases.items():
            lines = [f"{place}: {text[:300]}" for place, text in found[:LARGEST_REPORT]]
            yield (
                name,
                "\n".join(
                    [f"{len(found)} findings below {directory}; what may not be kept: {__name__}", *lines]
                ),
            )
        for name in self._crashed:
            yield name, f"{name} crashed: what its appliance processes printed is lost, and was not searched"


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the run."""
    config.pluginmanager.register(Plugin(), "leaks")


@pytest.fixture(scope="session")
def wrote() -> Callable[[str, str], None]:
    """Add what a part of the appliance in this process wrote to what is searched at the end."""
    return LEAKS.keep
