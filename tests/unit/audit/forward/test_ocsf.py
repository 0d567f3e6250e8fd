"""
Every entry type is an OCSF event with all that its class requires.

Requirements are those of github.com/ocsf/ocsf-schema, tag v1.2.0 (7234a336ddcd): `events/` and `objects/`.
"""

import json

import pytest

from appliance.audit.entry_types import REGISTRY, EntryType, Kind
from appliance.audit.forward.events import CHECKPOINT
from appliance.audit.forward.ocsf import CLASSES, OTHER, EventClass, render_ocsf
from tests.unit.audit.forward.test_events import event_of

BASE = {"activity_id", "category_uid", "class_uid", "type_uid", "severity_id", "time", "metadata"}
REQUIRED = {
    EventClass.BASE_EVENT: set(),
    EventClass.DETECTION_FINDING: {"finding_info"},
    EventClass.ACCOUNT_CHANGE: {"user"},
    EventClass.AUTHENTICATION: {"user", "service"},  # service or dst_endpoint
    EventClass.ENTITY_MANAGEMENT: {"entity"},
    EventClass.APPLICATION_LIFECYCLE: {"app"},
    EventClass.API_ACTIVITY: {"actor", "api", "src_endpoint"},
}
ACTIVITIES = {
    EventClass.BASE_EVENT: set(),
    EventClass.DETECTION_FINDING: {1, 2, 3},
    EventClass.ACCOUNT_CHANGE: set(range(1, 12)),
    EventClass.AUTHENTICATION: set(range(1, 7)),
    EventClass.ENTITY_MANAGEMENT: {1, 2, 3, 4},
    EventClass.APPLICATION_LIFECYCLE: {1, 2, 3, 4},
    EventClass.API_ACTIVITY: {1, 2, 3, 4},
}
OBJECTS = {
    "metadata": {"product", "version"},
    "product": {"vendor_name", "name"},  # name or uid
    "actor": {"user"},  # or one of five others
    "user": {"name"},  # or account or uid
    "account": {"name"},
    "api": {"operation"},
    "request": {"uid"},
    "src_endpoint": {"name"},  # or one of seven others
    "service": {"name"},
    "entity": {"name"},
    "app": {"vendor_name", "name"},
    "finding_info": {"title", "uid"},
}
VALUES = {Kind.INTEGER: 1, Kind.BOOLEAN: True, Kind.DECIMAL: "1.5", Kind.STRINGS: ["a"], Kind.STRING: "text"}


def missing(document):
    """Names of required members that objects lack, at any depth."""
    for name, value in document.items():
        if isinstance(value, dict) and name != "unmapped":
            yield from (f"{name}.{each}" for each in OBJECTS[name] if not value.get(each))
            yield from missing(value)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("kind", EntryType)
def test_an_entry_has_what_its_class_requires(kind, complete):
    """With all of its fields, and with those that it must have."""
    fields = {
        field.name: field.values[0] if field.values else VALUES[field.kind]
        for field in REGISTRY[kind].fields.values()
        if field.required or complete
    }
    leaf, event = event_of(kind.value, **fields)
    document = json.loads(render_ocsf(event, short=False))
    event_class, activity = CLASSES[kind]
    assert BASE | REQUIRED[event_class] <= document.keys()
    assert list(missing(document)) == []
    assert document["type_uid"] == document["class_uid"] * 100 + activity
    assert document["category_uid"] == event_class // 1000
    assert activity in ACTIVITIES[event_class] | {OTHER}
    assert document["time"] == 1795219200000
    assert document["unmapped"] == json.loads(leaf)
    assert document["raw_data"] == event.evidence


def test_every_type_of_the_registry_has_a_class():
    """A new one must be given one, and no other is left behind."""
    assert set(CLASSES) == {*EntryType, CHECKPOINT}
