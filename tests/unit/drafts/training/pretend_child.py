"""
Stands in for the training process: reads its input and behaves as the job's corpus says.
"""

import json
import os
import signal
import sys
import time


def say(**content) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    job = json.loads(sys.stdin.readline())
    behaviour, stopped = job["corpus"], []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    lines = sys.stdin.readlines()
    if not lines or "samples" not in json.loads(lines[-1]):
        say(event="failed", message="the samples are incomplete; nothing was trained")
        sys.exit(1)
    sys.stdout.write("a library prints what it likes\n")
    point = {"elapsed": 1.0, "done": 0.5, "loss": 2.0, "agreement": [0.5], "rate": 0.001}
    for step in range(1, 3):
        say(event="step", step=step, **point)
    sys.stderr.write("the last words\n")
    if behaviour == "fail":
        say(event="failed", message="it cannot be trained")
        sys.exit(1)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "environment":
        say(event="failed", message=json.dumps(dict(os.environ)))
    while behaviour == "wait" and not stopped:
        say(event="step", step=3, **point)
        time.sleep(0.02)
    say(event="stopped" if stopped else "finished", step=3)


if __name__ == "__main__":
    main()
