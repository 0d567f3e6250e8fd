"""
Operator logs: structlog events with constant names, written to standard error.

Only fields named in `ALLOWED` are written, whatever a caller passes: a prompt or a key cannot reach
the log by way of a careless argument, because nothing is ever logged by default.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from appliance.settings import LogSettings

ALLOWED = frozenset(
    {
        "event", "level", "timestamp", "exception",
        "request_id", "client_request_id", "tenant", "key_id", "model", "route", "status", "outcome",
        "code", "error", "duration_ms", "ttft_ms", "prompt_tokens", "completion_tokens", "retries",
        "worker", "state", "detail", "exit_code", "mode", "reason", "acceptance_length",
        "tree_size", "recovered", "count", "seconds", "host", "port", "path", "version", "origin",
        "dropped_fields",
    }
)  # fmt: skip

Logger = structlog.typing.FilteringBoundLogger


def configure_logs(settings: LogSettings, *, terminal: bool) -> Logger:
    """Build the one logger of this process; the roots hand it to whoever needs it."""
    as_json = settings.format == "json" or (settings.format == "auto" and not terminal)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=terminal)
    )
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logger: Logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            keep_allowed,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    return logger


def keep_allowed(_logger: object, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Drop every field that is not on the list, and say how many went."""
    kept = {name: value for name, value in event.items() if name in ALLOWED}
    if len(kept) < len(event):
        kept["dropped_fields"] = len(event) - len(kept)
    return kept
