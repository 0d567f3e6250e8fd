"""Tenants' files: private, bounded, and removed when they are deleted or expire."""

import asyncio
import sqlite3
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.errors import (
    AtCapacityError,
    AuditUnavailableError,
    BatchConflictError,
    BatchNotFoundError,
    BodyTooLargeError,
    InvalidRequestError,
    StorageQuotaError,
    StorageUnavailableError,
    StoredFileNotFoundError,
)
from appliance.gateway.batch.batch import FilePurpose, Status
from appliance.gateway.batch.bounds import TENANT_UPLOADS
from appliance.gateway.batch.files import Upload
from appliance.gateway.batch.store import Window
from appliance.tenancy import ContentPolicy
from tests.unit.gateway.batch.scene import Scene, requests

DAY = 86_400
CONTENT = requests("a", "b")


@pytest.fixture(params=[ContentPolicy.NONE, ContentPolicy.ENCRYPTED], ids=["plain", "encrypted"])
def scene(request, tmp_path):
    made = Scene(tmp_path, content=request.param, tenant_files=3, tenant_bytes=1000, max_file_bytes=1024)
    yield made
    made.store.close()


async def content_of(scene, stored):
    return b"".join([piece async for piece in scene.files.read(stored)])


async def test_file_is_returned_unchanged_to_its_tenant_only(scene):
    stored = await scene.upload(CONTENT)
    assert await content_of(scene, await scene.files.get("acme", stored.file_id)) == CONTENT
    for asked in (
        scene.files.get("other", stored.file_id),
        scene.files.delete(scene.caller("other"), stored.file_id),
    ):
        with pytest.raises(StoredFileNotFoundError) as caught:
            await asked
        assert str(caught.value) == f"There is no file `{stored.file_id}`."
    assert await scene.files.list("other", Window(limit=10)) == []


async def test_lists_are_read_page_by_page_in_both_directions(scene):
    """A cursor is the last id of the page before; one extra row means that there are more."""
    made = []
    for _ in range(3):
        scene.clock.now += 1
        made.append((await scene.upload(b"x")).file_id)

    async def ids(**window):
        return [stored.file_id for stored in await scene.files.list("acme", Window(**window))]

    assert await ids(limit=10) == made[::-1]
    assert await ids(limit=10, ascending=True) == made
    assert await ids(limit=1) == made[:0:-1]
    assert await ids(limit=10, after=made[1]) == made[:1]
    assert await ids(limit=10, after=made[1], ascending=True) == made[2:]
    assert len(await scene.files.list("acme", Window(limit=10), "batch")) == 3
    assert await scene.files.list("acme", Window(limit=1), "batch_output") == []


async def test_a_deleted_file_is_gone_with_its_bytes_and_its_key(scene):
    """The log records the key that deleted it."""
    stored = await scene.upload(CONTENT)
    caller = scene.caller()
    await scene.files.delete(caller, stored.file_id)
    assert scene.on_disk() == set()
    assert scene.keys.names() == []
    assert scene.store.hidden_files("one") == []
    (entry,) = scene.sink.of("file.deleted")
    assert (entry["file"], entry["reason"], entry["key_id"]) == (stored.file_id, "deleted", caller.key.key_id)
    with pytest.raises(StoredFileNotFoundError):
        await scene.files.delete(caller, stored.file_id)


async def test_file_that_cannot_be_removed_is_hidden_and_removed_later(scene):
    """The log refuses the entry, so the bytes stay until it takes it."""
    stored = await scene.upload(CONTENT)
    scene.sink.refusal = AuditUnavailableError("the disk is full")
    with pytest.raises(AuditUnavailableError):
        await scene.files.delete(scene.caller(), stored.file_id)
    with pytest.raises(StoredFileNotFoundError):
        await scene.files.get("acme", stored.file_id)
    assert scene.on_disk() == {stored.file_id}
    scene.sink.refusal = None
    await scene.files.sweep()
    assert scene.on_disk() == set()
    assert len(scene.sink.of("file.deleted")) == 1


async def test_expired_files_are_removed_unless_a_batch_reads_them(scene):
    usual = await scene.upload(b"x")
    short = await scene.upload(b"y", kept_seconds=3600)
    batch = await scene.begin(b"z", window_seconds=60 * DAY)
    assert usual.expires_at == int(scene.clock()) + 30 * DAY
    scene.clock.now += 3600
    await scene.files.sweep()
    assert scene.on_disk() == {usual.file_id, batch.input_file_id}
    with pytest.raises(StoredFileNotFoundError):
        await scene.files.get("acme", short.file_id)
    scene.clock.now += 30 * DAY
    await scene.files.sweep()
    assert scene.on_disk() == {batch.input_file_id}
    assert [entry["reason"] for entry in scene.sink.of("file.deleted")] == ["expired", "expired"]


async def test_the_input_of_an_open_batch_cannot_be_deleted(scene):
    """The error says to cancel the batch."""
    batch = await scene.begin(CONTENT)
    with pytest.raises(BatchConflictError, match="cancel"):
        await scene.files.delete(scene.caller(), batch.input_file_id)
    scene.store.move(batch.batch_id, Status.FAILED, 1)
    await scene.files.delete(scene.caller(), batch.input_file_id)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (600, 401)])
async def test_tenant_storage_is_limited(scene, sizes):
    """By number and by bytes; a refused file leaves nothing, and other tenants are not affected."""
    for size in sizes[:-1]:
        await scene.upload(b"x" * size)
    before = scene.on_disk(), scene.keys.names(), len(scene.sink.entries)
    with pytest.raises(StorageQuotaError):
        await scene.upload(b"x" * sizes[-1])
    assert (scene.on_disk(), scene.keys.names(), len(scene.sink.entries)) == before
    await scene.upload(b"x" * sizes[-1], "other")


async def test_concurrent_uploads_cannot_exceed_the_quota(scene):
    """Each counts from its begin: the later one is refused, and leaves no entry."""
    both = await asyncio.gather(*(scene.upload(b"x" * 600) for _ in range(2)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in both) == ["StorageQuotaError", "StoredFile"]
    assert len(scene.on_disk()) == 1
    assert {entry["file"] for entry in scene.sink.of("file.created")} == scene.on_disk()
    assert scene.sink.of("file.deleted") == []


async def test_upload_in_flight_counts_with_the_size_of_its_body(scene):
    """Until it ends, whatever has arrived; also if it is given up."""
    async with scene.files.receive(scene.caller(), 600):
        with pytest.raises(StorageQuotaError, match="bytes"):
            await scene.upload(b"x" * 401)
        await scene.upload(b"x" * 400)
        await scene.upload(b"x" * 600, "other")
    await scene.upload(b"x" * 600)
    before = scene.on_disk(), len(scene.keys.names())
    with pytest.raises(StorageQuotaError, match="bytes"):
        await scene.upload(b"x")
    assert (scene.on_disk(), len(scene.keys.names())) == before


async def test_upload_of_unknown_size_counts_with_the_maximum(scene):
    async with scene.files.receive(scene.caller(), None) as incoming:
        with pytest.raises(StorageQuotaError):
            await scene.upload(b"x")
        await incoming.write(b"x" * 1000)
        with pytest.raises(BodyTooLargeError):
            await incoming.write(b"x")


async def test_uploads_in_flight_are_limited(tmp_path):
    """By tenant and by gateway; one that ends makes room."""
    scene = Scene(tmp_path)
    async with AsyncExitStack() as stack:
        for _ in range(TENANT_UPLOADS):
            await stack.enter_async_context(scene.files.receive(scene.caller(), 1))
        with pytest.raises(AtCapacityError):
            await scene.upload(b"x")
        await scene.upload(b"x", "other")
    await scene.upload(b"x")
    scene.store.close()


async def test_an_upload_that_ends_in_any_way_leaves_no_reservation(scene):
    """Too large, given up, cancelled, refused by the log or by the disk."""
    arrived = asyncio.Event()

    async def stalled():
        async with scene.files.receive(scene.caller(), 1000) as incoming:
            await incoming.write(b"x" * 500)
            arrived.set()
            await asyncio.get_running_loop().create_future()

    waiting = asyncio.ensure_future(stalled())
    await arrived.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(BodyTooLargeError):
        await scene.upload(b"x" * 1000, size=999)
    scene.sink.refusal = AuditUnavailableError("the disk is full")
    with pytest.raises(AuditUnavailableError):
        await scene.upload(b"x" * 1000)
    scene.sink.refusal = None
    scene.vault._keep_free_bytes = 2**62
    with pytest.raises(StorageUnavailableError):
        await scene.upload(b"x" * 1000)
    scene.vault._keep_free_bytes = 0
    assert (scene.on_disk(), scene.keys.names()) == (set(), [])
    await scene.upload(b"x" * 1000)


async def test_upload_interrupted_by_a_crash_leaves_no_reservation(scene):
    """The next start removes its draft, its key and its reservation."""
    crashed = scene.files.receive(scene.caller(), 1000)
    incoming = await crashed.__aenter__()
    await incoming.write(b"x" * 500)
    with pytest.raises(StorageQuotaError):
        await scene.upload(b"x")
    scene.build()
    assert (scene.on_disk(), scene.keys.names()) == (set(), [])
    await scene.upload(b"x" * 1000)
    await crashed.__aexit__(None, None, None)


async def test_upload_whose_reservation_expired_is_refused(scene):
    """The clock was set forward meanwhile; the log records that the file was not kept."""
    async with scene.files.receive(scene.caller(), 10) as incoming:
        scene.clock.now += 10 * DAY
        await scene.files.sweep()
        with pytest.raises(StorageUnavailableError, match="too long"):
            await scene.files.keep(
                incoming, Upload(filename="x", purpose=FilePurpose.BATCH, kept_seconds=None)
            )
    assert (scene.on_disk(), scene.keys.names()) == (set(), [])
    assert [entry["reason"] for entry in scene.sink.of("file.deleted")] == ["refused"]


async def test_uploads_in_flight_share_what_the_disk_has_above_its_reserve(tmp_path, monkeypatch):
    """By their sizes, before their bytes arrive."""
    scene = Scene(tmp_path)
    free = [1000]
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=free[0]))
    scene.vault._keep_free_bytes = 400
    async with scene.files.receive(scene.caller(), 400):
        with pytest.raises(StorageUnavailableError, match="nearly full"):
            await scene.upload(b"x" * 201, "other")
        await scene.upload(b"x" * 200, "other")
    await scene.upload(b"x" * 600, "other")
    scene.store.close()


async def test_too_large_upload_is_refused_while_it_arrives(scene):
    with pytest.raises(BodyTooLargeError):
        await scene.upload(b"x" * 1000, size=999)
    assert (scene.on_disk(), scene.keys.names()) == (set(), [])


async def test_a_nearly_full_disk_takes_no_files(tmp_path):
    """The audit log, without which no request is served, may be on the same disk."""
    scene = Scene(tmp_path)
    scene.vault._keep_free_bytes = 2**62
    with pytest.raises(StorageUnavailableError, match="nearly full"):
        await scene.upload(b"x")
    scene.store.close()


async def test_file_without_audit_entry_does_not_exist(scene):
    stored = await scene.upload(CONTENT)
    scene.sink.refusal = AuditUnavailableError("the disk is full")
    with pytest.raises(AuditUnavailableError):
        await scene.upload(CONTENT)
    assert scene.on_disk() == {stored.file_id}


async def test_erase_removes_files_and_batch_outputs(scene):
    """By time: later content stays, and another tenant's."""
    early, theirs = await scene.upload(b"x"), await scene.upload(b"y", "other")
    scene.clock.now += 100
    late = await scene.upload(b"z")
    assert await scene.files.erase("acme", int((scene.clock() - 50) * 1000)) == 1
    assert scene.on_disk() == {theirs.file_id, late.file_id}
    assert scene.sink.of("file.deleted")[0]["file"] == early.file_id


async def test_erase_of_everything_removes_files_of_a_clock_that_was_ahead(scene):
    scene.clock.now += 3600
    await scene.upload(b"x")
    scene.clock.now -= 3600
    theirs = await scene.upload(b"y", "other")
    assert await scene.files.erase("acme", None) == 1
    assert scene.on_disk() == {theirs.file_id}


async def test_an_encrypted_file_whose_key_was_destroyed_is_swept(tmp_path):
    """The next sweep finishes an erasure that crashed between keys and files."""
    scene = Scene(tmp_path, content=ContentPolicy.ENCRYPTED)
    await scene.upload(CONTENT)
    (name,) = scene.keys.names()
    scene.keys.destroy(name)
    await scene.files.sweep()
    assert scene.on_disk() == set()
    assert [entry["reason"] for entry in scene.sink.of("file.deleted")] == ["erased"]
    scene.store.close()


async def test_a_batch_needs_a_file_of_its_own_tenant_made_for_batches(scene):
    """Another tenant's file is refused, and a batch's output."""
    batch = await scene.begin(CONTENT)
    for batch_id, tenant in ((batch.batch_id, "other"), ("batch_0", "acme")):
        with pytest.raises(BatchNotFoundError):
            await scene.batches.get(tenant, batch_id)
        with pytest.raises(BatchNotFoundError):
            await scene.batches.cancel(tenant, batch_id)
    with pytest.raises(StoredFileNotFoundError):
        await scene.begin_with(batch.input_file_id, "other")
    output = await scene.upload(CONTENT, purpose=FilePurpose.BATCH_OUTPUT)
    with pytest.raises(InvalidRequestError, match="batch_output"):
        await scene.begin_with(output.file_id)


async def test_open_batches_of_a_tenant_are_limited(tmp_path):
    scene = Scene(tmp_path, tenant_batches=1)
    first = await scene.begin(CONTENT)
    with pytest.raises(StorageQuotaError, match="have not ended"):
        await scene.begin(CONTENT)
    scene.store.move(first.batch_id, Status.FAILED, 1)
    await scene.begin(CONTENT)
    scene.store.close()


async def test_batch_is_refused_if_another_gateway_has_the_bytes(tmp_path):
    """The error names the other gateway if they share a database but no directory."""
    scene = Scene(tmp_path)
    stored = await scene.upload(CONTENT)
    (tmp_path / "files" / "one" / stored.file_id).rename(tmp_path / "elsewhere")
    with pytest.raises(StorageUnavailableError, match="another gateway"):
        await scene.begin_with(stored.file_id)
    scene.store.close()


async def test_tenant_beyond_its_storage_gets_no_further_batch(tmp_path):
    """Outputs are stored whatever their size, so they are what takes a tenant beyond."""
    scene = Scene(tmp_path, tenant_bytes=1000)
    stored = await scene.upload(CONTENT)
    batch = await scene.begin_with(stored.file_id)
    scene.store.move(batch.batch_id, Status.IN_PROGRESS, 1)
    scene.store.move(batch.batch_id, Status.FINALIZING, 2)
    output = replace(stored, file_id="file-2", purpose=FilePurpose.BATCH_OUTPUT, size=1001 - stored.size)
    scene.store.move(batch.batch_id, Status.COMPLETED, 3, outputs=[output])
    with pytest.raises(StorageQuotaError, match="bytes"):
        await scene.begin_with(stored.file_id)
    scene.store.delete_file("acme", "file-2")
    scene.store.forget_file("file-2")
    await scene.begin_with(stored.file_id)
    scene.store.close()


async def test_cancelling_an_ended_batch_writes_nothing(tmp_path):
    """On SQLite it would wait for the lock that the audit log holds."""
    scene = Scene(tmp_path)
    batch = await scene.begin(CONTENT)
    scene.store.move(batch.batch_id, Status.FAILED, 1)
    log = sqlite3.connect(tmp_path / "audit.db", isolation_level=None)
    log.execute("BEGIN IMMEDIATE")
    with pytest.raises(BatchConflictError, match="failed"):
        await scene.batches.cancel("acme", batch.batch_id)
    log.close()
    scene.store.close()
