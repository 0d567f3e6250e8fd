"""No test is left out of the run without notice, and tests of one group share a process."""

import ast
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import PASSED

TESTS = Path(__file__).parent.parent
INDENTED_TEST = re.compile(r"^ +(?:async )?def test_", re.MULTILINE)
TEST = re.compile(r"^ *(?:async )?def test_", re.MULTILINE)


def test_every_test_stands_where_pytest_collects_it():
    """A test in a file or a class of another name would never run."""
    files = [path for path in TESTS.rglob("*.py") if "node_modules" not in path.parts]
    left_out = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        if not path.name.startswith("test_"):
            left_out += [f"{path}: {found[0]}" for found in TEST.finditer(text)]
        elif INDENTED_TEST.search(text):
            left_out += [f"{path}: {name}" for name in _nested(ast.parse(text))]
    assert left_out == []


def _nested(tree: ast.Module) -> Iterator[str]:
    """Names of tests inside anything but a class `Test…` at the top level."""
    collected = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
    ]
    for holder in ast.walk(tree):
        for node in ast.iter_child_nodes(holder):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            )
            if is_test and holder is not tree and holder not in collected:
                yield node.name


GROUPED = """
import os, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(6))
def test_in_a_group(number):
    with open("processes", "a") as file:
        print(os.getpid(), file=file)
"""


def test_tests_of_one_group_run_in_one_process(tmp_path):
    """Some versions of pytest and pytest-xdist together ignore groups: shared workers would start twice."""
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) == 6
    assert len(set(processes)) == 1


RECORDED = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_passes(number):
    pass

def test_without_parameters():
    pass

def test_fails():
    assert False
"""


def test_the_names_of_passed_tests_are_recorded_once(tmp_path):
    """In the process that distributes the tests, whose reports are of all; without the name of a group."""
    passed, suite = tmp_path / "passed", tmp_path / "suite"
    passed.mkdir(), suite.mkdir()
    (suite / "test_recorded.py").write_text(RECORDED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-n", "2"]
    command += ["--dist", "loadgroup"]
    environment = {**os.environ, PASSED: str(passed), "PYTHONPATH": str(TESTS.parent)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    subprocess.run(command, cwd=suite, check=False, capture_output=True, timeout=60, env=environment)
    names = [line for file in passed.iterdir() for line in file.read_text().splitlines()]
    passes = ["test_recorded.py::test_passes"] * 3
    assert sorted(names) == [*passes, "test_recorded.py::test_without_parameters"]


async def test_an_unclosed_transport_tells_where_it_was_opened():
    """Its warning comes when its memory is collected, in any later test."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    async with server:
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        text = repr(transport)
        transport.close()
    assert "of Protocol, opened in tests/unit/test_collection.py::test_an_unclosed_transport" in text
