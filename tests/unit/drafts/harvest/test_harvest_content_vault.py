"""
A sample lives as long as what it is of.
"""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.audit.content.payloads import Selection, export_payloads
from appliance.audit.content.samples import SampleOutcome, SqlSampleStore
from appliance.audit.content.sealing import LOGGED, Part
from appliance.audit.entry_types import EntryType
from appliance.drafts.harvest.content_vault import TRIES
from appliance.drafts.harvest.conversation import Skipped
from appliance.errors import AuditUnavailableError, DraftRefusedError
from tests.unit.drafts.harvest.harvest_site import close_site, open_site, sample_of

KEPT = set(LOGGED)


def execute(site, statement, *values):
    """Write to the database file directly."""
    with closing(sqlite3.connect(site.directory / "audit.db")) as database, database:
        database.execute(statement, values)


def test_body_and_answer_are_opened_and_checked(site):
    request = site.keep("acme", b"body", b"answer")
    assert site.vault.open_content(request, "acme") == (b"body", b"answer")


def test_content_that_differs_from_the_log_is_skipped(site):
    """Altered, swapped, or of a tenant without permission."""
    altered, exchanged, others = (site.keep("acme", b"body", b"answer") for _ in range(3))
    execute(site, "UPDATE audit_payloads SET nonce = zeroblob(12) WHERE request_id = ?", altered)
    change = "UPDATE audit_payloads SET part = ? WHERE request_id = ? AND part = ?"
    execute(site, change, "elsewhere", exchanged, "request")
    execute(site, change, "request", exchanged, "response")
    execute(site, "UPDATE audit_payloads SET tenant = 'clinic' WHERE request_id = ?", others)
    assert site.vault.open_content(altered, "acme") is Skipped.ALTERED
    assert site.vault.open_content(exchanged, "acme") is Skipped.ALTERED
    assert site.vault.open_content(others, "clinic") is Skipped.ALTERED


def test_sample_is_kept_sealed_and_read_back(site):
    """With a salt, under the key of its request's body, never in clear."""
    request = site.keep("acme")
    kept = site.vault.keep(sample_of(request))
    assert replace(kept, salt="") == sample_of(request)
    assert len(kept.salt) == 32
    assert site.vault.read(request) == kept
    assert site.parts(request) == {*KEPT, Part.SAMPLE}
    body, sealed = (site.store.get(request, part) for part in (Part.REQUEST, Part.SAMPLE))
    assert (sealed.tenant, sealed.key_id) == ("acme", body.key_id)
    for file in site.directory.glob("audit.db*"):
        assert b"token_ids" not in file.read_bytes()


def test_body_wrapped_by_an_older_key_gives_its_sample_that_key(site):
    """Not the tenant's newest key: both must be destroyed together."""
    request = site.keep("acme")
    site.clock.now += 8 * 86400
    site.keep("acme")
    assert len(site.keys.names("acme")) == 2
    site.vault.keep(sample_of(request))
    assert site.store.get(request, Part.SAMPLE).key_id == site.store.get(request, Part.REQUEST).key_id


def test_same_sample_again_changes_nothing(site):
    """So a killed harvest can be repeated."""
    request = site.keep("acme")
    first = site.vault.keep(sample_of(request))
    row = site.store.get(request, Part.SAMPLE)
    assert site.vault.keep(sample_of(request)) == first
    assert site.store.get(request, Part.SAMPLE) == row


def test_sample_with_other_tokens_is_replaced(site):
    """Also if it cannot be read."""
    request = site.keep("acme")
    site.vault.keep(sample_of(request))
    other = site.vault.keep(sample_of(request, tokenizer="sha256:other", token_ids=(1, 2, 3, 4)))
    assert site.vault.read(request) == other
    execute(site, "UPDATE audit_payloads SET ciphertext = zeroblob(90) WHERE part = 'sample'")
    with pytest.raises(DraftRefusedError, match="does not open"):
        site.vault.read(request)
    assert site.vault.read(site.vault.keep(sample_of(request)).request_id) is not None


def test_sample_moved_to_another_request_is_refused(site):
    first, second = site.keep("acme"), site.keep("acme")
    site.vault.keep(sample_of(first))
    execute(site, "UPDATE audit_payloads SET request_id = ? WHERE part = 'sample'", second)
    with pytest.raises(DraftRefusedError):
        site.vault.read(second)


# What ends content ends its sample.


def test_erasing_a_request_erases_its_sample_and_the_entry_counts_content_only(site):
    """Row and key are gone; what else the key wrapped still opens, samples included."""
    erased, stays = site.keep("acme"), site.keep("acme", b"x", b"y")
    for request in (erased, stays):
        site.vault.keep(sample_of(request))
    key = site.store.get(erased, Part.SAMPLE).key_id
    done = site.erase("acme", erased)
    assert (done.payloads, done.keys) == (2, (key,))
    (entry,) = site.entries(EntryType.ERASURE)
    assert (entry["payloads"], entry["requests"]) == (2, [erased])
    assert site.parts(erased) == set()
    assert site.vault.read(erased) is None
    assert site.keys.find(key, Purpose.WRAPPING) is None
    assert replace(site.vault.read(stays), salt="") == sample_of(stays)
    assert site.vault.open_content(stays, "acme") == (b"x", b"y")


def test_erasing_a_tenant_or_a_time_takes_samples_along(site):
    requests = [site.keep("acme") for _ in range(3)]
    for request in requests:
        site.vault.keep(sample_of(request))
    other = site.keep("clinic")
    site.vault.keep(sample_of(other, "clinic"))
    assert site.erase("acme").payloads == 6
    assert [site.parts(request) for request in requests] == [set()] * 3
    assert site.keys.names("acme") == []
    assert site.vault.read(other) is not None
    site.erase("clinic", before_ms=int(site.clock() * 1000))
    assert site.parts(other) == set()


def test_copy_of_the_database_from_before_opens_no_sample(site, tmp_path):
    request = site.keep("acme")
    site.vault.keep(sample_of(request))
    with closing(sqlite3.connect(site.directory / "audit.db")) as live:
        live.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
    site.erase("acme", request)
    with closing(SqlSampleStore(f"sqlite:///{tmp_path / 'copy.db'}")) as copy:
        sealed = copy.get(request, Part.SAMPLE)
        assert site.keys.find(sealed.key_id, Purpose.WRAPPING) is None


@pytest.mark.parametrize("step", ["delete", "wrapped_with", "scrub"])
def test_erasure_that_was_killed_takes_the_sample_at_the_next_start(site, step, monkeypatch):
    request, stays = site.keep("acme"), site.keep("acme")
    for each in (request, stays):
        site.vault.keep(sample_of(each))

    def die(*_arguments, **_more):
        message = "killed"
        raise AuditUnavailableError(message)

    with monkeypatch.context() as patch:
        patch.setattr(SqlSampleStore, step, die)
        with pytest.raises(AuditUnavailableError):
            site.erase("acme", request)
        if step == "delete":
            assert site.vault.read(request) is None
            assert site.vault.open_content(request, "acme") is Skipped.ERASED
    site.resume()
    assert site.parts(request) == set()
    again = open_site(site.directory, seed=5)
    assert replace(again.vault.read(stays), salt="") == sample_of(stays)
    close_site(again)


def test_many_requests_with_samples_make_entries_whose_sum_is_right(site):
    requests = [site.keep("acme") for _ in range(65)]
    for request in requests:
        site.vault.keep(sample_of(request))
    done = site.erase("acme", *requests)
    counts = [entry["payloads"] for entry in site.entries(EntryType.ERASURE)]
    assert (len(done.entries), done.payloads, sum(counts)) == (2, 130, 130)
    assert min(counts) >= 0


def test_orphaned_sample_is_erased(site):
    """Its key is destroyed, and the entry names the request."""
    request = site.keep("acme")
    site.vault.keep(sample_of(request))
    execute(site, "DELETE FROM audit_payloads WHERE part <> 'sample'")
    done = site.erase("acme", request)
    assert (done.payloads, len(done.keys), site.parts(request)) == (0, 1, set())
    (entry,) = site.entries(EntryType.ERASURE)
    assert (entry["payloads"], entry["requests"]) == (0, [request])


def test_export_for_an_auditor_holds_no_sample(site, tmp_path):
    request = site.keep("acme")
    site.vault.keep(sample_of(request))
    (tmp_path / "export").mkdir()
    counted: list[tuple[int, int]] = []
    written = export_payloads(site.store, tmp_path / "export", lambda *each: counted.append(each))
    assert written == 2
    assert counted == [(1, 2), (2, 2)], "the sample is not in the total either"
    names = {file.name for file in (tmp_path / "export" / "payloads").iterdir()}
    assert names == {f"{request}.request", f"{request}.response"}


# While a gateway erases.


def interfere(site, monkeypatch, method, act, *, after):
    """Do something in the middle of one call of the store."""
    original, began, done = getattr(SqlSampleStore, method), [], []

    def once():
        if not began:
            began.append(True)
            done.append(act())

    def patched(store, *arguments, **more):
        if not after:
            once()
        result = original(store, *arguments, **more)
        if after:
            once()
        return result

    monkeypatch.setattr(SqlSampleStore, method, patched)
    return done


@pytest.mark.parametrize("after", [False, True])
def test_request_erased_in_the_middle_leaves_no_sample(site, monkeypatch, after):
    request = site.keep("acme")
    other = open_site(site.directory, seed=99)
    other.clock.now = site.clock.now
    done = interfere(site, monkeypatch, "add_sample", lambda: other.erase("acme", request), after=after)
    kept = site.vault.keep(sample_of(request))
    assert len(done) == 1
    assert site.parts(request) == set()
    assert site.vault.read(request) is None
    assert kept is Skipped.ERASED
    assert site.keys.names("acme", Purpose.WRAPPING) == other.keys.names("acme", Purpose.WRAPPING)
    close_site(other)


@pytest.mark.parametrize("after", [False, True])
def test_neighbour_erased_in_the_middle_does_not_cost_the_sample(site, monkeypatch, after):
    neighbour, request = site.keep("acme"), site.keep("acme")
    other = open_site(site.directory, seed=99)
    other.clock.now = site.clock.now
    interfere(site, monkeypatch, "add_sample", lambda: other.erase("acme", neighbour), after=after)
    kept = site.vault.keep(sample_of(request))
    assert replace(kept, salt="") == sample_of(request)
    assert site.vault.read(request) == kept
    body, sealed = (site.store.get(request, part) for part in (Part.REQUEST, Part.SAMPLE))
    assert body.key_id == sealed.key_id
    assert site.keys.is_in_use(sealed.key_id, Purpose.WRAPPING)
    close_site(other)


def test_sample_is_removed_if_its_key_retires_while_it_is_stored(site, monkeypatch):
    request = site.keep("acme")
    (name,) = site.keys.names("acme")
    interfere(site, monkeypatch, "add_sample", lambda: site.keys.retire(name), after=True)
    assert site.vault.keep(sample_of(request)) is Skipped.ERASED
    assert site.parts(request) == KEPT
    assert len(site.slept) == TRIES - 1


def test_nothing_is_opened_with_a_key_whose_destruction_has_begun(site):
    requests = [site.keep("acme") for _ in range(3)]
    (name,) = site.keys.names("acme")
    site.keys.retire(name)
    assert [site.vault.open_content(request, "acme") for request in requests] == [Skipped.ERASED] * 3
    assert len(site.slept) == TRIES - 1


def test_key_that_is_not_on_this_machine_opens_nothing(site):
    request = site.keep("acme")
    site.keys.destroy(site.keys.names("acme")[0])
    assert site.vault.open_content(request, "acme") is Skipped.ERASED
    assert site.slept == []


def test_two_harvests_of_one_request_agree_on_one_sample(site, monkeypatch):
    request = site.keep("acme")
    other = open_site(site.directory, seed=99)
    theirs = interfere(
        site, monkeypatch, "add_sample", lambda: other.vault.keep(sample_of(request)), after=False
    )
    mine = site.vault.keep(sample_of(request))
    assert mine == theirs[0] == site.vault.read(request)
    close_site(other)


def test_sample_with_a_lost_key_is_replaced(site):
    request, neighbour = site.keep("acme"), site.keep("acme")
    site.vault.keep(sample_of(request))
    row = site.store.get(request, Part.SAMPLE)
    site.erase("acme", neighbour)
    execute(
        site,
        "UPDATE audit_payloads SET key_id = ?, wrapped_key = ? WHERE part = 'sample'",
        row.key_id,
        row.sealed.wrapped_key,
    )
    assert site.vault.read(request) is None
    kept = site.vault.keep(sample_of(request))
    assert site.vault.read(request) == kept


def test_sample_without_its_answer_is_not_stored(site):
    request = site.keep("acme")
    assert site.vault.keep(sample_of(request, "clinic")) is Skipped.ERASED
    sealed = replace(site.store.get(request, Part.REQUEST), part=Part.SAMPLE)
    execute(site, "DELETE FROM audit_payloads WHERE part = 'response'")
    assert site.store.add_sample(sealed) is SampleOutcome.GONE
    assert site.vault.open_content(request, "acme") is Skipped.ERASED


def test_key_changes_of_another_process_apply_immediately(site):
    request = site.keep("acme")
    site.vault.keep(sample_of(request))
    others = PayloadKeys(
        site.directory / "payload-keys",
        master_key=None,
        key_days=7,
        clock=site.clock,
        random_bytes=site.random.randbytes,
    )
    for name in others.names():
        others.destroy(name)
    assert site.vault.read(request) is None
    assert site.store.find(Selection(tenant="acme", requests=(request,))).payloads == 2
