"""Time stamps are kept whole, once for a size, and cannot be changed by an ordinary statement."""

import pytest
from sqlalchemy.exc import DatabaseError

from appliance.audit.timestamps import store as timestamp_store
from appliance.audit.timestamps.store import Timestamp, Timestamps
from appliance.errors import AuditVerificationError


def stamp(size, token=b"token"):
    return Timestamp(size=size, token=token, time=size)


def test_time_stamps_are_write_once(url, open_store, execute):
    """The first gateway's stays; the database's owner can change it, which the auditor detects."""
    one, other = (Timestamps(open_store(url).database) for _ in range(2))
    one.save(stamp(3, b"first\0\xff"))
    other.save(stamp(3, b"second"))
    assert list(one.all()) == [stamp(3, b"first\0\xff")]
    for statement in ("UPDATE audit_timestamps SET size = 4", "DELETE FROM audit_timestamps"):
        with pytest.raises(DatabaseError, match="write-once"):
            execute(url, statement)
    assert list(other.all()) == [stamp(3, b"first\0\xff")]


def test_time_stamps_are_read_in_order_of_size(url, open_store, monkeypatch):
    monkeypatch.setattr(timestamp_store, "CHUNK", 2)
    stamps = Timestamps(open_store(url).database)
    assert stamps.newest() is None
    for size in (900, 7, 20, 2**40, 1):
        stamps.save(stamp(size))
    assert [each.size for each in stamps.all()] == [1, 7, 20, 900, 2**40]
    assert stamps.newest() == stamp(2**40)
    with pytest.raises(AuditVerificationError, match="no checkpoint of this log"):
        stamps.checkpoint_of(bytes(32))
