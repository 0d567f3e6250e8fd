"""
`appliance` under strace: `python -m tests.integration.traced ROLE ...`, the trace in the file `TRACED_TO`.

The tracer is detached (`-D`), so that the parent of this process signals and awaits the appliance.
"""

import os
import sys

CALLS = "connect,sendto,sendmsg,sendmmsg"
"""System calls that name an address to send to."""

if __name__ == "__main__":
    tracing = ["strace", "-D", "-f", "-Y", "--seccomp-bpf", "-q", "-s", "0", "-e", f"trace={CALLS}"]
    tracing += ["-e", "signal=none", "-o", os.environ["TRACED_TO"]]
    os.execvp("strace", [*tracing, sys.executable, "-m", "appliance", *sys.argv[1:]])
