"""Messages are RFC 5424, framed by RFC 5425, and short enough for every receiver."""

import json
import re

import pytest

from appliance.audit import verify
from appliance.audit.checkpoint import Checkpoint
from appliance.audit.entry import MAX_LEAF_BYTES
from appliance.audit.entry_types import EntryType
from appliance.audit.forward.cef import render_cef
from appliance.audit.forward.events import (
    MAX_MESSAGE_BYTES,
    checkpoint_event,
    entry_event,
    render_json,
    syslog_message,
)
from appliance.audit.forward.ocsf import render_ocsf
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.stored import Leaf, StoredCheckpoint
from tests.forwarding import split_frames

FORMATS = {"json": render_json, "ocsf": render_ocsf, "cef": render_cef}
HEADER = re.compile(rb"<(\d{1,3})>1 (\S+) (\S+) sovereign-appliance - (\S+) - (.*)", re.DOTALL)
TIME = "2026-11-21T00:00:00.000Z"


def event_of(kind, index=7, **fields):
    """The event of an entry with these fields."""
    entry = {"id": "0" * 26, "log": "appliance.test/audit", "time": TIME, "type": kind, "v": 1, **fields}
    leaf = verify.canonical(entry)
    return leaf, entry_event(Leaf.of(index, leaf, EntryType(kind)))


def message_of(event, render=render_json, host="gateway-1"):
    (message,) = split_frames(syslog_message(event, render, host=host))
    return message


@pytest.mark.parametrize("render", FORMATS.values(), ids=FORMATS)
def test_a_message_is_rfc_5424_and_its_leaf_can_be_recovered(render):
    """Byte for byte, whatever the format."""
    leaf, event = event_of("hold.placed", tenant='ac=me|"\\ü', actor="cli:root", reason="a\nb")
    message = message_of(event, render)
    assert HEADER.fullmatch(message).groups()[:4] == (b"110", TIME.encode(), b"gateway-1", b"hold.placed")
    assert b"\n" not in message
    kind, index, digest, content = verify._PROOF.search(message).groups()
    assert (kind, index) == (b"leaf", b"7")
    assert (verify._word(digest), verify._word(content)) == (hash_leaf(leaf), leaf)


def test_json_is_the_entry_as_it_is_in_the_log_with_index_and_hash():
    leaf, event = event_of("audit.read", actor="cli:root", operation="tail")
    document = json.loads(HEADER.fullmatch(message_of(event))[5])
    assert document.pop("evidence") == event.evidence
    assert document == {
        "type": "audit.read",
        "index": 7,
        "leaf_hash": hash_leaf(leaf).hex(),
        "entry": json.loads(leaf),
    }


@pytest.mark.parametrize("filler", ["x", "=", "é", "漢"])
@pytest.mark.parametrize("render", FORMATS.values(), ids=FORMATS)
def test_no_message_is_longer_than_receivers_should_take(render, filler):
    """The largest leaf there is, in the characters that take most room when escaped."""
    fields = {"tenant": "acme", "key_id": "abcd2345", "reason": ""}
    room = MAX_LEAF_BYTES - len(event_of("request.denied", **fields)[0])
    fields["reason"] = filler * (room // len(filler.encode()))
    leaf, event = event_of("request.denied", **fields)
    assert MAX_LEAF_BYTES - 4 < len(leaf) <= MAX_LEAF_BYTES
    message = message_of(event, render)
    assert len(message) <= MAX_MESSAGE_BYTES
    assert verify._word(verify._PROOF.search(message)[4]) == leaf


@pytest.mark.parametrize("render", FORMATS.values(), ids=FORMATS)
def test_the_largest_checkpoint_of_a_log_with_two_keys_fits(render):
    tree = CompactRange(2**40 - 1, [bytes(32)] * 40)
    head = Checkpoint(origin="appliance.test/audit", size=tree.size, root=bytes(32))
    note = StoredCheckpoint(size=tree.size, note="n" * 3700, time=TIME)
    assert len(message_of(checkpoint_event(note, head, tree), render)) <= MAX_MESSAGE_BYTES


def test_an_altered_entry_is_sent_as_it_is():
    """The receiver judges it; nothing of it reaches the header."""
    for leaf in (b"no JSON", b"[]", b'{"time":"<1>1 2026"}', b'{"time":7}', b"[" * 5000):
        event = entry_event(Leaf(index=1, leaf=leaf, leaf_hash=b"", type="x\ny", request_id=None))
        header = HEADER.fullmatch(message_of(event, host="a b"))
        assert header.groups()[1:4] == (b"-", b"-", b"-")
        assert verify._word(verify._PROOF.search(header[5])[4]) == leaf


@pytest.mark.parametrize(
    ("kind", "fields", "priority"),
    [
        ("request.outcome", {}, 110),
        ("request.denied", {}, 109),
        ("worker.failed", {}, 108),
        ("audit.gap", {}, 107),
        ("egress.attested", {"result": "closed"}, 110),
        ("egress.attested", {"result": "open"}, 107),
    ],
)
def test_severity_tells_incidents_from_routine(kind, fields, priority):
    """Facility 13 is the log audit; the rest is the severity."""
    assert message_of(event_of(kind, **fields)[1]).startswith(b"<%d>" % priority)
