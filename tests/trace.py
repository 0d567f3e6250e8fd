"""
Recorded readings of a worker, replayed to the monitor: JSON lines.

Each line is one answer of the plugin (`GET /appliance/speculation`), with one more member: `at`, the
seconds of the recorder's clock.  `{"at": 3.0, "answer": null}` is a failed poll.  The replayed decisions
are not applied: the worker followed those of the recorded run.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from appliance.monitor import decide
from appliance.serving.plugin_client import OK, parse_reading
from appliance.speculation.state import MonitorPolicy, MonitorState
from appliance.speculation.values import SpeculationMode


def encode_line(at: float, answer: dict[str, Any] | None) -> str:
    """One poll as a line, without the newline."""
    return json.dumps({"at": at, "answer": None} if answer is None else {"at": at, **answer})


def replay(lines: Iterable[str], policy: MonitorPolicy) -> Iterator[tuple[float, MonitorState]]:
    """The monitor's state after each poll of a trace."""
    state = MonitorState(mode=SpeculationMode.SPECULATIVE)
    for line in lines:
        poll = json.loads(line)
        is_failed = "answer" in poll and poll["answer"] is None
        reading = None if is_failed else parse_reading(OK, line)
        state, _decision = decide(state, reading, policy, float(poll["at"]))
        yield float(poll["at"]), state
