"""What is not on the list is not in the log."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import AuditUnavailableError
from appliance.infra.logs import ALLOWED, LibraryHandler, configure_logs, keep_allowed
from appliance.infra.settings import LogSettings

SECRET = "the patient's name is"


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize(
    "field", ["prompt", "body", "messages", "authorization", "api_key", "content", "text"]
)
def test_a_field_that_is_not_listed_never_reaches_the_output(
    capsys: pytest.CaptureFixture, style: str, field: str
):
    """A prompt passed by mistake is dropped, and the line counts it."""
    logger = configure_logs(LogSettings(format=style), terminal=False)
    logger.info("request_finished", **{field: SECRET, "status": 200})
    output = capsys.readouterr()
    assert SECRET not in output.err + output.out
    assert "request_finished" in output.err
    assert "dropped_fields" in output.err


@given(st.dictionaries(st.text(), st.text(), max_size=8))
def test_only_listed_fields_are_kept_and_the_others_are_counted(fields: dict[str, str]):
    """Every field is kept unchanged or dropped and counted."""
    kept = dict(keep_allowed(None, "info", dict(fields)))
    dropped = [name for name in fields if name not in ALLOWED]
    assert kept.pop("dropped_fields", 0) == (len(dropped) or fields.get("dropped_fields", 0))
    assert kept == {name: fields[name] for name in fields if name in ALLOWED - {"dropped_fields"}}


def test_bound_fields_are_filtered_too(capsys: pytest.CaptureFixture):
    """Binding a field to a logger is no way around the list."""
    logger = configure_logs(LogSettings(format="json"), terminal=False).bind(prompt=SECRET, worker="w1")
    logger.warning("worker_health_changed")
    line = json.loads(capsys.readouterr().err)
    assert (line["worker"], line["dropped_fields"]) == ("w1", 1)
    assert SECRET not in json.dumps(line)


def test_a_line_of_json_has_event_level_and_time(capsys: pytest.CaptureFixture):
    """One event, one line, machine-readable, on standard error."""
    configure_logs(LogSettings(format="json"), terminal=True).info("started", port=8080)
    output = capsys.readouterr()
    assert output.out == ""
    line = json.loads(output.err)
    assert (line["event"], line["level"], line["port"]) == ("started", "info", 8080)
    assert line["timestamp"].endswith("Z")


def test_automatic_format_is_json_unless_on_a_terminal(capsys: pytest.CaptureFixture):
    """A terminal gets readable lines, everything else JSON."""
    configure_logs(LogSettings(), terminal=False).info("started")
    json.loads(capsys.readouterr().err)
    configure_logs(LogSettings(), terminal=True).info("started")
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(capsys.readouterr().err)


def test_events_below_the_level_are_not_written(capsys: pytest.CaptureFixture):
    """The level is the least severe that is written."""
    logger = configure_logs(LogSettings(level="warning", format="json"), terminal=False)
    logger.info("started")
    assert capsys.readouterr().err == ""
    logger.warning("started")
    assert capsys.readouterr().err


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_crash_is_logged_with_its_traceback_and_without_any_value(
    capsys: pytest.CaptureFixture, style: str
):
    """Local variables and messages of other libraries could contain a prompt."""
    logger = configure_logs(LogSettings(format=style), terminal=style == "console")

    def crash(prompt: str) -> None:
        try:
            {}[prompt]
        except KeyError as error:
            raise ExceptionGroup(prompt, [ValueError(prompt)]) from error

    try:
        crash(SECRET)
    except ExceptionGroup:
        logger.exception("request_crashed")
    output = capsys.readouterr().err
    for expected in ("in crash", "test_logs.py", "KeyError", "Which led to", "ExceptionGroup", "ValueError"):
        assert expected in output
    assert SECRET not in output


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [
        (AuditUnavailableError("the disk is full"), True),
        (OSError(28, "the disk is full"), True),
        (ValueError("the disk is full"), False),
    ],
)
def test_words_are_logged_where_they_are_known_to_be_safe(
    capsys: pytest.CaptureFixture, error: Exception, is_shown: bool
):
    """Messages of our own and of the system are safe; others may quote their input."""
    configure_logs(LogSettings(format="json"), terminal=False).error("crashed", exc_info=error)
    line = json.loads(capsys.readouterr().err)
    assert ("the disk is full" in line["exception"]) is is_shown
    assert type(error).__name__ in line["exception"]


def test_library_log_is_an_event_without_its_text(capsys: pytest.CaptureFixture):
    """
    Where it was logged and what was raised; a task that is not awaited would print its exception's text.
    """
    handler = LibraryHandler(configure_logs(LogSettings(format="json"), terminal=False))
    library = logging.Logger("asyncio")  # noqa: LOG001 - one that no other test meets
    library.addHandler(handler)
    library.info(SECRET)
    library.error("never retrieved: %s", SECRET, exc_info=ValueError(SECRET))
    library.critical(SECRET)
    output = capsys.readouterr().err
    lines = [json.loads(line) for line in output.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [("library_logged", "error")] * 2
    assert lines[0]["error"] == "ValueError"
    assert all(line["detail"].startswith("asyncio, test_logs:") for line in lines)
    assert SECRET not in output
