"""Sessions, login limits, forms, history and chart of the console."""

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from starlette.requests import Request

from appliance.api.console.chart import HEIGHT, MAX_LINES, WIDTH, draw
from appliance.api.console.forms import MAX_FORM_BYTES, MAX_FORM_FIELDS, is_from_here, read_form
from appliance.api.console.history import KEPT_SECONDS, SAMPLE_SECONDS, AcceptanceSample, History
from appliance.api.console.sessions import MAX_ADDRESSES, MAX_SESSIONS, LoginAttempts, Sessions
from appliance.api.console.views import MODES, REASONS
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import Worker, WorkerId
from appliance.speculation.values import Reason, SpeculationMode
from tests.clock import Clock
from tests.fakes import FakeBucket, FakeControl, FakeView


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return Sessions(idle_seconds=60, longest_seconds=300, clock=clock)


def test_a_session_is_found_only_by_its_id(sessions):
    """Ids and tokens are long and random."""
    first, second = sessions.begin("key 1"), sessions.begin("key 2")
    assert sessions.find(first).credential == "key 1"
    assert sessions.find(first[:-1]) is None
    assert sessions.find("") is None
    tokens = {first, second, sessions.find(first).csrf, sessions.find(second).csrf}
    assert len(tokens) == 4
    assert all(len(token) >= 43 for token in tokens)


def test_an_idle_session_ends(sessions, clock):
    """Live fragments do not count as use."""
    session_id = sessions.begin("key")
    clock.now += 59
    assert sessions.find(session_id)
    clock.now += 59
    assert sessions.find(session_id, touches=False)
    clock.now += 1
    assert sessions.find(session_id) is None


def test_a_session_ends_at_its_maximum_age(sessions, clock):
    session_id = sessions.begin("key")
    for _ in range(9):
        clock.now += 30
        assert sessions.find(session_id)
    clock.now += 30
    assert sessions.find(session_id) is None


def test_logging_out_ends_one_session(sessions):
    first, second = sessions.begin("key"), sessions.begin("key")
    sessions.end(first)
    sessions.end(first)
    assert sessions.find(first) is None
    assert sessions.find(second)


def test_sessions_are_bounded(sessions):
    """The least recently used one is dropped."""
    first, second = sessions.begin("key"), sessions.begin("key")
    sessions.find(first)
    for _ in range(MAX_SESSIONS - 1):
        sessions.begin("key")
    assert sessions.find(second) is None
    assert sessions.find(first)


def test_the_repr_of_a_session_has_no_secret(sessions):
    session = sessions.find(sessions.begin("sk-secret"))
    assert "sk-secret" not in repr(session)
    assert session.csrf not in repr(session)


def test_a_form_needs_the_token_of_its_session(sessions):
    mine, other = (sessions.find(sessions.begin("key")) for _ in range(2))
    assert mine.vouches_for(mine.csrf)
    for token in ("", other.csrf, mine.csrf[:-1], "é"):
        assert not mine.vouches_for(token)


def test_an_address_waits_after_too_many_failures(clock):
    """Only that address, and for a limited time."""
    logins = LoginAttempts(attempts=3, seconds=60, clock=clock)
    for _ in range(3):
        assert logins.wait_seconds("10.0.0.1") == 0
        logins.failed("10.0.0.1")
        clock.now += 10
    assert logins.wait_seconds("10.0.0.1") == 30
    assert logins.wait_seconds("10.0.0.2") == 0
    clock.now += 30
    assert logins.wait_seconds("10.0.0.1") == 0


def test_a_successful_login_resets_the_count(clock):
    logins = LoginAttempts(attempts=1, seconds=60, clock=clock)
    logins.failed("10.0.0.1")
    logins.succeeded("10.0.0.1")
    assert logins.wait_seconds("10.0.0.1") == 0


def test_addresses_are_bounded(clock):
    logins = LoginAttempts(attempts=1, seconds=60, clock=clock)
    for number in range(MAX_ADDRESSES + 1):
        logins.failed(str(number))
    assert logins.wait_seconds("0") == 0
    assert logins.wait_seconds("1") > 0


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-site", "origin": "http://here:1", "host": "here:1"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"origin": "https://here:1", "host": "here:1"}, True),
        ({"origin": "https://there:1", "host": "here:1"}, False),
        ({"origin": "null", "host": "here:1"}, False),
        ({"host": "here:1"}, False),
    ],
)
def test_only_forms_of_our_own_pages_are_accepted(headers, expected):
    assert is_from_here(request(headers)) is expected


async def test_forms_are_read_within_bounds():
    assert await read_form(request({"content-length": "9"}, b"key=a%26b")) == {"key": "a&b"}
    for headers, body in (
        ({}, b"key=a"),
        ({"content-length": str(MAX_FORM_BYTES + 1)}, b"key=a"),
        ({"content-length": "x"}, b"key=a"),
        ({"content-length": "5"}, b"\xff\xfe=1"),
        ({"content-length": "60"}, b"&".join([b"a=1"] * (MAX_FORM_FIELDS + 1))),
    ):
        assert await read_form(request(headers, body)) == {}


def request(headers: dict[str, str], body: bytes = b"") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def sample(at: float, length: float | None, break_even: float | None = 1.3) -> AcceptanceSample:
    return AcceptanceSample(at=at, length=length, break_even=break_even)


def test_a_chart_has_gaps_where_samples_are_missing():
    """A line is not drawn across a long gap, nor across a missing value."""
    kept = [sample(2, 2.0), sample(4, 2.0), sample(6, None), sample(8, 2.0), sample(40, 2.0), sample(42, 2.0)]
    chart = draw({"w1": kept}, now=60)
    assert re.findall("[ML]", chart.lines[0].length) == ["M", "L", "M", "M", "L"]
    assert re.findall("[ML]", chart.lines[0].break_even) == ["M", "L", "L", "L", "M", "L"]


def test_a_chart_stays_inside_the_drawing():
    chart = draw({"w1": [sample(2 * step, 1.0 + step % 5) for step in range(300)]}, now=KEPT_SECONDS)
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", chart.lines[0].length)
    assert len(points) == 300
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in points)
    assert [row.label for row in chart.rows] == ["1", "2", "3", "4", "5"]


def test_a_chart_counts_the_workers_it_omits():
    chart = draw({f"w{number}": [sample(0, 2.0)] for number in range(MAX_LINES + 2)}, now=1)
    assert len(chart.lines) == MAX_LINES
    assert chart.omitted == 2
    assert not chart.is_empty
    assert draw({"w": [sample(0, None)]}, now=1).is_empty
    assert draw({}, now=1).is_empty


def test_the_history_keeps_ten_minutes_and_drops_workers_that_left(clock):
    pool, control = WorkerPool(), FakeControl()
    history = History(pool=pool, control=control, clock=clock, logger=structlog.get_logger())
    pool.add(Worker(worker_id=WorkerId("w1"), url="http://w1"))
    control.views["w1"] = FakeView()
    for _ in range(3):
        history.sample()
        clock.now += KEPT_SECONDS / 2
    assert [each.at for each in history.samples["w1"]] == [1000.0, 1300.0, 1600.0]
    assert {each.break_even for each in history.samples["w1"]} == {1.31}
    pool.leave(WorkerId("w1"))
    clock.now += KEPT_SECONDS
    history.sample()
    assert history.samples == {}


async def test_a_defect_in_a_sample_is_logged_once_and_sampling_continues(clock, monkeypatch):
    """If a view raises, the gateway continues and old samples are dropped."""
    logged, ticks = [], 0
    logger = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=[lambda _logger, _level, event: logged.append((event["event"], event["error"])) or ""],
        wrapper_class=structlog.make_filtering_bound_logger(0),
    )
    pool, control = WorkerPool(), FakeControl()
    pool.add(Worker(worker_id=WorkerId("w1"), url="http://w1"))
    history = History(pool=pool, control=control, clock=clock, logger=logger)

    def view(_worker):
        if 2 <= ticks <= 5 or ticks == 8:
            message = "no view"
            raise ZeroDivisionError(message)

    async def sleep(seconds):
        nonlocal ticks
        assert seconds == SAMPLE_SECONDS
        ticks += 1
        clock.now += 200
        if ticks == 10:
            raise asyncio.CancelledError

    monkeypatch.setattr(control, "view", view)
    monkeypatch.setattr("appliance.api.console.history.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await history.run()
    assert logged == [("console_history_failed", "ZeroDivisionError")] * 2
    assert [each.at for each in history.samples["w1"]] == [2200.0, 2400.0, 2800.0]


def test_break_even_is_that_of_the_nearest_measured_batch(clock):
    pool, control = WorkerPool(), FakeControl()
    history = History(pool=pool, control=control, clock=clock, logger=structlog.get_logger())
    pool.add(Worker(worker_id=WorkerId("w1"), url="http://w1"))
    (snapshot,) = pool.snapshots
    assert history.break_even(snapshot) is None
    buckets = (FakeBucket(bucket=1, break_even=1.2), FakeBucket(bucket=8, break_even=1.8))
    control.views["w1"] = FakeView(buckets=(*buckets, FakeBucket(bucket=4, break_even=None)))
    for batch, expected in ((0, 1.2), (2, 1.2), (7, 1.8), (60, 1.8)):
        reading: Any = SimpleNamespace(batch=batch)
        assert history.break_even(replace(snapshot, reading=reading)) == expected


def test_every_mode_and_reason_has_a_text():
    assert set(MODES) == set(SpeculationMode)
    assert set(REASONS) == set(Reason)
