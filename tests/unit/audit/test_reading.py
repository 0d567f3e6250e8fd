"""Reading the log leaves an entry in it, even while others write."""

import sqlite3
from contextlib import closing

import pytest

from appliance.audit.append import append_entry
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import root_from_leaf_hashes
from appliance.audit.reading import Reading
from appliance.audit.store import Head
from appliance.errors import AuditError, AuditVerificationError

READING = Reading(account="alice", operation="tail", start=3, end=7, purpose="ticket 12")


@pytest.fixture
def write(clock):
    def write_(store, reading=READING):
        return append_entry(
            store, EntryType.AUDIT_READ, reading.fields(), origin="appliance.test/audit", clock=clock
        )

    return write_


def test_reading_records_account_range_and_purpose(memory_store, write):
    """The entry names account, operation, range and purpose, and is a proper leaf of the tree."""
    assert write(memory_store) == 0
    assert write(memory_store, Reading(account="bob", operation="show", start=1, end=2)) == 1
    first, second = (decode(leaf.leaf) for leaf in memory_store.stored)
    assert (first.type, first.log) == (EntryType.AUDIT_READ, "appliance.test/audit")
    assert first.fields == {
        "actor": "cli:alice",
        "operation": "tail",
        "start": 3,
        "end": 7,
        "purpose": "ticket 12",
    }
    assert "purpose" not in second.fields
    hashes = [leaf.leaf_hash for leaf in memory_store.stored]
    assert memory_store.stored_head.root == root_from_leaf_hashes(hashes)
    assert first.id != second.id


def test_entry_is_appended_after_those_of_others(memory_store, write):
    """Whatever was appended between looking and writing stays where it is."""
    head, raced = memory_store.head, []

    def race():
        found = head()
        if not raced:
            raced.append(True)
            write(memory_store, Reading(account="bob", operation="show", start=0, end=1))
        return found

    memory_store.head = race
    assert write(memory_store) == 1
    assert [decode(leaf.leaf).fields["actor"] for leaf in memory_store.stored] == ["cli:bob", "cli:alice"]


def test_a_failing_database_is_reported(tmp_path, sql_store, write):
    """A reading that could not be written is an error, and nothing is in the log."""
    with closing(sqlite3.connect(tmp_path / "audit.db")) as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON audit_leaves BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
    with pytest.raises(AuditError):
        write(sql_store)
    assert sql_store.head().size == 0


def test_a_head_that_does_not_add_up_is_not_continued(memory_store, write):
    """A tampered head is not made to look whole by reading the log."""
    write(memory_store)
    head = memory_store.stored_head
    memory_store.stored_head = Head(size=head.size, root=bytes(32), subtrees=head.subtrees)
    with pytest.raises(AuditVerificationError, match="damaged"):
        write(memory_store)
    assert len(memory_store.stored) == 1
