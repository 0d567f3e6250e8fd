"""One suite for kept content on SQLite and on a real PostgreSQL."""

from contextlib import closing

import pytest

from appliance.audit.content.payloads import CHUNK, Found, Selection, SqlPayloadStore, first_id
from appliance.audit.content.sealing import Part
from appliance.audit.entry import Entry, encode, format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.store import Head, Leaf, SqlAuditStore
from appliance.errors import AuditUnavailableError
from tests.audit_log import intent, outcome
from tests.contract.payloads import START_MS, payload


@pytest.fixture
def payloads(url):
    SqlAuditStore(url).close()  # makes the tables of a SQLite file
    with closing(SqlPayloadStore(url)) as store:
        yield store


def test_payloads_come_back_as_they_were_added_in_order_of_request(payloads):
    """Every byte, by request and part and all together."""
    added = [payload(number, part=part) for number in (2, 0, 1) for part in (Part.RESPONSE, Part.REQUEST)]
    payloads.add(added)
    assert list(payloads.all()) == sorted(added, key=lambda each: (each.request_id, each.part))
    assert all(payloads.get(each.request_id, each.part) == each for each in added)
    assert payloads.get(first_id(5), Part.REQUEST) is None


def test_a_part_is_kept_once(payloads):
    """What a leaf names cannot be replaced; nothing of the refused group is kept."""
    first = payload(0)
    payloads.add([first])
    with pytest.raises(AuditUnavailableError, match="already"):
        payloads.add([payload(1), payload(0)])
    assert list(payloads.all()) == [first]


def test_selection_by_time_covers_earlier_requests(payloads):
    """Of that tenant, to the millisecond."""
    payloads.add([payload(number, key_id=f"acme.{number}") for number in range(4)])
    payloads.add([payload(0, "other", Part.RESPONSE, "other.0")])
    assert payloads.find(Selection(tenant="acme", before_ms=START_MS)).payloads == 0
    selection = Selection(tenant="acme", before_ms=START_MS + 1001)
    assert payloads.find(selection) == Found(payloads=2, requests=(), key_ids=("acme.0", "acme.1"))
    assert payloads.tenants_before(START_MS + 1) == ["acme", "other"]
    assert payloads.delete(selection) == 2
    payloads.scrub()
    assert [each.key_id for each in payloads.all()] == ["other.0", "acme.2", "acme.3"]
    assert payloads.tenants_before(START_MS + 1) == ["other"]


def record(url, *entries):
    """Append entries to the log: type and members."""
    with closing(SqlAuditStore(url)) as log:
        for entry_type, fields in entries:
            index = log.head().size
            request_id = fields.get("request_id")
            leaf = encode(
                Entry(
                    log="x/y",
                    id=new_entry_id(index, bytes(10)),
                    type=entry_type,
                    time=format_time(START_MS),
                    fields=fields,
                )
            )
            tree = CompactRange(index, log.head().subtrees)
            tree.append(hash_leaf(leaf))
            added = Leaf(
                index=index,
                leaf=leaf,
                leaf_hash=hash_leaf(leaf),
                type=str(entry_type),
                request_id=request_id,
            )
            log.append([added], expected=log.head(), new=Head.of(tree))


def asked(number):
    return EntryType.REQUEST_INTENT, intent(first_id(START_MS + 1000 * number))


def answered(number):
    return EntryType.REQUEST_OUTCOME, outcome(first_id(START_MS + 1000 * number))


def test_a_selection_by_the_log_covers_what_its_entries_name(payloads, url):
    """Whatever the times in ids say; an answer by its own entry, a sample with its body."""
    payloads.add([payload(number) for number in (0, 1, 2)])
    payloads.add([payload(0, part=Part.RESPONSE), payload(1, part=Part.RESPONSE)])
    payloads.add([payload(0, part=Part.SAMPLE), payload(1, "other", Part.SAMPLE)])
    assert payloads.unlogged("acme", None) == tuple(first_id(START_MS + 1000 * at) for at in (0, 1, 2))
    record(url, asked(1), asked(0), answered(0), answered(1))
    assert payloads.size() == 4
    assert payloads.unlogged("acme", None) == (first_id(START_MS + 2000),)
    assert payloads.unlogged("acme", START_MS + 2000) == ()
    assert payloads.find(Selection(tenant="acme", entry_index=3)).payloads == 3
    assert payloads.find(Selection(tenant="acme", before_index=1, entry_index=4)).payloads == 2
    assert payloads.find(Selection(tenant="acme", before_ms=START_MS + 1, before_index=1)).payloads == 0
    assert payloads.delete(Selection(tenant="acme", entry_index=3)) == 4
    assert [(each.request_id, each.part) for each in payloads.all()] == [
        (first_id(START_MS + 1000), Part.RESPONSE),
        (first_id(START_MS + 2000), Part.REQUEST),
    ]


def test_store_says_when_the_log_reached_a_time_and_what_is_dated_after_one(payloads, url):
    """Of the requests by their ids, the one that was recorded first."""
    payloads.add([payload(0), payload(3), payload(5, "other"), payload(5, "other", Part.RESPONSE)])
    record(url, asked(0), asked(5), asked(3))
    assert payloads.reached(START_MS + 1, START_MS + 6000) == 1
    assert payloads.reached(START_MS + 1, START_MS + 4000) == 2
    assert payloads.reached(START_MS + 1, START_MS) is None
    assert payloads.misdated(START_MS + 4000) == {"other": 2}
    assert payloads.misdated(START_MS + 6000) == {}


def test_store_says_which_files_and_batches_the_log_recorded_since(payloads, url):
    ulids = [first_id(number) for number in range(3)]
    common = {"tenant": "acme", "key_id": "k"}
    a_file = {**common, "purpose": "batch", "bytes": 1, "encrypted": True}
    a_batch = {**common, "route": "r", "file": "file-x"}
    record(
        url,
        (EntryType.FILE_CREATED, {**a_file, "file": f"file-{ulids[0]}"}),
        (EntryType.FILE_CREATED, {**a_file, "file": f"file-{ulids[1]}"}),
        (EntryType.BATCH_CREATED, {**a_batch, "batch": f"batch_{ulids[2]}"}),
    )
    assert payloads.created_since(1) == set(ulids[1:])


def test_a_selection_by_name_takes_those_and_no_other_tenants(payloads):
    """However many names there are."""
    count = CHUNK + 3
    payloads.add([payload(number) for number in range(count)] + [payload(count, "other")])
    names = tuple(first_id(START_MS + 1000 * number) for number in (*range(1, count), count, count + 1))
    selection = Selection(tenant="acme", requests=names)
    found = payloads.find(selection)
    assert (found.payloads, found.requests, found.key_ids) == (count - 1, names[:-2], ("acme.1",))
    assert payloads.delete(selection) == count - 1
    assert [each.tenant for each in payloads.all()] == ["acme", "other"]


def test_wrapped_keys_are_replaced_and_nothing_else(payloads):
    """Until none is left under the old one."""
    kept = [payload(number) for number in range(3)]
    payloads.add([*kept, payload(3, key_id="acme.2")])
    rows = payloads.wrapped_with("acme.1")
    assert sorted(rows) == sorted((each.request_id, "request", each.sealed.wrapped_key) for each in kept)
    payloads.rewrap([(request, part, bytes(40)) for request, part, _ in rows], "acme.9")
    assert payloads.wrapped_with("acme.1") == []
    for before in kept:
        after = payloads.get(before.request_id, Part.REQUEST)
        assert (after.key_id, after.sealed.wrapped_key) == ("acme.9", bytes(40))
        assert (after.sealed.blob, after.tenant) == (before.sealed.blob, "acme")
    assert len(payloads.wrapped_with("acme.2")) == 1


def test_a_log_without_holds_has_none(payloads):
    """And can be asked."""
    assert payloads.holds() == {}


def test_a_database_that_fails_is_an_error_of_ours(payloads, execute, url):
    """One line, for every kind of question."""
    execute(url, "ALTER TABLE audit_payloads RENAME TO elsewhere")
    for call in (
        lambda: payloads.add([payload(0)]),
        lambda: list(payloads.all()),
        lambda: payloads.find(Selection(tenant="acme", before_ms=1)),
        lambda: payloads.delete(Selection(tenant="acme", before_ms=1)),
    ):
        with pytest.raises(AuditUnavailableError) as caught:
            call()
        assert "\n" not in str(caught.value)
