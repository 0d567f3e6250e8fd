"""Result of one line of a batch: OpenAI's line for the output or the error file, and whether to retry."""

import json
from dataclasses import dataclass
from http import HTTPStatus

# Not caused by the line, unless it exceeds its tenant's limits.
WORTH_WAITING = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
WORTH_TRYING = frozenset(
    {HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT}
)
"""Possibly caused by the line: retried a few times."""
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
class LineAnswer:
    request_id: str  # as in the audit log
    status: int
    body: str  # JSON
    may_pass: bool = True  # whether a refusal may be temporary


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    number: int  # of the input file
    succeeded: bool  # in the output file, else in the error file
    line: str  # for that file, without a newline


def is_worth_waiting(answer: LineAnswer) -> bool:
    """Whether the refusal is temporary and not caused by the line."""
    return answer.status in WORTH_WAITING and answer.may_pass


def should_try_again(answer: LineAnswer, tries: int) -> bool:
    """After `tries` attempts."""
    return is_worth_waiting(answer) or (answer.status in WORTH_TRYING and tries < MOST_TRIES)


def answered(number: int, custom_id: str, answer: LineAnswer) -> LineResult:
    """The worker's body is unchanged."""
    status, body = answer.status, answer.body
    try:
        json.loads(body)
    except ValueError:
        status, body = HTTPStatus.BAD_GATEWAY.value, NOT_JSON
    # JSON has raw line breaks only between its tokens; the result must be one line.
    body = body.replace("\r", " ").replace("\n", " ").strip()
    head = json.dumps({"status_code": status, "request_id": answer.request_id})
    response = f'{head[:-1]}, "body": {body}}}'
    return LineResult(
        number=number,
        succeeded=status < HTTPStatus.MULTIPLE_CHOICES,
        line=_line(answer.request_id, custom_id, response, "null"),
    )


def never_run(number: int, custom_id: str, *, line_id: str, code: str, message: str) -> LineResult:
    error = json.dumps({"code": code, "message": message})
    return LineResult(number=number, succeeded=False, line=_line(line_id, custom_id, "null", error))


def _line(line_id: str, custom_id: str, response: str, error: str) -> str:
    named = f'"id": {json.dumps(f"batch_req_{line_id}")}, "custom_id": {json.dumps(custom_id)}'
    return f'{{{named}, "response": {response}, "error": {error}}}'
