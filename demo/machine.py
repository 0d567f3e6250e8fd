"""
The machine of a measurement.
"""

import platform
import re
from pathlib import Path


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.machine()
