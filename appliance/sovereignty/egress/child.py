"""
The process that makes the attempts for a gateway: `python -m appliance.sovereignty.egress.child`.

It is started before the gateway puts the Landlock wall around itself, so that what it finds is said of the
network and not of the wall.  It takes no orders: what to try is fixed by the first line it reads, and every
further line is only a number to answer.  Whoever takes over a gateway can make it repeat the check, and
nothing else: the wall also keeps those behind it from tracing this process ("Ptrace restrictions" in
https://docs.kernel.org/userspace-api/landlock.html).  It ends when its standard input does.
"""

import json
import signal
import sys
from typing import TextIO

from appliance.sovereignty.egress.probe import Plan
from appliance.sovereignty.egress.probing import run_probes


def answer(asked: TextIO, answers: TextIO) -> None:
    """
    Run the plan once for each line after the first.

    Args:
        asked: a plan as JSON in one line, then one number a line.
        answers: gets the number and what came of it, as JSON, one line each.
    """
    plan = Plan.from_json(json.loads(asked.readline()))
    for line in asked:
        made = {"number": int(line), **run_probes(plan).to_json()}
        print(json.dumps(made, separators=(",", ":")), file=answers, flush=True)


if __name__ == "__main__":
    # A terminal and a service manager signal both; the gateway may still ask, and ends it when done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answer(sys.stdin, sys.stdout)
