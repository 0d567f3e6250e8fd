"""
What the audit log of this machine says of the changes a drill saw.
"""

import time
from collections.abc import Callable, Sequence

from appliance.audit.entry import decode
from appliance.audit.registry import EntryType
from appliance.cli.audit import PAGE, open_store
from appliance.cli.drill.timeline import Change, unrecorded
from appliance.errors import ConfigurationError
from appliance.infra.settings import Settings

ATTEMPTS, PAUSE_SECONDS = 20, 0.25
"""An entry is written a moment after the change it records."""


def changes_lacking(
    settings: Settings,
    changes: Sequence[Change],
    audit_size: int,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Change, ...]:
    """
    The changes without their entry among those from index `audit_size` on.

    Raises:
        ApplianceError: there is no audit log here, it cannot be read, or it is another one.
    """
    lacking = unrecorded(changes, recorded_changes(settings, audit_size))
    for _ in range(ATTEMPTS):
        if not lacking:
            break
        sleep(PAUSE_SECONDS)
        lacking = unrecorded(changes, recorded_changes(settings, audit_size))
    return lacking


def recorded_changes(settings: Settings, audit_size: int) -> tuple[tuple[str, str, str], ...]:
    """
    Worker, mode and reason of each `speculation.changed` from index `audit_size` on, in order.

    Raises:
        ApplianceError: there is no audit log here, it cannot be read, or it is another one.
    """
    found = []
    with open_store(settings) as store:
        size = store.head().size
        if size < audit_size:
            message = (
                f"the log here has {size} entries and the gateway's has {audit_size}: name its with --data"
            )
            raise ConfigurationError(message)
        for start in range(audit_size, size, PAGE):
            for leaf in store.leaves(start, min(size, start + PAGE)):
                if leaf.type == EntryType.SPECULATION_CHANGED:
                    fields = decode(leaf.leaf).fields
                    found.append((str(fields["worker"]), str(fields["mode"]), str(fields["reason"])))
    return tuple(found)
