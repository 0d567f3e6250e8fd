"""
What a process of the worker may write once it serves requests: places, classes and counts, no content.

vLLM and its libraries quote requests and answers in exception messages, warnings and, if a step fails, in a
dump of what was scheduled.  From the first request on a process writes

- of a log record its place and the text that stands in the source, without the arguments; an f-string is
  dropped whole, since its arguments cannot be separated from it; of an access log nothing,
- of an exception its traceback and class; its message only if vLLM or torch is known to put figures in it,
- of a warning its place and category.

Before that, no request has arrived that could be quoted, so the causes of a failed start stay complete.  Not
covered: what a library writes to the descriptor itself, without Python.
"""

import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from functools import wraps
from types import FrameType
from typing import Any

from appliance.serving.worker_log import RELAYED

LOGGER = "vllm.appliance"
"""Below vLLM's logger, whose handlers and format it uses."""
FIGURES_ONLY = (LOGGER, "vllm.v1.metrics.", "vllm.v1.spec_decode.metrics")
"""Loggers whose messages consist of figures."""
FIGURES_ONLY_ERRORS = frozenset({"torch.OutOfMemoryError", "torch.AcceleratorError"})
DUMPED = "dumped_by_the_appliance"
DROPPED = "(text withheld: it may quote a request)"
PLACEHOLDER = re.compile(r"%(?:%|(?:\(\w+\))?[-+ #0]*[\d*]*(?:\.[\d*]+)?[a-zA-Z])")
REQUEST_ID = re.compile(r"(?:[a-z_]+-)?[0-9A-HJKMNP-TV-Z]{26}(?:-[0-9a-f-]{1,40})?")
"""An id that the gateway assigned, with what vLLM adds to it; no client can choose one."""


def redact_logs() -> None:
    """From now on write no content; called by each process of the worker before its first request."""
    if traceback.TracebackException is RedactedTraceback:
        return
    traceback.TracebackException = RedactedTraceback  # type: ignore[misc,assignment]
    logging.setLogRecordFactory(_redacting(logging.getLogRecordFactory()))
    # Its formatter needs the arguments.  Our launcher has it off; a worker started by others may not.
    logging.getLogger("uvicorn.access").disabled = True  # noqa: TID251 - uvicorn's
    warnings.formatwarning = _format_warning  # type: ignore[assignment]
    # Python's own hooks are written in C, and format exceptions without `traceback`.
    sys.excepthook = traceback.print_exception
    sys.unraisablehook = lambda given: _print("ignored", given.exc_value)
    threading.excepthook = lambda given: _print("in a thread", given.exc_value)


def redact_before(owner: Any, name: str) -> None:  # noqa: ANN401 - a class of vLLM
    """Redact before the first call of this method; at once if there is no such method."""
    original = getattr(owner, name, None)
    if original is None:
        redact_logs()
        return

    def redacted(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        redact_logs()
        setattr(owner, name, original)
        return original(*arguments, **named)

    setattr(owner, name, redacted)


def replace_failure_dump(core: Any) -> None:  # noqa: ANN401 - the module `vllm.v1.engine.core`
    """Log which requests a failed step had, and how large it was, instead of the requests themselves."""
    if hasattr(core, "dump_engine_exception"):
        core.dump_engine_exception = dump_failed_step
        _dump_early_failures(getattr(core, "EngineCore", None))


def _dump_early_failures(engine: Any) -> None:  # noqa: ANN401 - the class `EngineCore` of vLLM
    """
    Have `step` dump a failure that comes before vLLM's own guard.

    An executor in the engine's process fails while a step is started; vLLM 0.32 guards only its result.
    """
    original = getattr(engine, "step", None)
    if original is None:
        return

    @wraps(original)
    def step(core: Any) -> Any:  # noqa: ANN401
        try:
            return original(core)
        except Exception as error:
            with suppress(Exception):
                frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
                scheduled = (frame.f_locals.get("scheduler_output") for frame in frames)
                output = next(one for one in scheduled if one is not None)
                if not hasattr(output, DUMPED):
                    dump_failed_step(None, output, core.scheduler.make_stats())
            raise

    engine.step = step


def dump_failed_step(_config: object, output: Any, stats: Any) -> None:  # noqa: ANN401 - of vLLM's scheduler
    logger = logging.getLogger(LOGGER)  # noqa: TID251 - in the worker, which has no other log
    with suppress(Exception):  # the failure itself must stay the one that is raised
        setattr(output, DUMPED, True)
        tokens: Mapping[str, int] = output.num_scheduled_tokens
        drafts = sum(len(ids) for ids in output.scheduled_spec_decode_tokens.values())
        logger.error(
            "the failed step had %d requests, %d of them new, and %d tokens, %d of them draft tokens: %s",
            *(len(tokens), len(output.scheduled_new_reqs), sum(tokens.values()), drafts),
            ", ".join(f"{request} ({count})" for request, count in tokens.items()),
        )
        if stats is not None:
            logger.error(
                "at that step %d requests ran, %d waited, and the KV cache was %.1f %% full",
                *(stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage * 100),
            )


class RedactedTraceback(traceback.TracebackException):
    """Every text of an exception in Python, and of its causes, is made by an object of this class."""

    def __init__(self, kind: Any, error: Any, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - as its base
        super().__init__(kind, error, *arguments, **(named | {"capture_locals": False}))
        self._line = _describe(kind, error)

    def format_exception_only(self, **_named: Any) -> Generator[str, None, None]:  # noqa: ANN401
        yield f"{self._line}\n"


def _describe(kind: type[BaseException] | None, error: BaseException | None) -> str:
    if kind is None:
        return "no exception"
    module = "" if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    text = ""
    with suppress(Exception):
        text = str(error)
    if name in FIGURES_ONLY_ERRORS:
        return f"{name}: {text}"
    # The end of such a message is the message of another process's exception.
    relayed = next((known for known in RELAYED if text.startswith(known)), None)
    return f"{name}: {relayed}" if relayed else name


def _redacting(make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def make_redacted(*arguments: Any, **named: Any) -> logging.LogRecord:  # noqa: ANN401 - as the factory
        record = make(*arguments, **named)
        if not record.name.startswith(FIGURES_ONLY):
            record.msg, record.args = _redacted_text(record), ()
        return record

    return make_redacted


def _redacted_text(record: logging.LogRecord) -> str:
    given = record.args if isinstance(record.args, tuple) else ()
    ids = [text for text in given if isinstance(text, str) and REQUEST_ID.fullmatch(text)]
    text = DROPPED
    if _is_literal(record):
        text = PLACEHOLDER.sub(lambda found: "%" if found[0] == "%%" else "…", record.msg)
    return f"{text} [{', '.join(ids)}]" if ids else text


def _is_literal(record: logging.LogRecord) -> bool:
    """Whether the message is a constant in the code of the function that logs it, so no f-string."""
    # The record has the frame's place, and not the frame.
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename == record.pathname and frame.f_lineno == record.lineno:
            return isinstance(record.msg, str) and record.msg in frame.f_code.co_consts
        frame = frame.f_back
    return False


def _format_warning(
    _text: Warning | str, category: type[Warning], name: str, line: int, _source: str | None = None
) -> str:
    return f"{name}:{line}: {category.__name__}\n"


def _print(where: str, error: BaseException | None) -> None:
    if sys.stderr is not None and error is not None:
        sys.stderr.write(f"Exception {where}:\n")
        traceback.print_exception(error)
