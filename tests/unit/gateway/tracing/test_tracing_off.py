"""If tracing is off, its libraries are not loaded."""

import subprocess
import sys

CODE = """
import asyncio, sys
import appliance.cli, appliance.app.run
from appliance.infra.settings import TracingSettings
from appliance.gateway.tracing.tracing_setup import open_tracing

async def main():
    nothing = {"metrics": None, "logger": None, "clock": None, "wall_clock": None}
    async with open_tracing(TracingSettings(), version="", gateway="", **nothing) as tracing:
        assert tracing is None
    print([name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "requests", "google")])

asyncio.run(main())
"""


def test_the_library_is_not_imported():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
