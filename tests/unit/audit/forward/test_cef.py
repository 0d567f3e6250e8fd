"""CEF is escaped as its specification asks, so that no field can pass for another."""

import re

from appliance.audit.forward.cef import render_cef
from tests.unit.audit.forward.test_events import event_of

PAIR = re.compile(r"(\w+)=((?:\\.|[^\\=])*?)(?= \w+=|$)")


def parse(text):
    """Header fields and extension of a CEF text, unescaped."""
    *header, extension = re.split(r"(?<!\\)\|", text, maxsplit=7)
    values = {
        key: re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r"}.get(match[1], match[1]), value)
        for key, value in PAIR.findall(extension)
    }
    return header, values


def test_fields_survive_escaping():
    """Backslash, equals sign and line end in values."""
    reason = "a=b \\ c|d\nsuser=evil"
    _, event = event_of("hold.placed", tenant="acme", actor="cli:root", reason=reason)
    header, values = parse(render_cef(event, short=False))
    assert header[0] == "CEF:0"
    assert header[4:] == ["hold.placed", "hold placed", "1"]
    assert values["reason"] == reason
    assert values["suser"] == "cli:root"
    assert (values["cs1Label"], values["cs1"]) == ("tenant", "acme")
    assert (values["cs3Label"], values["cs3"]) == ("leafHash", event.leaf_hash)
    assert (values["cs4Label"], values["cs4"]) == ("evidence", event.evidence)
    assert (values["cn1Label"], values["cn1"], values["rt"]) == ("index", "7", "1795219200000")


def test_header_fields_are_escaped():
    """The type of an altered row."""
    _, event = event_of("audit.gap", entries=1)
    object.__setattr__(event, "type", "a|b\\c\nd")
    header, _ = parse(render_cef(event, short=False))
    assert header[4] == r"a\|b\\c d"
