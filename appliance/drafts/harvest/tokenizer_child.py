"""
The target's tokenizer and chat template in a process of its own: `python -m ... DIRECTORY`.

    in    one job a line, as JSON (`harvest.rendering`)
    out   first how loading went, then one answer a line

Content comes and goes by pipes only.  Nothing else this process or a library prints goes anywhere,
no error's text is passed on, and it leaves no core file: any of these could hold somebody's words.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from appliance.drafts.harvest.reasons import Skipped
from appliance.drafts.harvest.rendering import Tokenizer, render

NEW_USER_AND_NETWORK = 0x50000000
"""CLONE_NEWUSER and CLONE_NEWNET of unshare(2): a network with nothing in it, without privileges."""


def answer_all(tokenizer: Tokenizer, jobs: Iterable[str], answers: TextIO) -> None:
    """Answer one job after the other until there are no more."""
    for line in jobs:
        try:
            answer = render(tokenizer, json.loads(line))
        except Exception:  # noqa: BLE001 - libraries raise what they like, and may quote the text
            answer = {"skipped": Skipped.UNREADABLE.value}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(model: str) -> None:
    """Load the tokenizer, say how that went, and answer jobs."""
    # Before the import, which starts threads: a process that has some cannot leave its user namespace.
    ctypes.CDLL(None).unshare(NEW_USER_AND_NETWORK)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        problem = ""
        tokenizer: Any = None
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415

            tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
            tokenizer.encode("appliance")
        except Exception as error:  # noqa: BLE001 - nothing of anybody's was read so far
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        answers.write(json.dumps({"problem": problem}) + "\n")
        answers.flush()
        if tokenizer is not None and not problem:
            sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
            # Whoever asked may be gone.
            with contextlib.suppress(BrokenPipeError):
                answer_all(tokenizer, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1])
