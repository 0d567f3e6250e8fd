"""
Readings of a worker as they were recorded, replayed to the monitor: JSON lines.

Each line is one answer of the plugin (`GET /appliance/speculation`), with one member more: `at`, the
seconds of the recorder's clock.  `{"at": 3.0, "answer": null}` is a look that failed.  What the
monitor says to them is not carried out: the worker did what whoever was recorded told it.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from appliance.monitor import decide
from appliance.serving.plugin_client import OK, parse_reading
from appliance.speculation.state import MonitorPolicy, Watch
from appliance.speculation.values import SpeculationMode


def encode_line(at: float, answer: dict[str, Any] | None) -> str:
    """One look as a line, without the newline."""
    return json.dumps({"at": at, "answer": None} if answer is None else {"at": at, **answer})


def replay(lines: Iterable[str], policy: MonitorPolicy) -> Iterator[tuple[float, Watch]]:
    """What the monitor makes of a trace, look by look."""
    watch = Watch(mode=SpeculationMode.SPECULATIVE)
    for line in lines:
        look = json.loads(line)
        is_failed = "answer" in look and look["answer"] is None
        reading = None if is_failed else parse_reading(OK, line)
        watch = decide(watch, reading, policy, float(look["at"]))
        yield float(look["at"]), watch
