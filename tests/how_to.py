"""
Runs the commands of a how-to page verbatim.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
SECONDS = 300


def block(page: str, title: str) -> str:
    """The shell commands of a page whose first line is the comment `# title`."""
    text = (PAGES / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```sh\n# {re.escape(title)}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found


def run_block(page: str, title: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run them in one shell, which ends at the first that fails; this environment's commands come first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-euc", block(page, title)],
        env={**os.environ, "PATH": path, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
