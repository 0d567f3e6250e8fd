"""
The search at the end of a run finds what was written where it must not be.

These tests write their leaks outside of the directory that is searched when they are over.
"""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from xml.etree import ElementTree as ET

import httpx
import pytest

from appliance.tenancy import make_key
from tests import leaks
from tests.leaks import BEARER_TOKEN, KEY, PROMPT, SECRET, SHARED, VARIABLE, Leaks, read_records, search

ROOT = Path(leaks.__file__).parents[1]
KEY_TEXT, _ = make_key(bytes(range(37)))
SAID = "Mrs Ωmega has had a cough since the second week of May, and her mother thinks that it is the damp"
PIECE = "mega has had a cough since the second week of Ma"
ANSWERED = "a spoonful of honey at night and a window that closes"


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="appliance-leaks-") as directory:
        yield Path(directory)


def test_a_key_in_a_log_is_found_with_file_and_line(elsewhere: Path):
    """By its form, without knowing the key."""
    (elsewhere / "data").mkdir()
    (elsewhere / "data" / "worker.log").write_text(f"started\nserving {KEY_TEXT}, ready\n")
    assert search(elsewhere, {PROMPT}) == [("./data/worker.log:2", KEY_TEXT)]


def test_a_bearer_token_is_found_by_its_form(elsewhere: Path):
    """As in an Authorization header."""
    token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkb2N0b3IifQ.c2lnbmF0dXJlLW9mLWl0"
    (elsewhere / "log").write_text(f"\n\nBearer {token}")
    assert search(elsewhere, {PROMPT}) == [("./log:3", token)]


def test_a_prompt_in_a_database_is_found(elsewhere: Path):
    """Also where it is part of a larger value, escaped as JSON."""
    database = sqlite3.connect(elsewhere / "audit.db")
    database.execute("create table entries (entry text)")
    database.execute("insert into entries values (?)", [json.dumps({"model": "m", "detail": SAID})])
    database.commit()
    database.close()
    heard = Leaks()
    heard.hear(json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": SAID}]}]}))
    (found,) = search(elsewhere, heard.said)
    assert found.place.startswith("./audit.db:")
    assert found.text == PIECE


@pytest.mark.parametrize("kept", [60, 100])
def test_a_copy_that_was_cut_is_found(elsewhere: Path, kept: int):
    """A log line that ends in the middle of the prompt; its longest run of plain text comes later."""
    prompt = f'{SAID[6:]}: "{ANSWERED * 3}"'
    heard = Leaks()
    heard.hear({"prompt": prompt})
    (elsewhere / "log").write_text(f"asked {prompt[:kept]}...")
    assert [found.text for found in search(elsewhere, heard.said)] == [prompt[:48]]


def test_the_admin_keys_file_may_hold_a_key(elsewhere: Path):
    """A file of another name may not."""
    (elsewhere / "admin.key").write_text(KEY_TEXT)
    assert search(elsewhere, {PROMPT}) == []
    (elsewhere / "admin.key.bak").write_text(KEY_TEXT)
    assert search(elsewhere, {PROMPT}) == [("./admin.key.bak:1", KEY_TEXT)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        None,
        3,
        {"model": PIECE},
        {"messages": [{"content": "short"}]},
        {"prompt": "x" * 500},
    ],
    ids=repr,
)
def test_other_traffic_is_not_recorded_as_conversation(body):
    """Names of models, padding and a word or two are found where nothing leaked."""
    heard = Leaks()
    heard.hear(body)
    assert heard.said == Leaks().said


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWERED}}]}),
        json.dumps({"output": [{"type": "message", "content": [{"type": "output_text", "text": ANSWERED}]}]}),
        "".join(
            f"data: {json.dumps({'choices': [{'index': number % 2, 'text': text}]})}\n\n"
            for number, text in enumerate(piece for word in ANSWERED.split() for piece in (f"{word} ", "x"))
        )
        + "data: [DONE]\n\n",
        "".join(
            "event: content_block_delta\n"
            f"data: {json.dumps({'type': 'content_block_delta', 'index': 0, 'delta': {'text': text}})}\n\n"
            for text in (ANSWERED[:7], ANSWERED[7:])
        ),
    ],
    ids=["chat", "response", "stream of two completions", "stream of a message"],
)
def test_completion_is_recorded(answer):
    """Whole or in pieces, in each dialect; nothing else of an answer is."""
    heard = Leaks()
    heard.hear_answer(answer)
    heard.hear_answer(json.dumps({"error": {"message": SAID}}).encode())
    assert heard.said.keys() - Leaks().said.keys() == {ANSWERED[:48]}


def test_traffic_of_client_tests_is_recorded():
    """The plugin patches the HTTP libraries of the tests automatically."""
    said = "this was said by way of a client and nowhere else"
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
        client.post("http://localhost/", json={"prompt": [said]})
    assert "::test_traffic_of_client_tests_is_recorded" in leaks.LEAKS.said[said[:48]]


class Echo(BaseHTTPRequestHandler):
    """Answers with a completion: the prompt, backwards."""

    def do_POST(self) -> None:
        """Answer any path."""
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps({'choices': [{'text': prompt[::-1]}]})}\n\n".encode())

    def log_message(self, *_words: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("by_line", [False, True], ids=["read", "read by line"])
def test_traffic_of_the_standard_library_is_recorded(by_line: bool):
    """`urllib.request`, and everything else based on `http.client`."""
    said = f"said by way of urllib alone {by_line:d}"
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/completions"
        with urllib.request.urlopen(url, json.dumps({"prompt": said}).encode(), timeout=10) as answer:
            received = b"".join(answer) if by_line else answer.read()
    assert said[::-1].encode() in received
    assert {said, said[::-1]} <= leaks.LEAKS.said.keys()


def test_a_child_process_of_a_test_adds_to_its_record(elsewhere: Path):
    """The child's traffic and findings, under the name of the test that started it."""
    (elsewhere / "disk").mkdir()
    (elsewhere / "disk" / "log").write_text(ANSWERED)
    program = f"""
from pathlib import Path
from tests import leaks
leaks.hear({{"prompt": "{ANSWERED}"}})
leaks.look_in(Path("disk"))
"""
    record = elsewhere / "record"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(record)}
    subprocess.run([sys.executable, "-c", program], cwd=elsewhere, env=environment, check=True)
    said, found = read_records([record])
    assert said.keys() == {ANSWERED[:48]}
    assert "::test_a_child_process_of_a_test_adds_to_its_record" in said[ANSWERED[:48]]
    assert found == [("disk/./log:1", ANSWERED[:48])]


def test_what_a_command_prints_is_kept():
    """Every `python -m appliance` of the run, whichever test started it."""
    subprocess.run([sys.executable, "-m", "appliance", "version"], capture_output=True, check=True)
    directory = leaks.LEAKS.directory
    assert directory
    collected = directory / "collected"
    assert any("appliance-version" in path.name and path.read_text() for path in collected.iterdir())


def run(elsewhere: Path, tests: str, *options: str) -> tuple[int, str, dict[str, str]]:
    """Run these tests; returns exit code, output, and each failed case of the XML report."""
    (elsewhere / "test_it.py").write_text(tests)
    arguments = ["-q", "-p", "tests.leaks", "-p", "xdist", "-p", "no:cacheprovider"]
    arguments += [f"--basetemp={elsewhere / 'run'}", f"--junitxml={elsewhere / 'report.xml'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *options, "test_it.py"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    cases = ET.parse(elsewhere / "report.xml").iter("testcase")
    failed = {case.attrib["name"]: failure.text for case in cases for failure in case.iter("failure")}
    return done.returncode, done.stdout + done.stderr, failed


LEAKING = f"""
import os, signal, tempfile
from pathlib import Path
import httpx
from tests import leaks

def test_first(tmp_path):
    (tmp_path / "operator.log").write_text("asked: {PROMPT}")

def test_second(tmp_path):
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
        client.post("http://localhost/", json={{"prompt": "{ANSWERED}"}})

def test_third(tmp_path):
    (tmp_path / "audit.log").write_text("{ANSWERED}")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "server.log").write_text("{KEY_TEXT}")
        leaks.look_in(Path(directory))
"""
CASES = {
    f"test_nothing_is_written[{SHARED}]": f"operator.log:1: {PROMPT[:48]}",
    "test_nothing_is_written[test_it.py::test_second]": f"audit.log:1: {ANSWERED[:48]}",
    f"test_nothing_is_written[{SECRET}]": f"server.log:1: {KEY_TEXT}",
}


@pytest.mark.parametrize(
    "options",
    [(), ("-n", "2"), ("-n", "1", "-x")],
    ids=["in one process", "in several", "ended by a failure"],
)
def test_leak_is_a_failed_test_case(elsewhere: Path, options: tuple[str, ...]):
    """Named for the test that sent the text, wherever it was found; a failing test hides no leak."""
    failing = "\ndef test_fourth():\n    assert False\n"
    status, printed, failed = run(elsewhere, LEAKING + failing, *options)
    assert failed.keys() == {"test_fourth", *CASES}, printed
    for name, found in CASES.items():
        assert f"FAILED tests/leaks.py::{name}" in printed
        assert found in failed[name]
    assert "4 failed, 3 passed" in printed
    assert status in ({1, 2} if "-x" in options else {1})


def test_a_leak_alone_fails_the_run(elsewhere: Path):
    """All of its tests passed."""
    status, printed, failed = run(elsewhere, LEAKING)
    assert status == 1, printed
    assert failed.keys() == CASES.keys()


def test_a_run_that_selects_nothing_is_searched(elsewhere: Path):
    """A leak during collection fails the run like any other."""
    planted = f"\nfrom pathlib import Path\n(leaks.LEAKS.directory / 'log').write_text('{PROMPT}')\n"
    status, printed, failed = run(elsewhere, LEAKING + planted, "-k", "nothing")
    assert status == 1, printed
    assert failed.keys() == {f"test_nothing_is_written[{SHARED}]"}, printed


def test_a_test_process_that_crashes_is_reported_and_searched(elsewhere: Path):
    """With the traffic of its tests until then."""
    crash = "\ndef test_fourth():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    status, printed, failed = run(elsewhere, LEAKING + crash, "-n", "1", "--max-worker-restart=0")
    assert status != 0
    assert failed.keys() >= {"test_nothing_is_written[gw0]", *CASES}, printed


def test_keys_and_tokens_have_the_form_that_is_searched_for():
    """Fails if the form of keys changes and the search does not."""
    assert subprocess.run(["grep", "-E", f"^{KEY}$"], input=KEY_TEXT.encode(), check=False).returncode == 0
    assert "eyJ" in BEARER_TOKEN
