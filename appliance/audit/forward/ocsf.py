"""
Events in the Open Cybersecurity Schema Framework.  Pure.

`raw_data` is the proof, with the canonical leaf in it; `unmapped` is the entry as it is in the log.

Source: github.com/ocsf/ocsf-schema, tag v1.2.0.
"""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from appliance import __version__
from appliance.audit.entry_types import EntryType
from appliance.audit.forward.events import CHECKPOINT, PRODUCT, VENDOR, Event

OCSF_VERSION = "1.2.0"
OTHER = 99
"""Activity that the class has no number for; `activity_name` has the entry type."""
_MOST_CHARACTERS = 200
"""Of a name in a mapped attribute; `unmapped` has all of it."""


class EventClass(IntEnum):
    BASE_EVENT = 0
    DETECTION_FINDING = 2004
    ACCOUNT_CHANGE = 3001
    AUTHENTICATION = 3002
    ENTITY_MANAGEMENT = 3004
    APPLICATION_LIFECYCLE = 6002
    API_ACTIVITY = 6003


_API, _ENTITY, _ACCOUNT = EventClass.API_ACTIVITY, EventClass.ENTITY_MANAGEMENT, EventClass.ACCOUNT_CHANGE
_APPLICATION = EventClass.APPLICATION_LIFECYCLE
_CREATE, _READ, _UPDATE, _DELETE = 1, 2, 3, 4  # of API activity and entity management
CLASSES: Mapping[str, tuple[EventClass, int]] = {
    CHECKPOINT: (EventClass.BASE_EVENT, OTHER),
    EntryType.REQUEST_INTENT: (_API, OTHER),
    EntryType.REQUEST_OUTCOME: (_API, OTHER),
    EntryType.REQUEST_ABORTED: (_API, OTHER),
    EntryType.REQUEST_DENIED: (_API, OTHER),
    EntryType.CALLERS_REFUSED: (_API, OTHER),
    EntryType.CONSOLE_LOGIN: (EventClass.AUTHENTICATION, 1),
    EntryType.FILE_CREATED: (_API, _CREATE),
    EntryType.FILE_DELETED: (_API, _DELETE),
    EntryType.BATCH_CREATED: (_API, _CREATE),
    EntryType.BATCH_ENDED: (_API, _UPDATE),
    EntryType.SPECULATION_CHANGED: (_ENTITY, _UPDATE),
    EntryType.SPECULATION_OVERRIDDEN: (_ENTITY, _UPDATE),
    EntryType.WORKER_STARTED: (_APPLICATION, 3),
    EntryType.WORKER_STOPPED: (_APPLICATION, 4),
    EntryType.WORKER_RECYCLED: (_APPLICATION, OTHER),
    EntryType.WORKER_DRAINED: (_APPLICATION, OTHER),
    EntryType.WORKER_FAILED: (_APPLICATION, 4),
    EntryType.DRAFT_IMPORTED: (_ENTITY, _CREATE),
    EntryType.DRAFT_HARVESTED: (_ENTITY, _READ),
    EntryType.DRAFT_TRAINED: (_ENTITY, _CREATE),
    EntryType.DRAFT_EVALUATED: (_ENTITY, _READ),
    EntryType.DRAFT_TRIED: (_ENTITY, _UPDATE),
    EntryType.DRAFT_PROMOTED: (_ENTITY, _UPDATE),
    EntryType.DRAFT_ROLLED_BACK: (_ENTITY, _UPDATE),
    EntryType.TENANT_CREATED: (_ACCOUNT, 1),
    EntryType.TENANT_CHANGED: (_ACCOUNT, OTHER),
    EntryType.TENANT_DELETED: (_ACCOUNT, 6),
    EntryType.KEY_CREATED: (_ACCOUNT, 1),
    EntryType.KEY_REVOKED: (_ACCOUNT, 5),
    EntryType.KEY_ROTATED: (_ACCOUNT, 4),
    EntryType.TENANTS_SEALED: (_ENTITY, _UPDATE),
    EntryType.CONFIG_CHANGED: (_ENTITY, _UPDATE),
    EntryType.AUDIT_STARTED: (_APPLICATION, 3),
    EntryType.AUDIT_READ: (_API, _READ),
    EntryType.AUDIT_SPOOLED: (_ENTITY, _UPDATE),
    EntryType.AUDIT_GAP: (_ENTITY, OTHER),
    EntryType.AUDIT_DISPOSED: (_ENTITY, _DELETE),
    EntryType.ERASURE: (_ENTITY, _DELETE),
    EntryType.HOLD_PLACED: (_ENTITY, _CREATE),
    EntryType.HOLD_RELEASED: (_ENTITY, _DELETE),
    EntryType.APPROVAL_REQUESTED: (_ENTITY, _CREATE),
    EntryType.APPROVAL_CLOSED: (_ENTITY, _UPDATE),
    EntryType.EGRESS_ATTESTED: (EventClass.DETECTION_FINDING, 1),
    EntryType.BUNDLE_INSTALLED: (_APPLICATION, 1),
    EntryType.SIGNER_ROTATED: (_ENTITY, _UPDATE),
}
"""Class and activity of each type; one that an altered database invented is a base event."""


def render_ocsf(event: Event, *, short: bool) -> str:
    event_class, activity = CLASSES.get(event.type, CLASSES[CHECKPOINT])
    product = {"name": PRODUCT, "vendor_name": VENDOR, "version": __version__}
    document: dict[str, Any] = {
        "activity_id": activity,
        "activity_name": event.type,
        "category_uid": event_class // 1000,
        "class_uid": int(event_class),
        "type_uid": event_class * 100 + activity,
        "severity_id": int(event.severity),
        "time": event.milliseconds,
        "metadata": {
            "version": OCSF_VERSION,
            "product": product,
            "log_name": _name(event, "log"),
            "sequence": event.index,
            "uid": _name(event, "id"),
        },
        **_attributes(event_class, event),
    }
    if not short:
        document["unmapped"] = event.fields
    return json.dumps({**document, "raw_data": event.evidence}, separators=(",", ":"))


def _attributes(event_class: EventClass, event: Event) -> dict[str, Any]:
    """What the class requires, and a base event does not."""
    user = {"name": _name(event, "key_id", "actor"), "account": {"name": _name(event, "tenant")}}
    actor = {"user": {"name": _name(event, "actor", "key_id")}}
    subject = _name(event, "draft", "worker", "approval", "digest", "tenant", "key", "log")
    required: Mapping[EventClass, dict[str, Any]] = {
        EventClass.API_ACTIVITY: {
            "actor": actor,
            "api": {
                "operation": _name(event, "route", "operation", "type"),
                "request": {"uid": _name(event, "request_id", "id")},
            },
            "src_endpoint": {"name": _name(event, "client")},
        },
        EventClass.AUTHENTICATION: {"user": user, "service": {"name": "console"}},
        EventClass.ACCOUNT_CHANGE: {"user": user, "actor": actor},
        EventClass.ENTITY_MANAGEMENT: {
            "entity": {"name": subject, "type": event.type.partition(".")[0]},
            "actor": actor,
        },
        EventClass.APPLICATION_LIFECYCLE: {
            "app": {"name": _name(event, "worker", "bundle", "gateway", "log"), "vendor_name": VENDOR}
        },
        EventClass.DETECTION_FINDING: {
            "finding_info": {"title": f"egress check: {_name(event, 'result')}", "uid": _name(event, "id")}
        },
    }
    return required.get(event_class, {})


def _name(event: Event, *fields: str) -> str:
    """The first of these fields that the event has."""
    found = next((event.fields[name] for name in fields if name in event.fields), "unknown")
    return str(found)[:_MOST_CHARACTERS]
