"""Workers join and leave without a restart."""

import asyncio
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigurationError
from appliance.serving.discovery import HELD_SECONDS, Discovery, parse_service, resolve, worker_at
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel
from tests.fakes import until

SERVICE = "http://workers.llm.svc:8000"


class Names:
    """A resolver with configured answers; it can fail."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.error: Exception | None = None
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> tuple[str, ...]:
        self.asked.append((host, port))
        if self.error is not None:
            raise self.error
        return self.addresses


SILENT = structlog.wrap_logger(structlog.ReturnLogger())


def discovery(
    pool: WorkerPool, *urls: str, names: Names | None = None, seconds: float = 5.0, logger=SILENT, **more
) -> Discovery:
    return Discovery(
        pool=pool,
        urls=urls,
        discover=SERVICE if names is not None else None,
        seconds=seconds,
        logger=logger,
        resolve=names or Names(),
        **more,
    )


def ids(pool: WorkerPool) -> list[str]:
    """Workers in the pool that are not leaving."""
    return [seen.worker.worker_id for seen in pool.snapshots if not seen.leaving]


def ports(pool: WorkerPool) -> set[int | None]:
    """Ports of the control listeners."""
    return {urlsplit(seen.worker.control_url).port for seen in pool.snapshots}


def test_listed_workers_start_unhealthy():
    """They get requests once they were found healthy, and not before."""
    pool = WorkerPool()
    discovery(pool, "http://10.0.0.1:8000/", "http://10.0.0.2:8000", "http://10.0.0.1:8000")
    assert ids(pool) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert [seen.worker.url for seen in pool.snapshots] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert not pool.any_healthy()


@pytest.mark.parametrize(
    ("url", "chosen", "control"),
    [
        ("http://10.0.0.1:8000/", None, "http://10.0.0.1:8001"),
        ("http://10.0.0.1:8000", 7000, "http://10.0.0.1:7000"),
        ("https://[fd00::1]:8000/models/a", None, "https://[fd00::1]:8001"),
        ("https://worker.example", None, "https://worker.example:444"),
    ],
)
def test_a_worker_is_controlled_at_the_next_port_unless_the_settings_name_one(url, chosen, control):
    assert worker_at(url, chosen).control_url == control


@pytest.mark.parametrize(
    ("url", "problem"), [("http://a:65535", "no port follows"), ("http://a:x", "no valid port")]
)
def test_a_worker_without_a_control_port_is_refused(url, problem):
    with pytest.raises(ConfigurationError, match=problem):
        worker_at(url)


async def test_every_worker_found_has_the_control_port_of_the_settings():
    pool = WorkerPool()
    found = discovery(pool, "http://10.0.0.9:8000", names=Names("10.0.0.1"), control_port=7000)
    await found.resolve_now(parse_service(SERVICE))
    assert {seen.worker.control_port for seen in pool.snapshots} == {7000}
    assert len(pool.snapshots) == 2


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
        ("https://worker.example/models/a", "worker.example-models-a"),
        ("http://user:secret@worker.example:1", "worker.example:1"),
    ],
)
def test_a_worker_is_named_by_its_address(url: str, name: str):
    """The same name on every gateway; it fits a path of the admin API and holds no secret."""
    assert worker_at(url).worker_id == name


@pytest.mark.parametrize(
    "url", ["", "10.0.0.1:8000", "ftp://10.0.0.1", "http://", "http://a?x=1", "http://a#b"]
)
def test_invalid_base_url_is_refused(url: str):
    """In one line that names it."""
    with pytest.raises(ConfigurationError, match=r"pool\.urls"):
        worker_at(url)


@pytest.mark.parametrize(
    "url",
    ["", "workers:8000", "ftp://workers:8000", "http://workers:8000/v1", "http://a:b", "http://u@a:1"],
)
def test_invalid_discover_url_is_refused(url: str):
    with pytest.raises(ConfigurationError, match=r"pool\.discover"):
        parse_service(url)


def test_invalid_list_changes_nothing():
    pool = WorkerPool()
    workers = discovery(pool, "http://a:1", "http://b:1")
    with pytest.raises(ConfigurationError):
        workers.replace(["http://c:1", "nonsense"], None)
    assert ids(pool) == ["a:1", "b:1"]
    changes = workers.replace(["http://b:1", "http://c:1"], None)
    assert (changes.joined, changes.left) == (("c:1",), ("a:1",))
    assert ids(pool) == ["b:1", "c:1"]


def test_removed_worker_finishes_its_requests():
    """It is in the pool until then, without new requests."""
    pool = WorkerPool()
    workers = discovery(pool, "http://a:1")
    pool.begin("a:1")
    workers.replace([], None)
    assert pool.snapshot("a:1").leaving
    pool.end("a:1")
    assert pool.snapshot("a:1") is None


def test_worker_that_is_listed_again_before_it_left_stays():
    """Its place, its health and its requests are kept."""
    pool = WorkerPool()
    workers = discovery(pool, "http://a:1")
    pool.update(replace(pool.snapshot("a:1"), healthy=True))
    pool.begin("a:1")
    workers.replace([], None)
    workers.replace(["http://a:1"], None)
    pool.end("a:1")
    assert pool.snapshot("a:1").takes_requests


def test_worker_at_another_url_is_a_new_worker():
    """The same name with TLS: it gets no request before its first scrape."""
    pool = WorkerPool()
    workers = discovery(pool, "http://a:1")
    pool.update(replace(pool.snapshot("a:1"), healthy=True))
    changes = workers.replace(["https://a:1"], None)
    assert (changes.joined, changes.left) == (("a:1",), ())
    assert pool.snapshot("a:1").worker.url == "https://a:1"
    assert not pool.any_healthy()


async def test_another_control_port_is_that_of_every_worker_from_then_on():
    """Of listed ones, of discovered ones, and of those that are discovered later."""
    pool, names = WorkerPool(), Names("10.0.0.1")
    workers = discovery(pool, "http://a:1", names=names)
    await workers.resolve_now(parse_service(SERVICE))
    assert ports(pool) == {2, 8001}
    changes = workers.replace(["http://a:1"], SERVICE, 9)
    assert set(changes.joined) == set(ids(pool))
    assert ports(pool) == {9}
    names.addresses = ("10.0.0.1", "10.0.0.2")
    changes = await workers.resolve_now(parse_service(SERVICE))
    assert (len(changes.joined), ports(pool)) == (1, {9})
    assert workers.replace(["http://a:1"], SERVICE, 9).joined == ()


def test_a_scrape_of_where_a_worker_was_does_not_move_it_back():
    pool = WorkerPool()
    workers = discovery(pool, "http://a:1")
    before = pool.snapshot("a:1")
    workers.replace(["https://a:1"], None)
    pool.update(replace(before, healthy=True))
    assert pool.snapshot("a:1").worker.url == "https://a:1"
    assert not pool.any_healthy()


def test_workers_that_were_not_discovered_are_kept():
    """A worker that this process started is in no list."""
    pool = WorkerPool()
    pool.add(worker_at("http://own:1"))
    workers = discovery(pool, "http://a:1")
    workers.replace([], None)
    assert ids(pool) == ["own:1"]


async def test_host_name_yields_a_worker_per_address():
    """A and AAAA records, in addition to the listed workers."""
    pool, names = WorkerPool(), Names("10.0.0.1", "fd00::1")
    workers = discovery(pool, "http://a:1", names=names)
    await workers.resolve_now(parse_service(SERVICE))
    assert names.asked == [("workers.llm.svc", 8000)]
    assert ids(pool) == ["a:1", "10.0.0.1:8000", "[fd00::1]:8000"]
    assert pool.snapshot("[fd00::1]:8000").worker.url == "http://[fd00::1]:8000"
    names.addresses = ("10.0.0.2",)
    changes = await workers.resolve_now(parse_service(SERVICE))
    assert (changes.joined, changes.left) == (("10.0.0.2:8000",), ("10.0.0.1:8000", "[fd00::1]:8000"))
    assert ids(pool) == ["a:1", "10.0.0.2:8000"]


async def test_discovered_workers_with_tls_must_have_the_name_of_the_service():
    """Certificates are made out to names, not to the addresses of pods."""
    pool = WorkerPool()
    workers = discovery(pool, names=Names("10.0.0.1"))
    workers.replace([], "https://workers.llm.svc")
    await workers.resolve_now(parse_service("https://workers.llm.svc"))
    worker = pool.snapshot("10.0.0.1:443").worker
    assert worker.address == ("https://10.0.0.1:443", "workers.llm.svc")


@pytest.mark.parametrize("error", [OSError("no such host"), TimeoutError(), UnicodeError("label too long")])
async def test_resolver_failure_changes_nothing(error: Exception):
    """Nor does an answer without an address; the log has one failure, and one recovery."""
    pool, names, log = WorkerPool(), Names("10.0.0.1"), structlog.testing.LogCapture()
    workers = discovery(pool, names=names, logger=structlog.wrap_logger(None, processors=[log]))
    service = parse_service(SERVICE)
    await workers.resolve_now(service)
    names.error = error
    await workers.resolve_now(service)
    names.error, names.addresses = None, ()
    await workers.resolve_now(service)
    assert ids(pool) == ["10.0.0.1:8000"]
    names.addresses = ("10.0.0.1",)
    await workers.resolve_now(service)
    said = [entry["event"] for entry in log.entries]
    assert said == ["worker_joined", "discovery_failed", "discovery_recovered"]


async def test_the_last_worker_of_a_model_stays_known_while_its_pod_is_replaced():
    """Other models' pods are in the name all the time; clients of this one wait, and get no 404."""
    pool, names = WorkerPool(), Names("10.0.0.1", "10.0.0.2")
    now = [1000.0]
    workers = discovery(pool, names=names, clock=lambda: now[0])
    service = parse_service(SERVICE)
    await workers.resolve_now(service)

    def serves(address: str, model: str) -> None:
        seen = pool.snapshot(worker_at(f"http://{address}:8000").worker_id)
        models = (ServedModel(name=model, max_model_len=None, created=0),)
        pool.update(replace(seen, healthy=True, models=models, seen_at=now[0]))

    serves("10.0.0.1", "large")
    serves("10.0.0.2", "small")
    names.addresses = ("10.0.0.2",)
    await workers.resolve_now(service)
    assert set(pool.models()) == {"large", "small"}
    names.addresses = ("10.0.0.2", "10.0.0.3")
    await workers.resolve_now(service)
    serves("10.0.0.3", "large")
    await workers.resolve_now(service)
    assert ids(pool) == ["10.0.0.2:8000", "10.0.0.3:8000"]
    names.addresses = ("10.0.0.2",)
    now[0] += HELD_SECONDS + 1
    await workers.resolve_now(service)
    assert set(pool.models()) == {"small"}, "a model that was removed is forgotten"


async def test_name_is_resolved_at_intervals_and_at_reload():
    """Every few seconds, and at once when the list is replaced."""
    pool, names = WorkerPool(), Names("10.0.0.1")
    workers = discovery(pool, names=names, seconds=0.02)
    running = asyncio.ensure_future(workers.run())
    try:
        await until(lambda: len(names.asked) >= 3)
        names.addresses = ("10.0.0.2",)
        workers.replace(["http://a:1"], SERVICE)
        await until(lambda: ids(pool) == ["a:1", "10.0.0.2:8000"])
        workers.replace(["http://a:1"], None)
        assert ids(pool) == ["a:1"]
        asked = len(names.asked)
        await asyncio.sleep(0.05)
        assert len(names.asked) <= asked + 1
        assert ids(pool) == ["a:1"]
    finally:
        running.cancel()


async def test_resolution_of_a_replaced_name_is_dropped():
    """The reload happened during the resolution."""
    pool, names = WorkerPool(), Names("10.0.0.1")
    workers = discovery(pool, names=names)
    workers.replace([], None)
    await workers.resolve_now(parse_service(SERVICE))
    assert ids(pool) == []


async def test_system_resolver_returns_addresses():
    """As they are put into URLs."""
    assert set(await resolve("localhost", 80)) <= {"127.0.0.1", "::1"}


@given(st.lists(st.sets(st.sampled_from("abcd")), max_size=10))
def test_pool_matches_the_newest_list(lists: list[set[str]]):
    """After any previous lists, when no request is in flight."""
    pool = WorkerPool()
    workers = discovery(pool)
    for names in lists:
        workers.replace([f"http://{name}:1" for name in names], None)
        assert {seen.worker.worker_id for seen in pool.snapshots} == {f"{name}:1" for name in names}
