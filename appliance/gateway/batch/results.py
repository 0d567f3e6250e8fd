"""
What came of one line of a batch: OpenAI's line for the output or the error file, and whether to try again.

Pure.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus

WORTH_WAITING = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""No fault of the line, but for one that is larger than its tenant's limits."""
WORTH_TRYING = frozenset(
    {HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT}
)
"""Perhaps the line's fault: tried a few times."""
MOST_TRIES = 3
NOT_JSON = json.dumps(
    {
        "error": {
            "message": "The worker's answer was not JSON.",
            "type": "server_error",
            "param": None,
            "code": "worker_failed",
        }
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one try of a line was answered."""

    request_id: str
    """As the audit log names it."""
    status: int
    body: str
    """JSON."""
    may_pass: bool = True
    """Whether a refusal may come to an end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The last word on one line."""

    number: int
    """Line of the input."""
    succeeded: bool
    """Whether it goes to the output file; otherwise to the error file."""
    line: str
    """As it will stand there, without a newline."""


def is_worth_waiting(answer: Answer) -> bool:
    """Whether the same request will be taken later, the line having done nothing wrong."""
    return answer.status in WORTH_WAITING and answer.may_pass


def should_try_again(answer: Answer, tries: int) -> bool:
    """Whether a line that got this answer at its `tries`-th try is run once more."""
    return is_worth_waiting(answer) or (answer.status in WORTH_TRYING and tries < MOST_TRIES)


def answered(number: int, custom_id: str, answer: Answer) -> Result:
    """The result of a line that was answered, with the worker's body as it came."""
    status, body = answer.status, answer.body
    try:
        json.loads(body)
    except ValueError:
        status, body = HTTPStatus.BAD_GATEWAY.value, NOT_JSON
    # JSON has raw line breaks between its tokens only; one line must stay one line.
    body = body.replace("\r", " ").replace("\n", " ").strip()
    head = json.dumps({"status_code": status, "request_id": answer.request_id})
    response = f'{head[:-1]}, "body": {body}}}'
    return Result(
        number=number,
        succeeded=status < HTTPStatus.MULTIPLE_CHOICES,
        line=_line(answer.request_id, custom_id, response, "null"),
    )


def never_run(number: int, custom_id: str, *, line_id: str, code: str, message: str) -> Result:
    """The result of a line that was not run, or not to its end."""
    error = json.dumps({"code": code, "message": message})
    return Result(number=number, succeeded=False, line=_line(line_id, custom_id, "null", error))


def _line(line_id: str, custom_id: str, response: str, error: str) -> str:
    named = f'"id": {json.dumps(f"batch_req_{line_id}")}, "custom_id": {json.dumps(custom_id)}'
    return f'{{{named}, "response": {response}, "error": {error}}}'
