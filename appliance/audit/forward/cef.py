"""
Events in ArcSight's Common Event Format.  Pure.

Source: "Micro Focus Security ArcSight Common Event Format", version 26: header and extension escaping, keys.
"""

from appliance import __version__
from appliance.audit.forward.events import PRODUCT, VENDOR, Event, Severity

_SEVERITIES = {Severity.INFORMATIONAL: 1, Severity.LOW: 3, Severity.MEDIUM: 6, Severity.HIGH: 8}
_KEYS = {
    "key_id": "suid",
    "actor": "suser",
    "route": "request",
    "outcome": "outcome",
    "reason": "reason",
    "status": "cn2",
    "request_id": "externalId",
    "tenant": "cs1",
    "model": "cs2",
    "worker": "cs5",
}
_LABELS = {
    "cn1": "index",
    "cn2": "status",
    "cs1": "tenant",
    "cs2": "model",
    "cs3": "leafHash",
    "cs4": "evidence",
}
_LABELS |= {"cs5": "worker"}


def render_cef(event: Event, *, short: bool) -> str:
    header = (VENDOR, PRODUCT, __version__, event.type, event.type.replace(".", " "))
    extension = {"rt": str(event.milliseconds), "cn1": str(event.index)}
    if not short:
        extension |= {key: _text(event.fields[name]) for name, key in _KEYS.items() if name in event.fields}
    if event.leaf_hash:
        extension["cs3"] = event.leaf_hash
    extension["cs4"] = event.evidence
    labels = {f"{key}Label": _LABELS[key] for key in extension if key in _LABELS}
    pairs = " ".join(f"{key}={_escape_value(value)}" for key, value in {**extension, **labels}.items())
    return f"CEF:0|{'|'.join(map(_escape_header, header))}|{_SEVERITIES[event.severity]}|{pairs}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _escape_header(text: str) -> str:
    return " ".join(text.splitlines()).replace("\\", "\\\\").replace("|", "\\|")


def _escape_value(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("=", "\\=")
    return escaped.replace("\r", "\\r").replace("\n", "\\n")
