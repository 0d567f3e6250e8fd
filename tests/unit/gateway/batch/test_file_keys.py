"""Which erasures destroy files' keys: those of all content before a time, not those of single requests."""

import os

import pytest

from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.audit.content.payloads import Selection
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


def doomed(keys, *, before_ms=0, requests=(), everything=False):
    selection = Selection(tenant="acme", requests=requests, before_ms=before_ms)
    return {name.key_id for name in doomed_keys(keys, selection, (), everything=everything)}


def test_erase_before_a_time_includes_earlier_file_keys(made):
    keys, early, late, _ = made
    assert doomed(keys, before_ms=EARLY_MS) == set()
    assert doomed(keys, before_ms=EARLY_MS + 1) == {early}
    assert doomed(keys, before_ms=LATE_MS + 1) == {early, late}


def test_erase_all_includes_file_keys_and_named_requests_do_not(made):
    keys, early, late, _ = made
    assert doomed(keys, everything=True) == {early, late}
    assert doomed(keys, requests=("0" * 26,), before_ms=LATE_MS + 1) == set()


def test_every_file_has_its_own_key(made):
    keys, early, late, theirs = made
    assert len({early, late, theirs}) == 3
    assert keys.current("acme", Purpose.WRAPPING).key_id not in {early, late}
