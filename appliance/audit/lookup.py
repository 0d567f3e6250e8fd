"""Finds entries of the log by index or by request, and verifies them; for operators and for commands."""

from contextlib import closing
from dataclasses import dataclass

from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_receipt
from appliance.audit.store import SqlAuditStore
from appliance.audit.stored import Leaf
from appliance.audit.verify import MEANINGS, ExitCode, parse_keys, verify_receipt
from appliance.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    leaf: bytes
    text: str
    """Of a `.tlog-proof` file."""
    verdict: ExitCode
    """What the auditor's verifier says of both."""
    meaning: str
    """The same in words."""
    covered: int
    """Entries that the signed checkpoint covers."""


def entries_of(store: SqlAuditStore, name: str) -> list[Leaf]:
    """The entry of an index, or those of a request; raises ConfigurationError if there are none."""
    if name.isascii() and name.isdecimal():
        index = int(name)
        if found := store.leaves(index, index + 1):
            return found
        if index < store.disposal().below:
            raise ConfigurationError(f"entry {index} was disposed of")
        raise ConfigurationError(f"the log has no entry {index}")
    if found := store.leaf_by_request(name):
        return found
    if any(leaf.request_id == name for leaf in store.accepted_leaves()):
        raise ConfigurationError(f"the entry of request {name} waits to be integrated: try again in seconds")
    raise ConfigurationError(f"the log has no request {name}")


def index_of(store: SqlAuditStore, name: str) -> int:
    """Of the entry that a client's header names: by index, or by request until it has one."""
    if name.isascii() and name.isdecimal():
        return int(name)
    found = entries_of(store, name)
    return next((leaf.index for leaf in found if leaf.type == EntryType.REQUEST_INTENT), found[0].index)


def receipt_of(store: SqlAuditStore, index: int, vkey: str) -> Receipt:
    """Raises as `export_receipt`, also before a checkpoint covers the entry."""
    leaf, text = export_receipt(store, index)
    report = verify_receipt(text.encode(), leaf, parse_keys(vkey), None)
    with closing(report.state):
        verdict = report.exit_code
    meaning = "; ".join(report.problems) or MEANINGS[verdict]
    return Receipt(leaf=leaf, text=text, verdict=verdict, meaning=meaning, covered=report.size)
