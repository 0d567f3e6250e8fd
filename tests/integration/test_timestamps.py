"""The log is time-stamped by OpenSSL's `ts` over loopback, or by file, and nothing waits for it."""

import json
import re
import shutil
import ssl
import threading
import time

import pytest
from typer.testing import CliRunner

from appliance.audit import verify
from appliance.audit.checkpoint import parse_note
from appliance.audit.export import export_log
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps import timestamping
from appliance.audit.timestamps.authority import make_query
from appliance.audit.timestamps.store import Timestamps
from appliance.audit.timestamps.timestamping import Timestamping
from appliance.cli import cli
from appliance.errors import AuditVerificationError, ConfigurationError
from appliance.infra.settings import AuditSettings
from tests.certificates import LOOPBACK, Authority
from tests.growing_log import Log
from tests.timestamp_authority import OTHER_POLICY, POLICY, QUERY, REPLY, TimestampAuthority, answering

ORIGIN = "appliance.local/audit"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return TimestampAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def log(tmp_path):
    """A data directory with a log that grows on demand."""
    (tmp_path / "data").mkdir(mode=0o700)
    create_signing_key(tmp_path / "data" / "audit.key")
    store = SqlAuditStore(f"sqlite:///{tmp_path}/data/audit.db")
    log = Log(store, load_signing_key(tmp_path / "data" / "audit.key", ORIGIN))
    log.grow(3)
    yield log
    store.close()


class Hours:
    """A monotonic clock that is moved by hand."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def make(log, authority):
    """Make the task of one gateway; what it reports is in `reported`, its clock in `hours`."""

    def make_(url=None, *, store=log.store, clock=time.time, **settings):  # noqa: TID251 - a root of its own
        hours, reported = Hours(), []
        given = {"timestamp_certificate_file": authority.certificate, "timestamp_url": url, **settings}
        task = Timestamping(
            store=store,
            settings=AuditSettings(**given),
            clock=clock,
            random_bytes=lambda size: b"\x81" * size,
            report=lambda event, problem: reported.append((event, problem)),
            monotonic=hours,
        )
        task.hours, task.reported = hours, reported
        return task

    return make_


def kept(log):
    return list(Timestamps(log.store.database).all())


def verdict(log, tmp_path, authority):
    directory = tmp_path / "export"
    shutil.rmtree(directory, ignore_errors=True)
    export_log(log.store, directory, vkey=log.signer.vkey)
    options = verify._parser().parse_args(
        [str(directory), "--key", log.signer.vkey, "--timestamp-cert", str(authority.issuer)]
    )
    return verify._verify(options, verify.State())


async def test_the_newest_checkpoint_is_stamped_at_intervals(make, log, authority, tmp_path):
    """Not each, not the same one twice, and not again right after a restart."""
    with answering(authority.reply) as (url, asked):
        task = make(url, timestamp_policy=OTHER_POLICY)
        await task.round()
        assert (task.level.size, [kind for kind, _ in asked]) == (3, [QUERY])
        log.grow(2)
        await task.round()
        assert len(asked) == 1, "it is not due yet"
        task.hours.now += 3600
        log.grow(2)
        await task.round()
        await task.round()
        task.hours.now += 3600
        await task.round()
        assert [stamp.size for stamp in kept(log)] == [3, 7], "the log has not grown since"
        log.grow(1)
        again = make(url)
        await again.round()
        assert (len(asked), again.level.size) == (2, 7)
        assert task.reported == []
    report = verdict(log, tmp_path, authority)
    assert (report.exit_code, report.timestamps.newest.size) == (0, 7)
    assert report.timestamps.newest.policy == OTHER_POLICY
    assert task.level.time == kept(log)[-1].time
    assert abs(task.level.clock_difference) < 60


async def test_gateways_share_the_time_stamps(make, log, authority):
    """One asks; another one sees it and waits."""
    with answering(authority.reply) as (url, asked):
        one, other = make(url), make(url, store=SqlAuditStore(str(log.store._engine.url)))
        for _ in range(3):
            await one.round()
            await other.round()
            log.grow(1)
        assert (len(asked), other.level.size) == (1, 3)
        other._store.close()


async def test_only_the_answer_to_the_request_is_kept(make, log, authority, tmp_path):
    """By this authority, with this policy, over this checkpoint, with this nonce, and not altered."""
    stranger = TimestampAuthority(tmp_path / "stranger")
    text = parse_note(log.store.latest_checkpoint().note).text

    def altered(query):
        response = authority.reply(query)
        return response[:-1] + bytes([response[-1] ^ 1])

    for answer, words in (
        (lambda _: authority.reply(make_query("other", policy=POLICY, nonce=1)), "something other"),
        (lambda _: authority.reply(make_query(text, policy=POLICY, nonce=1)), "another nonce"),
        (lambda _: authority.reply(make_query(text, policy=POLICY)), "another nonce"),
        (lambda _: authority.reply(make_query(text, policy=OTHER_POLICY, nonce=1)), OTHER_POLICY),
        (lambda _: authority.reply(make_query(text, policy="1.2.3.4.7")), "refusal"),
        (stranger.reply, "certificate_file lacks"),
        (altered, "wrong signature"),
        (lambda _: b"", "not well formed"),
        (lambda _: b"<html>" * 100, "not well formed"),
        (lambda _: bytes(2**17), "no time stamp"),
        (lambda _: (503, REPLY, b""), "status 503"),
        (lambda _: (200, "text/html", b"hello"), "text/html"),
        (lambda _: (302, REPLY, b""), "status 302"),
    ):
        with answering(answer) as (url, _):
            task = make(url, timestamp_policy=POLICY)
            await task.round()
            ((event, problem),) = task.reported
            assert event == "timestamp_failed"
            assert words in problem, problem
            assert (task.level.failures, kept(log)) == (1, [])
    with answering(authority.reply) as (url, _):
        await make(url, timestamp_policy=POLICY).round()
    assert len(kept(log)) == 1


async def test_an_authority_that_is_away_is_asked_again_more_and_more_rarely(make, log, authority):
    """One report for one problem, and one when it is over."""
    is_away = True

    def answer(query):
        return (500, REPLY, b"") if is_away else authority.reply(query)

    with answering(answer) as (url, asked):
        task = make(url)
        for _ in range(120):
            await task.round()
            task.hours.now += 60
        assert 6 <= len(asked) <= 9, "two hours"
        assert task.level.failures == len(asked)
        is_away = False
        task.hours.now += 3600
        await task.round()
    assert [event for event, _ in task.reported] == ["timestamp_failed", "timestamp_made"]
    assert (task.level.failures, task.level.size) == (0, 3)


async def test_a_slow_or_dead_authority_is_given_up(make, log, authority, monkeypatch):
    """After its time; nothing is kept."""
    monkeypatch.setattr(timestamping, "TIMEOUT_SECONDS", 0.2)
    released = threading.Event()

    def answer_late(query):
        released.wait(20)
        return authority.reply(query)

    with answering(answer_late) as (url, _):
        task = make(url)
        await task.round()
        released.set()
    assert "cannot be reached" in task.reported[0][1]
    dead = make(url)
    await dead.round()
    assert "cannot be reached" in dead.reported[0][1]
    assert kept(log) == []


async def test_an_answer_is_not_read_further_than_a_time_stamp_can_be_long(make, log):
    with answering(lambda _: bytes(2**25)) as (url, _):
        task = make(url)
        await task.round()
    ((_, problem),) = task.reported
    assert int(re.search(r"(\d+) bytes or more", problem)[1]) < 2**22


async def test_https_with_an_authority_and_a_client_certificate_of_ones_own(make, log, authority, tmp_path):
    ours = Authority("ours")
    (tmp_path / "ca.pem").write_text(ours.pem)
    server, client = ours.issue(tmp_path, "server", *LOOPBACK), ours.issue(tmp_path, "client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    context.load_verify_locations(tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    files = {
        "timestamp_client_certificate_file": client.certificate,
        "timestamp_client_key_file": client.key,
    }
    with answering(authority.reply, context=context) as (url, asked):
        for settings in (files, {"timestamp_ca_file": tmp_path / "ca.pem"}):
            task = make(url, **settings)
            await task.round()
            assert (task.level.failures, asked) == (1, [])
        task = make(url, **files, timestamp_ca_file=tmp_path / "ca.pem")
        await task.round()
        assert task.level.size == 3
    with pytest.raises(ConfigurationError, match="cannot be used"):
        make(url, timestamp_ca_file=tmp_path / "none.pem")


@pytest.mark.parametrize(("ahead", "word"), [(-3600, "behind"), (3600, "ahead of"), (0, None)])
async def test_a_clock_that_differs_is_reported_and_refuses_nothing(make, log, authority, ahead, word):
    with answering(authority.reply) as (url, _):
        task = make(url, clock=lambda: time.time() + ahead)  # noqa: TID251 - a root of its own
        await task.round()
    assert task.level.size == 3
    assert task.level.clock_difference == pytest.approx(-ahead, abs=5)
    if word is None:
        assert task.reported == []
    else:
        ((event, problem),) = task.reported
        assert event == "timestamp_clock_differs"
        assert "our clock is 36" in problem or "our clock is 35" in problem
        assert f"s {word} the" in problem


async def test_without_an_authority_nothing_is_asked(make, log):
    task = make(timestamp_certificate_file=None)
    await task.round()
    assert (task.level.seconds, task.level.size) == (0, 0)


def test_a_request_is_the_one_that_openssl_makes(authority):
    for policy in (None, POLICY, "2.999.128.16384.1"):
        ours = make_query("some text\n", policy=policy)
        assert ours == authority.query(b"some text\n", policy=policy)


def run(log, authority, *arguments):
    """Run `appliance audit` on the log's directory."""
    data = ["--data", log.store._engine.url.database.removesuffix("/audit.db")]
    environment = {"APPLIANCE_AUDIT__TIMESTAMP_CERTIFICATE_FILE": str(authority.certificate)}
    return CliRunner().invoke(cli, ["audit", *map(str, arguments), *data], env=environment)


def test_time_stamps_are_carried_by_file(log, authority, tmp_path):
    """Request, answer by another machine, import: also after the log has grown."""
    query, response = tmp_path / "request.tsq", tmp_path / "response.tsr"
    assert "UNTIMED (by file): 3 entries" in run(log, authority, "timestamp", "status").stdout
    assert "first 3 entries" in run(log, authority, "timestamp", "request", query).stdout
    log.grow(2)
    response.write_bytes(authority.reply(query.read_bytes()))
    for _ in range(2):
        assert (
            "the first 3 entries were stamped at"
            in run(log, authority, "timestamp", "import", response).stdout
        )
    assert "): 3 of 5 entries" in run(log, authority, "timestamp", "status").stdout
    verified = run(log, authority, "verify", "--timestamps-needed", 1, "--json")
    assert json.loads(verified.stdout)["timestamps"]["size"] == 3
    assert (verified.exit_code, run(log, authority, "verify", "--timestamps-needed", 2).exit_code) == (0, 7)


def test_only_time_stamps_of_this_log_are_imported(log, authority, tmp_path):
    stranger = TimestampAuthority(tmp_path / "stranger")
    text = parse_note(log.store.latest_checkpoint().note).text.encode()
    response = tmp_path / "response.tsr"
    for content, words in (
        (authority.stamp(text.replace(b"3", b"4")), "no checkpoint of this log"),
        (stranger.stamp(text), "certificate_file lacks"),
        (authority.query(text), "not well formed"),
        (bytes(2**20), "longer than any"),
    ):
        response.write_bytes(content)
        result = run(log, authority, "timestamp", "import", response)
        assert isinstance(result.exception, AuditVerificationError)
        assert words in str(result.exception)
    assert kept(log) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timestamp_url": "https://tsa.example"}, "set timestamp_certificate_file"),
        ({"timestamp_url": "ftp://tsa.example", "timestamp_certificate_file": "c"}, "http://host/path"),
        (
            {"timestamp_ca_file": "ca.pem", "timestamp_url": "http://t", "timestamp_certificate_file": "c"},
            "https",
        ),
        ({"timestamp_client_key_file": "k"}, "come together"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        AuditSettings(**settings)


@pytest.mark.parametrize("policy", ["1", "policy", "1.2.03", "3.1"])
def test_a_policy_that_is_none_is_refused(make, policy):
    with pytest.raises(ConfigurationError, match="object identifier"):
        make(timestamp_policy=policy)
