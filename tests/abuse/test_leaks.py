"""
Promises of `tests.leaks`: the search at the end of a run finds what was written where it must not be.

Whatever these tests plant lies outside of the directory that is searched when they are over.
"""

import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from appliance.tenancy import make_key
from tests import leaks
from tests.leaks import BEARER_TOKEN, KEY, PROMPT, Leaks, search

KEY_TEXT, _ = make_key(bytes(range(37)))
SAID = "Mrs Ωmega has had a cough since the second week of May"
PIECE = "mega has had a cough since the second week of May"


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="appliance-leaks-") as directory:
        yield Path(directory)


def test_a_key_in_a_log_is_found_with_file_and_line(elsewhere: Path):
    """By its form: nobody has to know the key."""
    (elsewhere / "data").mkdir()
    (elsewhere / "data" / "worker.log").write_text(f"started\nserving {KEY_TEXT}, ready\n")
    assert search(elsewhere, {PROMPT}) == [f"./data/worker.log:2:{KEY_TEXT}"]


def test_a_bearer_token_is_found_by_its_form(elsewhere: Path):
    """As it stands in an Authorization header."""
    token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkb2N0b3IifQ.c2lnbmF0dXJlLW9mLWl0"
    (elsewhere / "log").write_text(f"\n\nBearer {token}")
    assert search(elsewhere, {PROMPT}) == [f"./log:3:{token}"]


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
    assert found.startswith("./audit.db:")
    assert found.endswith(PIECE)


def test_the_admin_keys_file_may_hold_a_key(elsewhere: Path):
    """It is made for it; one of another name is not."""
    (elsewhere / "admin.key").write_text(KEY_TEXT)
    assert search(elsewhere, {PROMPT}) == []
    (elsewhere / "admin.key.bak").write_text(KEY_TEXT)
    assert search(elsewhere, {PROMPT}) == [f"./admin.key.bak:1:{KEY_TEXT}"]


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
def test_what_is_no_conversation_is_not_taken_for_one(body):
    """Names of models, padding and a word or two are found where nothing leaked."""
    heard = Leaks()
    heard.hear(body)
    assert heard.said == {leaks.PROMPT, leaks.COMPLETION}


def test_what_clients_of_this_run_say_is_heard(request: pytest.FixtureRequest):
    """The plugin listens to the HTTP libraries the tests use; nobody has to tell it."""
    plugin = request.config.pluginmanager.get_plugin("leaks")
    said = "this was said by way of a client and nowhere else"
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
        client.post("http://localhost/", json={"prompt": [said]})
    assert said in plugin.leaks.said


def test_what_a_command_prints_is_kept(request: pytest.FixtureRequest):
    """Every `python -m appliance` of the run, whichever test started it."""
    subprocess.run([sys.executable, "-m", "appliance", "version"], capture_output=True, check=True)
    collected = request.config.pluginmanager.get_plugin("leaks").leaks.directory / "collected"
    assert any("appliance-version" in path.name and path.read_text() for path in collected.iterdir())


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["in one process", "in several"])
def test_a_run_in_which_something_leaked_fails_and_says_where(elsewhere: Path, processes: tuple[str, ...]):
    """Every test of it passed, and all the same it is a failure; each process knows what its tests said."""
    said = "whoever says this says it in the process of one test alone"
    (elsewhere / "test_it.py").write_text(f"""
import httpx

def test_it(tmp_path):
    (tmp_path / "operator.log").write_text("asked: {PROMPT}")

def test_another(tmp_path):
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
        client.post("http://localhost/", json={{"prompt": "{said}"}})
    (tmp_path / "audit.log").write_text("{said}")
""")
    arguments = ["-q", "-p", "tests.leaks", "-p", "no:cacheprovider", f"--basetemp={elsewhere / 'run'}"]
    arguments += processes
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "--rootdir", elsewhere, elsewhere / "test_it.py"],
        cwd=Path(leaks.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert f"operator.log:1:{PROMPT}" in done.stdout
    assert f"audit.log:1:{said}" in done.stdout
    assert "2 findings" in done.stdout
    assert done.returncode == 1


def test_keys_and_tokens_have_the_form_that_is_searched_for():
    """Were the form of keys changed, this would say that the search looks for the old one."""
    assert subprocess.run(["grep", "-E", f"^{KEY}$"], input=KEY_TEXT.encode(), check=False).returncode == 0
    assert "eyJ" in BEARER_TOKEN
