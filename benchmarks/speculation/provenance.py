"""
Command, hardware, software and commit of a result; part of every file of results.
"""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from demo.machine import cpu_name

COMMIT = "SOURCE_COMMIT"
"""Environment variable that names the commit where the source lies without its repository."""
RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Command, machine, commit, engine and date."""

    command: str
    hardware: str
    commit: str
    """Short; outside a repository what `SOURCE_COMMIT` says, or `unknown`."""
    has_changes: bool
    """Whether files differed from that commit."""
    engine: str
    model: str
    draft: str
    date: str

    @property
    def source(self) -> str:
        """The commit, and whether it is the whole truth."""
        return f"{self.commit} with uncommitted changes" if self.has_changes else self.commit

    @property
    def line(self) -> str:
        """All of it."""
        pair = f"{self.model} with {self.draft}"
        return f"{self.hardware}; {self.engine}; {pair}; commit {self.source}; {self.date}; `{self.command}`"


def provenance_of(command: str, *, model: str, draft: str) -> Provenance:
    """Ask this machine and its repository."""
    return Provenance(
        command=command,
        hardware=hardware(),
        commit=_output("git", "rev-parse", "--short", "HEAD") or os.environ.get(COMMIT, "unknown"),
        has_changes=bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        engine="unknown engine",
        model=model,
        draft=draft,
        date=datetime.now(UTC).date().isoformat(),
    )


def hardware() -> str:
    """Processor, cores, and graphics processors where there are any."""
    processor = f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return f"{len(names)} x {names[0]}, {processor}" if names else processor


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""
