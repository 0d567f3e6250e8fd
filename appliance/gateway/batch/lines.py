"""
The lines of a batch's input: one request each, checked before any of them runs.

Pure, and incremental: a file is never whole in memory.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.errors import InvalidRequestError
from appliance.gateway.batch.batch import BatchProblem
from appliance.gateway.body import MAX_MODEL_CHARACTERS
from appliance.infra.json_members import parse_members
from appliance.serving.dialects.routes import ROUTES, Route

LONGEST_CUSTOM_ID = 512
MOST_PROBLEMS = 100  # maximum reported; the rest of the file is not read
_KNOWN = frozenset({"custom_id", "method", "url", "body"})
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    number: int  # line of the input file, from 1; blank lines are counted but are not requests
    custom_id: str
    model: str
    body: bytes  # as the tenant sent it


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRequest:
    """What a line says, and where in it its body is, in bytes."""

    custom_id: str
    model: str
    start: int
    end: int


class LineCutter:
    """Both methods raise InvalidRequestError at a line that is too long."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max = max_line_bytes
        self._rest = b""
        self.number = 0  # of the last line, from 1

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of each complete line that is not blank."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in whole:
            yield from self._cut(line)
        if len(self._rest) > self._max:
            yield from self._cut(self._rest)

    def end(self) -> Iterator[tuple[int, bytes]]:
        """Yield the last line if it has no newline."""
        rest, self._rest = self._rest, b""
        yield from self._cut(rest)

    def _cut(self, line: bytes) -> Iterator[tuple[int, bytes]]:
        self.number += 1
        if len(line) > self._max:
            raise InvalidRequestError(f"This line has more than {self._max} bytes.", code="line_too_long")
        if line.strip():
            yield self.number, line


class InputCheck:
    """Checks the lines of one file in order; `problems` is empty if all are valid."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._seen: set[bytes] = set()
        self._models: set[str] = set()
        self.total = 0
        self.problems: list[BatchProblem] = []

    @property
    def has_enough(self) -> bool:
        return len(self.problems) >= MOST_PROBLEMS or self.total > self._max_requests

    @property
    def model(self) -> str | None:
        """None unless every line names the same one."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def add(self, number: int, request: "BatchLine | InvalidRequestError") -> None:
        """Take the line of this number, or why it is none."""
        self.total += 1
        if self.total > self._max_requests:
            self._add("too_many_requests", f"A batch may have at most {self._max_requests} requests.", number)
            return
        if isinstance(request, InvalidRequestError):
            self.refuse(number, request)
            return
        # Digests bound the memory: fifty thousand ids may be 25 MB.
        digest = hashlib.blake2b(request.custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._seen:
            message = "Another line has this `custom_id`; each must be used once."
            self._add("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(digest)
        self._models.add(request.model)

    def refuse(self, number: int, error: InvalidRequestError) -> None:
        self._add(error.code or "invalid_request", str(error), number, error.param)

    def end(self) -> None:
        """Check the file as a whole, after its last line."""
        if not self.total and not self.problems:
            self._add("empty_file", "The file holds no requests. Put one JSON object on each line.", None)

    def _add(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        self.problems.append(BatchProblem(code=code, message=message, line=line, param=param))


def parse_line(number: int, line: bytes, endpoint: str) -> BatchLine:
    """Raises InvalidRequestError if it is not a valid request; the tenant gets its code and param."""
    found = find_request(line, endpoint)
    body = line[found.start : found.end]
    return BatchLine(number=number, custom_id=found.custom_id, model=found.model, body=body)


def find_request(line: bytes, endpoint: str) -> FoundRequest:
    """As `parse_line`, without a copy of the body."""
    try:
        text = line.decode()
        members = parse_members(text)
    except (UnicodeDecodeError, InvalidRequestError) as error:
        message = "This line is not a JSON object in UTF-8."
        raise _problem("invalid_json_line", message) from error
    given = {name: member.value for name, member in members.items()}
    unknown = sorted(given.keys() - _KNOWN)
    if unknown:
        raise _problem("unknown_parameter", f"`{unknown[0]}` is not a known member.", unknown[0])
    for name in ("custom_id", "method", "url", "body"):
        if name not in given:
            raise _problem("missing_required_parameter", f"`{name}` is missing.", name)
    custom_id = given["custom_id"]
    if (
        not isinstance(custom_id, str)
        or not 0 < len(custom_id) <= LONGEST_CUSTOM_ID
        or not _is_text(custom_id)
    ):
        message = f"`custom_id` must be a string of 1 to {LONGEST_CUSTOM_ID} characters."
        raise _problem("invalid_custom_id", message, "custom_id")
    if given["method"] != "POST":
        raise _problem("invalid_method", "`method` must be `POST`.", "method")
    if given["url"] != endpoint:
        message = f"`url` must be the endpoint of the batch, `{endpoint}`."
        raise _problem("invalid_url", message, "url")
    place = members["body"]
    body = text[place.value_start : place.end]
    start = len(text[: place.value_start].encode())
    return FoundRequest(
        custom_id=custom_id,
        model=_check_body(body, given["body"], ROUTES[endpoint]),
        start=start,
        end=start + len(body.encode()),
    )


def _check_body(text: str, body: object, route: Route) -> str:
    """The model that it names."""
    if not isinstance(body, dict):
        raise _problem("invalid_body", "`body` must be an object.", "body")
    try:
        members = parse_members(text, max_numbers=route.max_numbers)
    except InvalidRequestError as error:
        raise _problem("invalid_body", str(error), "body") from error
    model = body.get("model")
    if not isinstance(model, str) or not model:
        message = "`body.model` must name a model; GET /v1/models lists them."
        raise _problem("missing_required_parameter", message, "body.model")
    missing = route.missing(members)
    if missing is not None:
        raise _problem("missing_required_parameter", f"`body.{missing}` is missing.", f"body.{missing}")
    if body.get("stream") not in (None, False):
        message = "`body.stream` must be omitted: batches do not stream."
        raise _problem("invalid_body", message, "body.stream")
    return model[:MAX_MODEL_CHARACTERS]


def _problem(code: str, message: str, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code)


def _is_text(value: str) -> bool:
    """Whether it can be encoded: JSON allows half a surrogate pair, UTF-8 does not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
