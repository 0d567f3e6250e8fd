"""
The lock files: hashes everywhere, no index, versions that the project accepts; and where torch comes from.
"""

import importlib.metadata
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.lock import BROKEN, CONTENTS, LOCKS, REPORTS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEXTS = {file.stem: file.read_text(encoding="utf-8") for file in LOCKS.glob("*.txt")}
HASHES = r"    --hash=sha256:[0-9a-f]{64}(?: \\\n    --hash=sha256:[0-9a-f]{64})*\n"
ENTRY = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: ; platform_machine == '\w+')? \\\n" + HASHES)


def locked(*locks):
    """Version of each package in these locks."""
    return {found["name"]: found["version"] for lock in locks for found in ENTRY.finditer(TEXTS[lock])}


@pytest.mark.parametrize("lock", CONTENTS)
def test_a_lock_holds_only_versions_with_hashes(lock):
    """No line names an index or an address, or is without hashes."""
    assert ENTRY.sub("", TEXTS[lock]).splitlines() == [f"# Made by lock.py: {CONTENTS[lock]}."]


def test_a_package_has_one_version_in_all_locks():
    every = locked(*CONTENTS)
    assert set(TEXTS) == set(CONTENTS)
    assert {lock: locked(lock).items() - every.items() for lock in CONTENTS} == {
        lock: set() for lock in CONTENTS
    }


@pytest.mark.parametrize(
    ("requirements", "locks"),
    [
        (PROJECT["build-system"]["requires"], ["build"]),
        (PROJECT["project"]["dependencies"], ["gateway"]),
        (PROJECT["project"]["optional-dependencies"]["cpu"], ["gateway", "cpu", "torch"]),
        (PROJECT["project"]["optional-dependencies"]["gpu"], ["gateway", "gpu"]),
        (PROJECT["project"]["optional-dependencies"]["hsm"], ["gateway", "hsm"]),
        (PROJECT["project"]["optional-dependencies"]["picker"], ["gateway", "picker"]),
        (PROJECT["project"]["optional-dependencies"]["docs"], ["gateway", "docs"]),
        (PROJECT["project"]["optional-dependencies"]["dev"], ["gateway", "dev"]),
    ],
    ids=["build", "gateway", "cpu", "gpu", "hsm", "picker", "docs", "dev"],
)
def test_locked_versions_are_those_that_the_project_accepts(requirements, locks):
    versions = locked(*locks)
    for text in requirements:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


def test_every_dependency_of_an_installed_package_is_locked():
    """uv reads the dependencies of one file of a version; the file installed here may have others."""
    versions = locked("gateway", "cpu", "torch", "docs", "dev", "build", "tools")
    for distribution in importlib.metadata.distributions():
        if canonicalize_name(distribution.name) not in versions:
            continue
        for requirement in map(Requirement, distribution.requires or []):
            name = canonicalize_name(requirement.name)
            if name in BROKEN or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            # The build of torch is the installer's choice.
            assert name == "torch" or requirement.specifier.contains(versions.get(name, "0")), (
                f"{distribution.name} needs {requirement}"
            )


def test_nothing_that_reports_to_the_outside_is_locked():
    """vLLM requires an extra that brings a client of a cloud service, and imports none of it."""
    names = {name for file in LOCKS.glob("*.txt") for name in locked(file.stem)}
    assert "vllm" in names
    assert not names & {*REPORTS, "sentry-sdk", "agent-detector", "detect-installer"}


@pytest.mark.parametrize("found", [0, 1, 2])
def test_torch_comes_from_the_first_place_that_has_it(found):
    """A build for CPUs from the configured index or from PyTorch's; else PyPI's with hashes and a warning."""
    script = """
        root=. asked=0
        say() { echo "said: $*"; }
        pip() { echo "$*"; asked=$((asked + 1)); [ $asked -gt "$1" ]; }
        . deploy/torch.sh
        get_torch pip "$0"
    """
    done = subprocess.run(
        ["/bin/sh", "-euc", script, str(found)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cpu = f"torch=={locked('torch')['torch']}+cpu"
    asked = [
        f"{found} {cpu}",
        f"{found} --index-url https://download.pytorch.org/whl/cpu --timeout 15 --retries 1 {cpu}",
        f"{found} --require-hashes --requirement ./deploy/locks/torch.txt",
    ]
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("said: ")] == asked[: found + 1]
    assert [line for line in lines if "4.5 GB" in line] == lines[2:3]
