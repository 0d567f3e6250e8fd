"""
Operator logs: structlog events with constant names, written to standard error.

Only fields named in `ALLOWED` are written, whatever a caller passes: a prompt or a key cannot reach
the log by way of a careless argument, because nothing is ever logged by default.  Nor by way of a
crash: of an exception its traceback is written, but its words only where they are known to be safe.
Libraries log into the same stream, as events that name the place and never the text.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import structlog

from appliance.errors import ApplianceError
from appliance.infra.settings import LogSettings

ALLOWED = frozenset(
    {
        "event", "level", "timestamp", "exception",
        "request_id", "client_request_id", "tenant", "key_id", "model", "route", "status", "outcome",
        "code", "error", "duration_ms", "ttft_ms", "prompt_tokens", "completion_tokens", "retries",
        "worker", "state", "detail", "exit_code", "mode", "reason", "acceptance_length",
        "tree_size", "recovered", "count", "seconds", "host", "port", "path", "version", "origin",
        "dropped_fields", "trace_id",
    }
)  # fmt: skip

Logger = structlog.typing.FilteringBoundLogger


class RotatedFile(RotatingFileHandler):
    """A log file that rotates by size, in the form structlog writes to."""

    def msg(self, message: str) -> None:
        self.handle(logging.makeLogRecord({"msg": message}))

    debug = info = warning = error = critical = msg

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as it is named there
        """Drop the line: a full disk must not end what is logged about."""


def open_log_file(path: Path, *, largest: int, kept: int) -> RotatedFile:
    """Append to a file of at most `largest` bytes; `kept` older ones stay as `.1` and on; raises OSError."""
    return RotatedFile(path, maxBytes=largest, backupCount=kept, encoding="utf-8")


def configure_logs(
    settings: LogSettings,
    *,
    terminal: bool,
    file: RotatedFile | None = None,
    on_warning: Callable[[Mapping[str, Any]], None] = lambda _event: None,
) -> Logger:
    """
    Write to `file`, by default to standard error; `terminal` says whether that is one.

    `on_warning` is called with each event of the level warning or above, by the thread that logs it.
    """

    def pass_warnings(_logger: object, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        if logging.getLevelNamesMapping()[event["level"].upper()] >= logging.WARNING:
            on_warning(event)
        return event

    as_json = settings.format == "json" or (settings.format == "auto" and not terminal)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=terminal)
    )
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logger: Logger = structlog.wrap_logger(
        file or structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            format_exception,
            keep_allowed,
            pass_warnings,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    return logger


def keep_allowed(_logger: object, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    kept = {name: value for name, value in event.items() if name in ALLOWED}
    if len(kept) < len(event):
        kept["dropped_fields"] = len(event) - len(kept)
    return kept


def format_exception(_logger: object, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Replace `exc_info` by `exception`: where it was raised and its class, without a foreigner's words."""
    given = event.pop("exc_info", None)
    error = sys.exception() if given is True else given
    if isinstance(error, BaseException):
        event["exception"] = "\n".join(_traced(error))
    return event


def _traced(error: BaseException) -> Iterator[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from _traced(cause)
        yield "Which led to:"
    yield from (line.rstrip() for line in traceback.format_tb(error.__traceback__))
    # Our own errors and the system's never quote a request; `KeyError('Dear doctor, ...')` does.
    words = f": {error}" if isinstance(error, ApplianceError | OSError) else ""
    yield type(error).__qualname__ + words
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield "Together with:"
            yield from _traced(inner)


class LibraryHandler(logging.Handler):
    """
    Turns a library's log records into events: logger, place in its code, class and traceback.

    The text is dropped: it could hold anything, such as the arguments of a task that was never awaited.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        known = {"error": type(error).__name__, "exc_info": error} if error else {}
        level = min(record.levelno, logging.ERROR)
        detail = f"{record.name}, {record.module}:{record.lineno}"
        self._logger.log(level, "library_logged", detail=detail, **known)


def take_over_libraries(logger: Logger) -> None:
    """Let `logger` write what libraries log in this process; called once."""
    logging.getLogger().addHandler(LibraryHandler(logger))  # noqa: TID251 - the root is theirs
