"""
The offline tables as files of `NAME=value` lines, for whatever starts a process.

`deploy/offline.env` is for workers, `deploy/offline-grafana.env` for Grafana.  Compose reads them as
`env_file`, systemd as `EnvironmentFile`, the chart line by line.  All three take a line that begins with `#`
as a comment and a value as it stands, so no value may need quotes.
"""

import re
from collections.abc import Iterable

from appliance.sovereignty.environment import OfflineVariable, worker_variables
from appliance.sovereignty.grafana import GRAFANA_VARIABLES

PLAIN = re.compile(r"[\w.:/,-]+", re.ASCII)
"""Values that a shell, compose, systemd and the chart read alike."""
WRITTEN = "# Written by `python -m docs.generate` from appliance/sovereignty; edit the table there instead."


def worker_file(plugins: Iterable[str]) -> str:
    """
    The environment a worker must have, as a file.

    A worker that `appliance worker` starts gets it in any case; here it is for whoever starts its container,
    so that what else runs in there has it too, and a reviewer can read it.
    """
    return render_file("What keeps a worker from calling out", worker_variables(plugins))


def grafana_file() -> str:
    """The environment of a Grafana that calls nobody, as a file."""
    return render_file("What keeps Grafana from calling out", GRAFANA_VARIABLES)


def render_file(title: str, rows: Iterable[OfflineVariable]) -> str:
    """
    One line for each variable, with why and where that was read above it.

    Raises:
        ValueError: a value that one of the readers would take apart.
    """
    lines = [f"# {title}.", WRITTEN]
    for row in rows:
        if not PLAIN.fullmatch(row.value):
            message = f"{row.name}: {row.value!r} would need quotes, which not every reader takes off"
            raise ValueError(message)
        note = "  Another value is allowed." if row.free else ""
        lines += ["", f"# {row.why} ({row.source}).{note}", f"{row.name}={row.value}"]
    return "\n".join(lines) + "\n"
