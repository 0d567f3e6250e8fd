"""
The tokenizer process: `python -m ... DIRECTORY`.

    in    one JSON job per line (`harvest.rendering`)
    out   first the result of loading, then one answer per line

Content passes through these pipes only: other output is discarded, error texts are not passed on, and core
dumps are off, because each of them could hold a tenant's text.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from appliance.drafts.harvest.conversation import Skipped
from appliance.drafts.harvest.rendering import TransformersTokenizer, render

NEW_USER_AND_NETWORK = 0x50000000
"""CLONE_NEWUSER and CLONE_NEWNET of unshare(2): an empty network, without privileges."""


def answer_all(tokenizer: TransformersTokenizer, jobs: Iterable[str], answers: TextIO) -> None:
    for line in jobs:
        try:
            answer = render(tokenizer, json.loads(line))
        except Exception:  # noqa: BLE001 - libraries raise anything, and may quote the text
            answer = {"skipped": Skipped.UNREADABLE.value}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(model: str) -> None:
    # Before the import, which starts threads: a threaded process cannot leave its user namespace.
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
        except Exception as error:  # noqa: BLE001 - no content was read so far
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        answers.write(json.dumps({"problem": problem}) + "\n")
        answers.flush()
        if tokenizer is not None and not problem:
            sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
            # The parent may be gone.
            with contextlib.suppress(BrokenPipeError):
                answer_all(tokenizer, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1])
