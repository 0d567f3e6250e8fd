"""
The process that makes the attempts for a gateway: `python -m appliance.sovereignty.egress.child`.

It is started before the gateway raises the Landlock wall, so that its findings concern the network and not
the wall.  It accepts no commands: the first line of its input fixes the plan, and every further line is
only a number to answer.  An attacker in the gateway can make it repeat the check, and nothing else: the
wall also keeps the processes behind it from tracing this one ("Ptrace restrictions" in
https://docs.kernel.org/userspace-api/landlock.html).  It ends with its standard input.
"""

import json
import signal
import sys
from dataclasses import asdict
from typing import TextIO

from appliance.sovereignty.egress.probe import ProbePlan
from appliance.sovereignty.egress.probing import run_probes


def answer(asked: TextIO, answers: TextIO) -> None:
    """Run the plan, the first line, once for each further line; answer with number and result as JSON."""
    plan = ProbePlan.from_json(json.loads(asked.readline()))
    for line in asked:
        made = {"number": int(line), **asdict(run_probes(plan))}
        print(json.dumps(made, separators=(",", ":")), file=answers, flush=True)


if __name__ == "__main__":
    # A terminal and a service manager signal both; the gateway may still need it, and ends it when done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answer(sys.stdin, sys.stdout)
