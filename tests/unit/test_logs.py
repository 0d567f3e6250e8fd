"""Promises of `appliance.logs`: what is not on the list is not in the log."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.logs import ALLOWED, configure_logs, keep_allowed
from appliance.settings import LogSettings

SECRET = "the patient's name is"


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize(
    "field", ["prompt", "body", "messages", "authorization", "api_key", "content", "text"]
)
def test_a_field_that_is_not_listed_never_reaches_the_output(
    capsys: pytest.CaptureFixture, style: str, field: str
):
    """A prompt given by mistake is dropped, and the line says that something was."""
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


def test_automatic_format_is_json_unless_somebody_is_watching(capsys: pytest.CaptureFixture):
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
def test_a_crash_is_logged_with_its_traceback_and_without_local_variables(
    capsys: pytest.CaptureFixture, style: str
):
    """A traceback helps the operator; the values in it could be somebody's prompt."""
    logger = configure_logs(LogSettings(format=style), terminal=style == "console")

    def crash(prompt: str) -> None:
        assert prompt
        raise ValueError("no details")

    try:
        crash(SECRET)
    except ValueError as error:
        logger.error("request_crashed", error=type(error).__name__, exc_info=error)  # noqa: TRY400
    output = capsys.readouterr().err
    assert "crash" in output
    assert "no details" in output
    assert SECRET not in output
