"""Durations as text: `30s`, `10m`, `1h`, `2d`."""

import re

from appliance.errors import ConfigurationError

SECONDS_IN = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,9})([smhd])", re.ASCII)


def parse_duration(text: str) -> int:
    """Seconds in a duration."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r} is not a duration: write 30s, 10m, 1h or 2d")
    return int(found[1]) * SECONDS_IN[found[2]]


def show_duration(seconds: float) -> str:
    """A duration in its two largest units: `2d 3h`, `59s`; nothing is `0s`."""
    left, parts = max(0, round(seconds)), []
    for unit, size in reversed(SECONDS_IN.items()):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"
