"""Progress is for people at a terminal: nothing of it gets into a pipe or a file."""

import os
import pty
import subprocess
import sys

PROGRAM = """
import sys
from appliance.cli.common.progress import progress_bar
with progress_bar("verifying", in_bytes=True) as count:
    for done in range(1, 4):
        count(done * 2**20, 4 * 2**20)
        print("result", done)
"""
VERIFIER = """
from appliance.audit import verify
verify.SHOW_SECONDS = 0
for each in verify._watched(range(3), 3, "payloads"):
    print("result", each)
"""


def on_a_terminal(program: str = PROGRAM) -> tuple[str, str]:
    """What goes to standard output, a pipe, and to standard error, a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # its other end is closed
        pass
    os.close(ours)
    assert process.stdout is not None
    with process.stdout:
        output = process.stdout.read()
    assert process.wait() == 0
    return output, shown.decode()


def test_terminal_shows_how_much_of_how_much_and_results_stay_apart():
    output, shown = on_a_terminal()
    assert output == "result 1\nresult 2\nresult 3\n"
    assert "verifying" in shown
    assert "/4.0 MiB" in shown


def test_pipe_gets_no_progress():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("result 1\nresult 2\nresult 3\n", "")


def test_verifier_shows_how_much_is_left_and_clears_its_line():
    """It is a file alone, so it has no part of the bar above."""
    output, shown = on_a_terminal(VERIFIER)
    assert output == "result 0\nresult 1\nresult 2\n"
    assert "2 of 3 payloads, 0 s left" in shown
    assert shown.endswith("\r\x1b[K")
    done = subprocess.run([sys.executable, "-c", VERIFIER], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (output, "")
