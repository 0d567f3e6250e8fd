"""The examples of `docs/how-to/call-the-api.md`, run as the page shows them."""

import re
import subprocess

import pytest

from tests.clients.conftest import CHAT_MODEL, Served
from tests.clients.pins import ENVIRONMENTS, HERE, is_installed
from tests.clients.test_clients import environment

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("clients")]

PAGE = HERE.parents[1] / "docs" / "how-to" / "call-the-api.md"
BLOCKS = re.compile(r"^```(sh|python|js)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    (language, code)
    for language, code in BLOCKS.findall(PAGE.read_text(encoding="utf-8"))
    if not code.startswith("export")
]


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=[f"{n}-{e[0]}" for n, e in enumerate(EXAMPLES)])
def test_an_example_answers_as_it_stands(language, code, served: Served, tmp_path):
    name = "node" if language == "js" else "current"
    if language != "sh" and not is_installed(name):
        pytest.skip(f"THE ENVIRONMENT {name} IS NOT INSTALLED: `make clients` says why")
    if language == "sh":
        command = ["sh", "-euc", code]
    else:
        script = tmp_path / ("example.mjs" if language == "js" else "example.py")
        script.write_text(code, encoding="utf-8")
        (tmp_path / "node_modules").symlink_to(HERE / "node" / "node_modules")
        command = [str(ENVIRONMENTS / name / "bin" / ("node" if language == "js" else "python")), str(script)]
    done = subprocess.run(
        command,
        env=environment(served.url, served, tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    if language == "sh":
        assert f'"{CHAT_MODEL}"' in done.stdout
    else:
        assert done.stdout.strip()
    if "include_usage" in code:
        assert re.search(r"\n\d+ tokens\n$", done.stdout)
    if "json_schema" in code:
        assert done.stdout.strip() in {"python", "rust"}
