"""
The package index has every locked file, also for a machine without a build of torch for CPUs.
"""

import subprocess
import sys

import pytest

from deploy.lock import CONTENTS, LOCKS, PYTHONS, ROOT, index_environment


def test_index_has_every_locked_file():
    """The project resolves to the locked versions, and each locked hash is that of a file at the index."""
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "lock.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_has_a_wheel_of_each_locked_version(python, tmp_path):
    """Also of PyTorch with CUDA, for a machine that finds no build for CPUs.  It downloads only metadata."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-deps", "--only-binary=:all:"),
            *(f"--python-version={python}", "--python-platform=x86_64-manylinux_2_36", "--target", tmp_path),
            *(f"--requirement={LOCKS / lock}.txt" for lock in CONTENTS),
        ],
        env=index_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
