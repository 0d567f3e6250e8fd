"""A command is recorded before it takes effect, and an error changes nothing."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from appliance.audit.entry_types import EntryType
from appliance.control.worker_list import WorkerList, digest_of
from appliance.errors import AuditUnavailableError, ControlRefusedError
from appliance.infra.settings import load_settings
from appliance.serving.discovery import Discovery
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel
from appliance.sovereignty.wall import NO_WALL, Wall
from tests.fakes import until

SILENT = structlog.wrap_logger(structlog.ReturnLogger())
DEMO = ServedModel(name="demo", max_model_len=None, created=0)


class Recorded(list):
    """An audit log that keeps entries, and can fail."""

    fails = False

    async def __call__(self, entry_type: EntryType, /, **fields: Any) -> None:
        if self.fails:
            raise AuditUnavailableError("the disk is full")
        self.append((entry_type, fields))


class Place:
    """A gateway's list of workers in a settings file."""

    def __init__(self, file: Path, *, wall: Wall = NO_WALL) -> None:
        self.file = file
        self.write("a", "b")
        settings = load_settings(file, environment={})
        self.pool, self.log = WorkerPool(), Recorded()
        self.list = WorkerList(
            pool=self.pool,
            discovery=Discovery(
                pool=self.pool, urls=settings.pool.urls, discover=None, seconds=5.0, logger=SILENT
            ),
            settings=settings,
            read_settings=lambda: load_settings(file, environment={}),
            record=self.log,
            logger=SILENT,
            wall=wall,
        )

    def write(self, *names: str, more: str = "") -> None:
        urls = ", ".join(f"'http://{name}:1'" for name in names)
        self.file.write_text(f"pool:\n  urls: [{urls}]\n{more}", encoding="utf-8")

    def healthy(self, *names: str) -> None:
        """Make these workers healthy."""
        for name in names:
            self.pool.update(replace(self.pool.snapshot(f"{name}:1"), healthy=True, models=(DEMO,)))

    @property
    def ids(self) -> list[str]:
        return [seen.worker.worker_id for seen in self.pool.snapshots]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "settings.yaml")


async def test_a_reload_applies_the_list_and_records_the_change(place: Place):
    """With the settings' names, digests before and after, and the actor; without values."""
    place.write("b", "c")
    before = digest_of(
        load_settings(environment={}, overrides={"pool": {"urls": ["http://a:1", "http://b:1"]}})
    )
    changes = await place.list.reload("admin")
    assert (changes.joined, changes.left) == (("c:1",), ("a:1",))
    assert place.ids == ["b:1", "c:1"]
    ((entry_type, fields),) = place.log
    assert entry_type is EntryType.CONFIG_CHANGED
    assert fields["changes"] == ("pool.urls",)
    assert (fields["actor"], fields["previous_digest"]) == ("admin", before)
    assert fields["digest"] == digest_of(load_settings(place.file, environment={}))


async def test_a_reload_applies_the_control_port_to_workers_that_stay(place: Place):
    """It is recorded as a change of its own."""
    place.write("a", "b", more="  control_port: 9\n")
    changes = await place.list.reload("admin")
    assert (changes.joined, changes.left) == (("a:1", "b:1"), ())
    assert [seen.worker.control_url for seen in place.pool.snapshots] == ["http://a:9", "http://b:9"]
    ((_, fields),) = place.log
    assert fields["changes"] == ("pool.control_port",)


async def test_a_reload_of_the_same_list_changes_and_records_nothing(place: Place):
    """Other settings need a restart."""
    place.write("a", "b", more="api:\n  port: 9999\n")
    changes = await place.list.reload("admin")
    assert (changes.joined, changes.left, place.log) == ((), (), [])


@pytest.mark.parametrize(
    "text", ["pool: {urls: [nonsense]}", "pool: {discover: 'ftp://x:1'}", "pool: [", "x: {}"]
)
async def test_a_reload_of_an_invalid_file_changes_nothing(place: Place, text: str):
    """With a one-line error."""
    place.file.write_text(text, encoding="utf-8")
    with pytest.raises(ControlRefusedError) as caught:
        await place.list.reload("admin")
    assert "\n" not in str(caught.value)
    assert (place.ids, place.log) == (["a:1", "b:1"], [])


async def test_a_reload_names_a_port_outside_the_wall(tmp_path: Path):
    """Instead of workers that can never be reached."""
    place = Place(tmp_path / "settings.yaml", wall=Wall(is_up=True, detail="", ports=frozenset({1, 2})))
    place.write("c")
    await place.list.reload("admin")
    place.file.write_text("pool: {urls: ['http://d:5']}", encoding="utf-8")
    with pytest.raises(ControlRefusedError, match="pool: port 5-6 is blocked by the wall"):
        await place.list.reload("admin")
    assert (place.ids, len(place.log)) == (["c:1"], 1)


async def test_a_command_that_cannot_be_recorded_changes_nothing(place: Place):
    """Neither the list nor a worker; the reload can be retried."""
    place.healthy("a", "b")
    place.write("c")
    place.log.fails = True
    with pytest.raises(AuditUnavailableError):
        await place.list.reload("admin")
    with pytest.raises(AuditUnavailableError):
        await place.list.drain("a:1", actor="admin", note="", force=False)
    assert place.ids == ["a:1", "b:1"]
    assert all(seen.takes_requests for seen in place.pool.snapshots)
    place.log.fails = False
    await place.list.reload("admin")
    assert (place.ids, len(place.log)) == (["c:1"], 1)


async def test_a_drained_worker_can_be_undrained(place: Place):
    """Both are recorded, with the reason if there is one."""
    place.healthy("a", "b")
    await place.list.drain("a:1", actor="admin", note="new fan", force=False)
    assert not place.pool.snapshot("a:1").takes_requests
    await place.list.undrain("a:1", actor="admin", note="")
    assert place.pool.snapshot("a:1").takes_requests
    assert place.log == [
        (
            EntryType.WORKER_DRAINED,
            {"worker": "a:1", "drained": True, "actor": "admin", "note": "new fan"},
        ),
        (EntryType.WORKER_DRAINED, {"worker": "a:1", "drained": False, "actor": "admin"}),
    ]


async def test_the_last_worker_of_a_model_is_drained_only_with_force(place: Place):
    """An operator's mistake must not stop the service; one that takes no requests may be drained."""
    place.healthy("a")
    with pytest.raises(ControlRefusedError, match="demo"):
        await place.list.drain("a:1", actor="admin", note="", force=False)
    assert place.log == []
    await place.list.drain("b:1", actor="admin", note="", force=False)
    await place.list.drain("a:1", actor="admin", note="", force=True)
    assert not place.pool.any_healthy()


async def test_a_reload_that_fails_does_not_end_the_gateway(place: Place):
    """The next signal reloads the repaired file."""
    hangup = asyncio.Event()
    listening = asyncio.ensure_future(place.list.reload_on(hangup, "cli:root"))
    place.file.write_text("pool: {urls: [nonsense]}", encoding="utf-8")
    hangup.set()
    await until(lambda: not hangup.is_set())
    assert place.ids == ["a:1", "b:1"]
    place.write("c")
    hangup.set()
    await until(lambda: place.ids == ["c:1"])
    assert not listening.done()
    listening.cancel()
