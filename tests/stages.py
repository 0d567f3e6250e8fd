"""Run stages one after the other, also after failures, then print the time and result of each."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence


def main(stages: Sequence[str]) -> int:
    rows = []
    with tempfile.TemporaryDirectory() as passed:
        environment = {**os.environ, "TESTS_PASSED": passed}  # read by tests/conftest.py and `make promises`
        for stage in stages:
            began, used = time.monotonic(), _cpu_seconds()
            targets = stage.split("+")
            command = ["make", "--no-print-directory", f"--jobs={len(targets)}", *targets]
            code = subprocess.run(command, env=environment, check=False).returncode
            rows.append((stage, code, time.monotonic() - began, _cpu_seconds() - used))
    failed = any(code for _, code, _, _ in rows)
    rows.append(("all", failed, sum(row[2] for row in rows), sum(row[3] for row in rows)))
    lines = [f"\n{'stage':<24}{'minutes':>8}{'CPU seconds':>13}"]
    for stage, code, seconds, cpu in rows:
        lines.append(f"{stage:<24}{seconds / 60:>8.1f}{cpu:>13.0f}  {'FAILED' if code else 'passed'}")
    sys.stdout.write("\n".join([*lines, ""]))
    return int(failed)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
