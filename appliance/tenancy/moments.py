"""Points in time in files, commands and the admin API: `2026-12-31T23:59:59Z`, whole seconds."""

from datetime import UTC, date, datetime

from appliance.errors import ConfigurationError

LATEST = 253_402_300_799
"""The last second of the year 9999."""


def parse_moment(where: str, value: object) -> int:
    """
    Unix time of a date, or of a date and time, as text or as decoded from YAML; UTC without an offset.

    Raises ConfigurationError, with a message that begins with `where`, if it is no time or before 1970.
    """
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        elif isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)  # noqa: DTZ001 - in UTC, below
        if isinstance(value, datetime):
            moment = value if value.tzinfo else value.replace(tzinfo=UTC)
            seconds = int(moment.timestamp())
            if 0 <= seconds <= LATEST:
                return seconds
    except (ValueError, OverflowError):
        pass
    raise ConfigurationError(f"{where} must be a time such as 2026-12-31T23:59:59Z, or a date")


def format_moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
