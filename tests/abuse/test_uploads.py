"""
Uploads: counted from their first byte, bounded in number, time and memory, and never at the log's expense.

Every upload waits for `100 Continue`, which the gateway sends once it has reserved the upload's size.
"""

import asyncio
import io
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from appliance.gateway.batch.bounds import TENANT_REQUESTS, TENANT_UPLOADS
from appliance.gateway.batch.files import GATHERED_BYTES
from tests.abuse.conftest import gateways
from tests.abuse.gateway_under_test import MIB, PATIENT, GatewayUnderTest
from tests.command import run_command
from tests.fakes import FakeWorker, until

DISK_BYTES, RESERVE_BYTES = 160 * MIB, 64 * MIB
FILE_BYTES = 8 * MIB
SLACK_BYTES = 8 * MIB
"""What threads write at the same moment beyond the reserve, and what the log takes of it (SQLite's WAL)."""
BOUNDARY = "frontier"
HEAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
).encode()
TAIL = f"\r\n--{BOUNDARY}--\r\n".encode()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk for data directory and files together."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"NO SMALL DISK CAN BE MOUNTED, SO NO FULL ONE IS TRIED HERE: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


@asynccontextmanager
async def started(directory: Path, **batch: int) -> AsyncIterator[GatewayUnderTest]:
    settings = {"max_file_bytes": FILE_BYTES, "keep_free_bytes": 0, **batch}
    async with gateways(directory) as start:
        yield await start(FakeWorker(), batch=settings)


async def make_tenant(gateway: GatewayUnderTest, name: str) -> str:
    """Create a tenant; return a key of it once the gateway accepts it."""
    data = gateway.process.data
    for words in (("tenant", "create", name), ("key", "create", name)):
        done = await asyncio.to_thread(run_command, *words, "--data", data)
        assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    await serves(gateway, key, "/v1/models")
    return key


async def serves(gateway: GatewayUnderTest, key: str, path: str) -> None:
    """Wait until a key's request is answered."""
    async with asyncio.timeout(60), client(gateway, key) as session:
        while True:
            async with session.get(path) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


def client(gateway: GatewayUnderTest, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        gateway.process.url, timeout=PATIENT, headers={"Authorization": f"Bearer {key}"}
    )


async def upload_whole(gateway: GatewayUnderTest, key: str, content: bytes) -> int:
    async with client(gateway, key) as session:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO(content), filename="in.jsonl")
        async with session.post("/v1/files", data=form) as answer:
            return answer.status


class Upload:
    """One upload on a connection of its own; `status` is 100 once it was accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0

    @classmethod
    async def begin(cls, gateway: GatewayUnderTest, key: str, size: int | None = FILE_BYTES) -> "Upload":
        """Announce a file of this size, or of an unknown one."""
        upload = cls(*await asyncio.open_connection(*gateway.address))
        length = None if size is None else len(HEAD) + size + len(TAIL)
        head = gateway.head(length, key=key, path="/v1/files").decode()
        head = head.replace("application/json", f"multipart/form-data; boundary={BOUNDARY}")
        upload._writer.write(f"{head[:-2]}Expect: 100-continue\r\n\r\n".encode())
        await upload.read_status()
        if upload.status != 100:
            upload.abandon()
        elif size is not None:
            upload._writer.write(HEAD)
        return upload

    async def read_status(self) -> int:
        async with asyncio.timeout(60):
            head = await self._reader.readuntil(b"\r\n\r\n")
        self.status = int(head.split()[1])
        return self.status

    async def send(self, data: bytes) -> None:
        """Part of the file; a refused upload's connection may be closed already."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            self.status = self.status if self.status != 100 else 0

    def abandon(self) -> None:
        self._writer.transport.abort()
        self._writer.close()


async def begin_many(gateway: GatewayUnderTest, key: str, count: int, size: int | None = FILE_BYTES):
    uploads = await asyncio.gather(*(Upload.begin(gateway, key, size) for _ in range(count)))
    accepted = [upload for upload in uploads if upload.status == 100]
    return accepted, Counter(upload.status for upload in uploads if upload.status != 100)


def stored_bytes(gateway: GatewayUnderTest) -> int:
    files = (gateway.process.data / "files").rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


async def test_open_uploads_of_one_key_stay_within_its_quota(tmp_path):
    """A hundred at once, of which most would never end; others chat and upload meanwhile."""
    quota = 4 * FILE_BYTES
    async with started(tmp_path, tenant_bytes=quota + MIB) as gateway:
        key, other = gateway.process.key, await make_tenant(gateway, "other")
        accepted, refused = await begin_many(gateway, key, 100)
        assert (len(accepted), set(refused)) == (4, {403, 429})
        for upload in accepted:
            await upload.send(os.urandom(FILE_BYTES // 2))
        await until(lambda: stored_bytes(gateway) > quota // 4)
        assert await upload_whole(gateway, other, b"x" * MIB) == 200
        await gateway.serves_others()
        assert stored_bytes(gateway) <= quota + MIB
        unknown, refused = await begin_many(gateway, key, 3, None)
        assert (unknown, refused) == ([], {403: 3})
        for upload in accepted:
            upload.abandon()
        await until(lambda: stored_bytes(gateway) == MIB)
        # The quota is given back once the bytes are gone, a moment later.
        async with asyncio.timeout(60):
            while await upload_whole(gateway, key, os.urandom(MIB)) == 403:
                pass
        statuses = [await upload_whole(gateway, key, os.urandom(MIB)) for _ in range(3)]
        assert statuses == [200] * 3


async def test_open_uploads_of_one_key_are_bounded_in_number_and_memory(tmp_path):
    """Far below what two hundred would hold; a killed gateway's uploads count no longer."""
    async with started(tmp_path, tenant_files=10_000) as gateway:
        before = gateway.resident_bytes
        accepted, refused = await begin_many(gateway, gateway.process.key, 200)
        assert (len(accepted), set(refused)) == (TENANT_UPLOADS, {429})
        await asyncio.gather(*(upload.send(os.urandom(FILE_BYTES - 1)) for upload in accepted))
        await until(lambda: stored_bytes(gateway) > TENANT_UPLOADS * (FILE_BYTES - MIB))
        assert gateway.resident_bytes - before < 64 * MIB
        await gateway.serves_others()
        for upload in accepted:
            upload.abandon()


async def test_uploads_of_many_tenants_leave_the_logs_disk_its_reserve(disk):
    """Files and log on one disk: uploads that do not fit are refused when they begin, and requests served."""

    def free() -> int:
        return shutil.disk_usage(disk).free

    async with started(disk, keep_free_bytes=RESERVE_BYTES) as gateway, AsyncExitStack() as stack:
        keys = [gateway.process.key] + [await make_tenant(gateway, f"tenant-{each}") for each in range(3)]
        room = free() - RESERVE_BYTES
        uploads: list[Upload] = []
        refusals: Counter[int] = Counter()
        for key in keys:
            accepted, refused = await begin_many(gateway, key, TENANT_UPLOADS)
            uploads, refusals = uploads + accepted, refusals + refused
        for upload in uploads:
            stack.callback(upload.abandon)
        assert set(refusals) == {503}
        assert room // 2 < len(uploads) * FILE_BYTES <= room
        await asyncio.gather(*(upload.send(os.urandom(FILE_BYTES)) for upload in uploads))
        # All but what is gathered for the next write: the filler below must not be overtaken by the uploads.
        await until(lambda: stored_bytes(gateway) >= len(uploads) * (FILE_BYTES - GATHERED_BYTES))
        assert free() > RESERVE_BYTES - SLACK_BYTES
        # Another program fills the disk: uploads stop although they reserved the space.
        filler = disk / "filler"
        filler.write_bytes(bytes(max(0, free() - RESERVE_BYTES)))
        assert await upload_whole(gateway, keys[-1], b"x" * MIB) == 503
        await gateway.serves_others()
        assert free() > RESERVE_BYTES - SLACK_BYTES


async def test_slow_upload_ends_after_its_time(tmp_path):
    """It is answered, and its reservation released."""
    async with started(tmp_path, upload_seconds=1, tenant_bytes=FILE_BYTES + MIB) as gateway:
        slow = await Upload.begin(gateway, gateway.process.key)
        assert slow.status == 100
        assert await upload_whole(gateway, gateway.process.key, b"x" * 2 * MIB) == 403
        assert await slow.read_status() == 408
        slow.abandon()
        assert await upload_whole(gateway, gateway.process.key, b"x" * 2 * MIB) == 200


async def test_requests_for_files_and_batches_of_one_key_are_bounded(tmp_path):
    """As many unread downloads as a tenant may have; others are served, the tenant when a download ends."""
    async with started(tmp_path) as gateway, AsyncExitStack() as stack:
        key, other = gateway.process.key, await make_tenant(gateway, "other")
        async with client(gateway, key) as session:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", io.BytesIO(bytes(FILE_BYTES)), filename="in.jsonl")
            stored = await (await session.post("/v1/files", data=form)).json()
        unread = [gateway.connect(receive_bytes=4096) for _ in range(TENANT_REQUESTS)]
        for connection in unread:
            stack.callback(connection.close)
            head = gateway.head(0, key=key, path=f"/v1/files/{stored['id']}/content")
            connection.sendall(head.replace(b"POST", b"GET", 1))
            assert connection.recv(12) == b"HTTP/1.1 200"
        for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1"):
            async with client(gateway, key) as session, session.get(path) as answer:
                assert answer.status == 429
                assert (await answer.json())["error"]["code"] == "at_capacity"
        async with client(gateway, other) as session, session.get("/v1/files") as answer:
            assert answer.status == 200
        await gateway.serves_others()
        unread[0].close()
        await serves(gateway, key, "/v1/files")
