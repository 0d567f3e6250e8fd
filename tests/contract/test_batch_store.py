"""Records of files and batches, equal on both databases and for every gateway."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from appliance.audit.migrate import copy_log
from appliance.errors import StorageQuotaError, StorageUnavailableError
from appliance.gateway.batch.batch import (
    Batch,
    BatchProblem,
    Counts,
    Deleted,
    FilePurpose,
    Status,
    StoredFile,
)
from appliance.gateway.batch.store import SqlBatchStore, StorageQuota, Window, encode_problems
from appliance.gateway.batch.tables import metadata

PLENTY = StorageQuota(files=1000, size=2**40)
FILE = StoredFile(
    file_id="file-1",
    tenant="acme",
    gateway="one",
    filename="in.jsonl",
    purpose=FilePurpose.BATCH,
    size=2**33,
    sealed=True,
    created_at=100,
    expires_at=200,
)
BATCH = Batch(
    batch_id="batch_1",
    tenant="acme",
    key_id="abcdefgh",
    gateway="one",
    client="private",
    endpoint="/v1/completions",
    completion_window="24h",
    input_file_id="file-1",
    sealed=True,
    status=Status.VALIDATING,
    metadata={"ward": "7", "é": '"'},
    output_seconds=3600,
    created_at=100,
    expires_at=2**40,
)


@pytest.fixture
def gateways(url, open_store):
    """Two gateways on one database, which has its tables."""
    open_store(url)
    stores = SqlBatchStore(url), SqlBatchStore(url)
    yield stores
    for store in stores:
        store.close()


def upload(store, stored, quota=PLENTY):
    """Reserve a file's size, and make it visible."""
    store.reserve_file(stored, quota)
    assert store.add_file(stored)


def test_one_gateway_reads_what_another_wrote(gateways):
    """Every member of a file and of a batch, in every state."""
    one, two = gateways
    upload(one, FILE)
    one.add_batch(BATCH, 5)
    assert two.file("acme", "file-1") == FILE
    assert two.batch("acme", "batch_1") == BATCH
    assert two.file("other", "file-1") is None
    assert two.batch("other", "batch_1") is None
    assert one.move("batch_1", Status.IN_PROGRESS, 110, total=7, model="demo")
    one.progress("batch_1", Counts(total=7, completed=3, failed=1))
    known = two.batch("acme", "batch_1")
    assert (known.status, known.model, known.counts) == (
        Status.IN_PROGRESS,
        "demo",
        Counts(total=7, completed=3, failed=1),
    )
    assert known.moments == {Status.IN_PROGRESS: 110}
    problems = (BatchProblem(code="c", message="m", line=3, param="p"), BatchProblem(code="d", message="n"))
    assert two.move("batch_1", Status.FAILED, 120, errors=encode_problems(problems))
    assert one.batch("acme", "batch_1").errors == problems


def test_only_one_of_two_concurrent_batch_transitions_succeeds(gateways):
    """A state is entered from those that may come before it, and once."""
    one, two = gateways
    one.add_batch(BATCH, 5)
    one.move("batch_1", Status.IN_PROGRESS, 1)
    with ThreadPoolExecutor(2) as threads:
        moved = list(
            threads.map(
                lambda pair: pair[0].move("batch_1", pair[1], 2),
                [(one, Status.FINALIZING), (two, Status.CANCELLING)],
            )
        )
    assert sorted(moved) == [False, True]
    assert not one.move("batch_1", Status.COMPLETED, 3) or moved[0]
    assert not one.move("batch_2", Status.FAILED, 3)


def test_outputs_are_known_with_the_end_of_their_batch_or_not_at_all(gateways):
    """A batch that did not move brings no files, and one that did counts no quota."""
    one, two = gateways
    upload(one, FILE)
    one.add_batch(BATCH, 5)
    output = replace(FILE, file_id="file-2", purpose=FilePurpose.BATCH_OUTPUT)
    assert not one.move("batch_1", Status.COMPLETED, 1, outputs=[output], output_file_id="file-2")
    assert two.file("acme", "file-2") is None
    one.move("batch_1", Status.IN_PROGRESS, 1)
    one.move("batch_1", Status.FINALIZING, 2)
    assert one.move("batch_1", Status.COMPLETED, 3, outputs=[output], output_file_id="file-2")
    assert two.file("acme", "file-2") == output
    assert two.batch("acme", "batch_1").output_file_id == "file-2"
    # Repeated, as after a crash: nothing is there twice.
    assert not one.move("batch_1", Status.COMPLETED, 3, outputs=[output])


def test_results_of_erased_content_are_never_registered(gateways):
    """Erased in the moment its batch ended: the outputs come too late."""
    one, two = gateways
    upload(one, FILE)
    one.add_batch(BATCH, 5)
    one.move("batch_1", Status.IN_PROGRESS, 1)
    one.move("batch_1", Status.FINALIZING, 2)
    two.erase_files("acme", 101)
    output = replace(FILE, file_id="file-2", purpose=FilePurpose.BATCH_OUTPUT, created_at=102)
    assert not one.move("batch_1", Status.COMPLETED, 3, outputs=[output])
    assert two.file("acme", "file-2") is None
    assert one.move("batch_1", Status.FAILED, 3)


def test_uploads_of_one_tenant_at_the_same_time_keep_its_bound(gateways):
    """However many gateways take them; an upload counts from its begin."""
    quota = StorageQuota(files=5, size=2**60)

    def reserve(number):
        try:
            gateways[number % 2].reserve_file(replace(FILE, file_id=f"file-{number}"), quota)
        except StorageQuotaError:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        reserved = list(threads.map(reserve, range(12)))
    assert sum(reserved) == 5
    assert gateways[0].files("acme", Window(limit=100)) == []
    for number in range(12):
        stored = replace(FILE, file_id=f"file-{number}")
        assert gateways[number % 2].add_file(stored) == reserved[number]
    assert len(gateways[0].files("acme", Window(limit=100))) == 5
    with pytest.raises(StorageQuotaError):
        gateways[0].check_quota("acme", quota, more_files=1, more_bytes=0)
    gateways[0].check_quota("other", quota, more_files=1, more_bytes=0)
    with pytest.raises(StorageQuotaError, match="bytes"):
        gateways[0].check_quota("other", StorageQuota(files=1, size=10), more_files=1, more_bytes=11)


def test_batches_created_on_two_gateways_at_the_same_time_keep_the_tenants_bound(gateways):
    """Thirty times the same moment, for one more batch than the tenant may have."""
    together = Barrier(2)

    def create(gateway, tenant):
        batch = replace(BATCH, batch_id=f"batch_{tenant}_{gateway}", tenant=tenant)
        together.wait()
        try:
            gateways[gateway].add_batch(batch, 1)
        except StorageQuotaError:
            return False
        return True

    tenants = [f"tenant-{number}" for number in range(30)]
    with ThreadPoolExecutor(2) as threads:
        made = [sorted(threads.map(create, (0, 1), (tenant, tenant))) for tenant in tenants]
    assert made == [[False, True]] * len(tenants)


def test_reservation_counts_until_its_upload_ends(gateways):
    """It is no file: neither shown nor deleted, erased or removed; the file counts with its own size."""
    one, two = gateways
    quota = StorageQuota(files=2, size=2**33)
    one.reserve_file(FILE, quota)
    with pytest.raises(StorageQuotaError, match="bytes"):
        two.reserve_file(replace(FILE, file_id="file-2", size=1), quota)
    assert two.file("acme", "file-1") is None
    assert not two.delete_file("acme", "file-1")
    assert two.erase_files("acme", 10**6) == 0
    one.expire_files("one", 10**6)
    assert one.hidden_files("one") == []
    assert one.known("one") == (frozenset(), frozenset())
    stored = replace(FILE, size=7, filename="out.jsonl", created_at=150, expires_at=300)
    assert one.add_file(stored)
    assert not one.add_file(stored)
    assert two.file("acme", "file-1") == stored
    two.reserve_file(replace(FILE, file_id="file-2", size=2**33 - 7), quota)
    two.forget_reservation("file-2")
    two.forget_reservation("file-1")
    assert two.file("acme", "file-1") == stored
    two.reserve_file(replace(FILE, file_id="file-3", size=2**33 - 7), quota)


def test_no_reservation_outlives_its_gateway(gateways):
    """The gateway's next start finds it; if there is none, another gateway removes it after its time."""
    one, two = gateways
    quota = StorageQuota(files=1, size=2**33)
    one.reserve_file(FILE, quota)
    assert (one.reservations("one"), one.reservations("two")) == ([FILE], [])
    two.expire_reservations(FILE.expires_at - 1)
    with pytest.raises(StorageQuotaError):
        two.reserve_file(replace(FILE, file_id="file-2"), quota)
    two.expire_reservations(FILE.expires_at)
    assert not one.add_file(FILE)
    upload(two, replace(FILE, file_id="file-2"), quota)
    two.expire_reservations(2**40)
    assert two.file("acme", "file-2") is not None


def test_lists_go_by_id_from_a_cursor_on(gateways):
    """Newest first or oldest first; one more than requested shows that there are more."""
    one, _ = gateways
    for number in range(5):
        upload(one, replace(FILE, file_id=f"file-{number}"))
        one.add_batch(replace(BATCH, batch_id=f"batch_{number}"), 10)
    upload(one, replace(FILE, file_id="file-9", tenant="other"))

    def ids(**window):
        return [stored.file_id[-1] for stored in one.files("acme", Window(**window))]

    assert ids(limit=2) == ["4", "3", "2"]
    assert ids(limit=9, after="file-2") == ["1", "0"]
    assert ids(limit=1, after="file-2", ascending=True) == ["3", "4"]
    assert [batch.batch_id for batch in one.batches("acme", Window(limit=1, after="batch_3"))] == [
        "batch_2",
        "batch_1",
    ]


def test_a_file_that_an_open_batch_reads_is_neither_deleted_nor_expires(gateways):
    """Erasing it is something else."""
    one, two = gateways
    upload(one, FILE)
    one.add_batch(BATCH, 5)
    assert not two.delete_file("acme", "file-1")
    one.expire_files("one", 10**6)
    assert one.hidden_files("one") == []
    assert two.erase_files("acme", 101) == 1
    assert one.hidden_files("one") == [(FILE, Deleted.ERASED)]
    assert one.hidden_files("two") == []


def test_a_file_is_deleted_once_and_out_of_sight_from_then_on(gateways):
    """Its gateway deletes its bytes, and its row last."""
    one, two = gateways
    upload(one, FILE)
    assert two.delete_file("acme", "file-1")
    assert not two.delete_file("acme", "file-1")
    assert one.file("acme", "file-1") is None
    assert one.files("acme", Window(limit=1)) == []
    assert one.hidden_files("one") == [(FILE, Deleted.DELETED)]
    assert one.known("one") == ({"file-1"}, frozenset())
    one.forget_file("file-1")
    assert one.known("one") == (frozenset(), frozenset())


def test_erasure_covers_earlier_files_and_ended_batches(gateways):
    """Another tenant's is left alone, and so is what came later."""
    one, _ = gateways
    for file_id, tenant, created in (("a", "acme", 99), ("b", "acme", 100), ("c", "other", 99)):
        upload(one, replace(FILE, file_id=file_id, tenant=tenant, created_at=created))
    one.add_batch(replace(BATCH, batch_id="open", created_at=99), 5)
    one.add_batch(replace(BATCH, batch_id="ended", created_at=99), 5)
    one.move("ended", Status.FAILED, 1)
    assert one.erase_files("acme", 100) == 1
    assert {stored.file_id for stored, _ in one.hidden_files("one")} == {"a"}
    assert one.batch("acme", "ended") is None
    assert one.batch("acme", "open") is not None


def test_erasure_of_everything_covers_whatever_was_created_whenever(gateways):
    """An open batch ends without its input, and loses what its client said of it."""
    one, two = gateways
    upload(one, replace(FILE, created_at=10**9))
    one.add_batch(replace(BATCH, batch_id="open", created_at=10**9, metadata={"name": "a person"}), 5)
    one.add_batch(replace(BATCH, batch_id="ended", created_at=10**9), 5)
    one.move("ended", Status.FAILED, 1)
    assert two.erase_files("acme", None) == 1
    assert two.files("acme", Window(limit=1)) == []
    assert two.batch("acme", "ended") is None
    assert two.batch("acme", "open").metadata == {}


def test_gateway_runs_only_its_own_open_batches(gateways):
    """Oldest first."""
    one, _ = gateways
    for batch_id, gateway in (("batch_2", "one"), ("batch_1", "one"), ("batch_3", "two"), ("batch_4", "one")):
        one.add_batch(replace(BATCH, batch_id=batch_id, gateway=gateway), 5)
    one.move("batch_4", Status.CANCELLED, 1)
    assert one.known("one") == (frozenset(), {"batch_4"})
    assert one.known("two") == (frozenset(), frozenset())
    assert [batch.batch_id for batch in one.open_batches("one")] == ["batch_1", "batch_2"]
    with pytest.raises(StorageQuotaError):
        one.add_batch(replace(BATCH, batch_id="batch_5"), 3)


def test_files_and_batches_go_with_the_log_to_another_database(sqlite_url, postgres_url, open_store):
    """Otherwise their tenants would not find them again."""
    open_store(sqlite_url)
    old, new = SqlBatchStore(sqlite_url), SqlBatchStore(postgres_url)
    upload(old, FILE)
    old.add_batch(BATCH, 5)
    copy_log(sqlite_url, postgres_url, progress=lambda _done, _total: None, also=metadata.sorted_tables)
    assert new.file("acme", "file-1") == FILE
    assert new.batch("acme", "batch_1") == BATCH
    old.close()
    new.close()


def test_missing_tables_are_reported_in_one_line(sqlite_url):
    """Not a stack trace for the client."""
    store = SqlBatchStore(sqlite_url)
    with pytest.raises(StorageUnavailableError, match="could not be read") as caught:
        store.file("acme", "file-1")
    assert "\n" not in str(caught.value)
    store.close()
