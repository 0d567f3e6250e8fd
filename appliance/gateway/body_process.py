"""
Reads large bodies, and lines of batches, in a process of its own.

A thread would not do: `json` holds the interpreter's lock for the whole of a body.  Standard input brings a
line of JSON (what to read, and its length) and the bytes, standard output takes a line of JSON.
Ends with its gateway, which closes the pipe.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO

from appliance.errors import InvalidRequestError
from appliance.gateway.batch.lines import find_request
from appliance.gateway.body import BodyTerms, read_body

NICE = 10
"""Lower priority than the gateway's event loop, which serves everybody."""


def main() -> None:
    # A signal to the process group is the gateway's to handle: it still drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # a sandbox may forbid it
        os.nice(NICE)
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    while line := asked.readline():
        header = json.loads(line)
        body = asked.read(header["length"])
        if len(body) == header["length"]:
            _write(answers, _answer(body, header))


def _answer(data: bytes, header: dict[str, Any]) -> dict[str, Any]:
    try:
        if "endpoint" in header:
            return {"read": asdict(find_request(data, header["endpoint"]))}
        return {"read": read_body(data, BodyTerms.from_json(header["terms"])).to_json()}
    except InvalidRequestError as error:
        return {"refused": (str(error), error.param, error.code)}
    except Exception as error:  # noqa: BLE001 - a defect, which the gateway reports
        return {"crashed": type(error).__name__}


def _write(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
