"""
The offline environments of workers and Grafana as files of `NAME=value` lines.

`deploy/offline.env` is for workers, `deploy/offline-grafana.env` for Grafana.  Compose reads them as
`env_file`, systemd as `EnvironmentFile`, the chart line by line.  All three skip lines that begin with `#`
and take a value literally, so no value may need quotes.
"""

import re
from collections.abc import Iterable

from appliance.sovereignty.environment import OfflineVariable, worker_variables

PLAIN = re.compile(r"[\w.:/,-]+", re.ASCII)
"""Values that a shell, compose, systemd and the chart read alike."""
WRITTEN = "# Written by `python -m docs.generate` from appliance/sovereignty and docs/offline_env.py."

GRAFANA_VARIABLES = (
    OfflineVariable(
        name="GF_ANALYTICS_REPORTING_ENABLED",
        value="false",
        why="it sends usage counters to stats.grafana.org every day otherwise",
        source="conf/defaults.ini, [analytics]",
    ),
    OfflineVariable(
        name="GF_ANALYTICS_CHECK_FOR_UPDATES",
        value="false",
        why="it asks for its newest version otherwise",
        source="conf/defaults.ini, [analytics]",
    ),
    OfflineVariable(
        name="GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES",
        value="false",
        why="it asks for the newest versions of plugins otherwise",
        source="conf/defaults.ini, [analytics]",
    ),
    OfflineVariable(
        name="GF_ANALYTICS_FEEDBACK_LINKS_ENABLED",
        value="false",
        why="pages link to feedback forms on the internet otherwise",
        source="conf/defaults.ini, [analytics]",
    ),
    OfflineVariable(
        name="GF_SECURITY_DISABLE_GRAVATAR",
        value="true",
        why="pictures of users come from gravatar.com otherwise, by a digest of their e-mail address",
        source="conf/defaults.ini, [security]",
    ),
    OfflineVariable(
        name="GF_SNAPSHOTS_EXTERNAL_ENABLED",
        value="false",
        why="a user can publish a dashboard's data to snapshots.raintank.io otherwise",
        source="conf/defaults.ini, [snapshots]",
    ),
    OfflineVariable(
        name="GF_NEWS_NEWS_FEED_ENABLED",
        value="false",
        why="the start page fetches news from grafana.com otherwise",
        source="conf/defaults.ini, [news]",
    ),
    OfflineVariable(
        name="GF_PLUGINS_PLUGIN_ADMIN_ENABLED",
        value="false",
        why="the list of plugins to install is fetched from grafana.com otherwise",
        source="conf/defaults.ini, [plugins]",
    ),
    OfflineVariable(
        name="GF_PLUGINS_PREINSTALL_DISABLED",
        value="true",
        why="plugins are downloaded at every start otherwise",
        source="pkg/setting/setting_plugins.go",
    ),
    OfflineVariable(
        name="GF_PLUGINS_PREINSTALL_AUTO_UPDATE",
        value="false",
        why="without internet an update that fails takes away the plugin it was to replace otherwise",
        source="pkg/setting/setting_plugins.go",
    ),
    OfflineVariable(
        name="GF_PLUGINS_PUBLIC_KEY_RETRIEVAL_DISABLED",
        value="true",
        why="keys that plugins are signed with are fetched from grafana.com otherwise",
        source="conf/defaults.ini, [plugins]",
    ),
    OfflineVariable(
        name="GF_AUTH_ANONYMOUS_ENABLED",
        value="false",
        why="figures about tenants are for people who have logged in",
        source="conf/defaults.ini, [auth.anonymous]",
    ),
    OfflineVariable(
        name="GF_USERS_ALLOW_SIGN_UP",
        value="false",
        why="who may log in is the operator's to decide",
        source="conf/defaults.ini, [users]",
    ),
)
"""Grafana reads `GF_<SECTION>_<KEY>` over its configuration file, whose defaults report usage, check for
updates, download plugins and load pictures from the internet."""


def worker_file(plugins: Iterable[str]) -> str:
    """
    The environment of a worker's container.

    `appliance worker` sets it for the worker it starts in any case; the file covers the other processes of
    the container, and reviewers can read it.
    """
    return render_file("Offline environment of a worker", worker_variables(plugins))


def grafana_file() -> str:
    return render_file("Offline environment of Grafana", GRAFANA_VARIABLES)


def render_file(title: str, rows: Iterable[OfflineVariable]) -> str:
    """
    One line for each variable, below a comment with the reason and its source.

    Raises:
        ValueError: a value that one of the readers would alter.
    """
    lines = [f"# {title}.", WRITTEN]
    for row in rows:
        if not PLAIN.fullmatch(row.value):
            raise ValueError(f"{row.name}: {row.value!r} would need quotes, which not every reader removes")
        note = "  Another value is allowed." if row.free else ""
        lines += ["", f"# {row.why} ({row.source}).{note}", f"{row.name}={row.value}"]
    return "\n".join(lines) + "\n"
