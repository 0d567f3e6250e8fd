"""
A running appliance that a real Prometheus scrapes while its draft collapses and recovers.

The demo pair serves code, then hex digits, which its draft cannot predict, then code again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from demo.process import ApplianceProcess
from tests.deploy.prometheus import Prometheus, prometheus
from tests.integration.speculation_admin import Admin, wait_for
from tests.integration.speculation_traffic import Traffic, code, noise

COLLAPSED = "ApplianceAcceptanceCollapsed"
HEALTHY = (
    'appliance_speculation_reason{reason="healthy"} == 1 and on (worker) appliance_acceptance_length > 2'
)
CHANGES = "sum(appliance_speculation_changes_total)"
SECONDS = 300


@dataclass(frozen=True)
class Story:
    """Observations from outside after all events; everything still runs."""

    prometheus: Prometheus
    began: float
    """Unix time."""
    changes: float
    """Changes of speculation counted from then on."""
    collapsed: set[str]
    """Alerts that fired while the draft had collapsed."""
    recovered: set[str]
    """Alerts that fired when it was over."""


@contextmanager
def monitored(appliance: ApplianceProcess, directory: Path) -> Iterator[Story]:
    """Make the draft of the running appliance collapse and recover; its clients send until the end."""
    worker = Admin(appliance).ask("status")["workers"][0]["url"]
    targets = {"gateway": urlsplit(appliance.admin_url).netloc, "worker": urlsplit(worker).netloc}
    tokens = {"worker": appliance.data / "control.token"}
    with (
        prometheus(directory, targets, tokens=tokens) as server,
        Traffic(appliance, clients=2, prompt=code()).running() as traffic,
    ):
        yield _told(server, traffic)
    assert not traffic.failures


def _told(server: Prometheus, traffic: Traffic) -> Story:
    began = time.time()  # noqa: TID251 - Prometheus goes by the wall clock
    wait_for(lambda: server.now(HEALTHY), seconds=SECONDS)
    before = sum(server.now(CHANGES))
    traffic.turn_to(noise())
    wait_for(lambda: COLLAPSED in server.firing(), seconds=SECONDS)
    collapsed = server.firing()
    traffic.turn_to(code())
    wait_for(lambda: COLLAPSED not in server.firing(), seconds=SECONDS)
    wait_for(lambda: server.now(HEALTHY), seconds=SECONDS)
    changes = sum(server.now(CHANGES)) - before
    return Story(server, began, changes, collapsed=collapsed, recovered=server.firing())
