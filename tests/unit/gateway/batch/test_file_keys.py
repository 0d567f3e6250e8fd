"""Which keys of files an erasure by time destroys."""

import os

import pytest

from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.audit.content.retention import doomed_keys
from tests.clock import Clock

EARLY_MS, LATE_MS = 1_000_000, 2_000_000


@pytest.fixture
def made(tmp_path):
    """The key directory, with two file keys of one tenant and one of another."""
    clock = Clock(0.0)
    keys = PayloadKeys(tmp_path / "k", master_key=None, key_days=7, clock=clock, random_bytes=os.urandom)
    clock.now = EARLY_MS / 1000
    early, theirs = keys.make("acme", Purpose.FILE), keys.make("other", Purpose.FILE)
    clock.now = LATE_MS / 1000
    return keys, early.key_id, keys.make("acme", Purpose.FILE).key_id, theirs.key_id


def doomed(keys, *, before_ms=0, created_since=frozenset):
    names = keys.names("acme")
    found = doomed_keys(names, before_ms=before_ms, key_ids=(), created_since=created_since)
    return {name.key_id for name in found}


def test_erase_before_a_time_includes_earlier_file_keys(made):
    keys, early, late, _ = made
    assert doomed(keys, before_ms=EARLY_MS) == set()
    assert doomed(keys, before_ms=EARLY_MS + 1) == {early}
    assert doomed(keys, before_ms=LATE_MS + 1) == {early, late}


def test_key_of_a_file_that_the_log_recorded_later_stays(made):
    """Its gateway's clock was behind."""
    keys, early, late, _ = made
    young = {early.removeprefix("acme.")}
    assert doomed(keys, before_ms=LATE_MS + 1, created_since=lambda: young) == {late}


def test_every_file_has_its_own_key(made):
    keys, early, late, theirs = made
    assert len({early, late, theirs}) == 3
    assert keys.current("acme", Purpose.WRAPPING).key_id not in {early, late}
