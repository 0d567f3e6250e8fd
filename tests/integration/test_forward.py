"""
The log forwarded to a real collector: rsyslog from Debian, over mutual TLS.
"""

import asyncio
import json
import re
import signal
import ssl
from datetime import timedelta
from functools import partial

import aiohttp
import pytest
from cryptography import x509

from appliance.audit.entry_types import EntryType
from appliance.audit.forward import collector as collector_module
from appliance.audit.forward import forwarder as forwarder_module
from appliance.audit.forward.cef import render_cef
from appliance.audit.forward.collector import Collector
from appliance.audit.forward.events import render_json
from appliance.audit.forward.ocsf import render_ocsf
from appliance.audit.signing_keys import load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.audit.verify import ExitCode
from appliance.errors import ForwardError
from appliance.infra.data_directory import locate
from appliance.infra.public_address import public_address_of
from appliance.infra.settings import AuditSettings, ForwardSettings
from demo.process import ApplianceProcess
from tests.audit_log import intent, open_log, outcome, prepare, settings_for, signer_in
from tests.certificates import Authority
from tests.fakes import FakeWorker, chat
from tests.forwarding import indices, judge_stream, make_forwarder
from tests.integration.siem import PATIENCE_SECONDS, Rsyslog


@pytest.fixture
def siem(tmp_path):
    directory = tmp_path / "siem"
    directory.mkdir()
    rsyslog = Rsyslog(directory).start()
    yield rsyslog
    rsyslog.stop()


@pytest.fixture
def forward_settings(siem):
    def forward_settings_(**changed):
        given = {
            "destination": siem.destination,
            "ca_file": siem.directory / "ca.pem",
            "certificate_file": siem.client.certificate,
            "key_file": siem.client.key,
        }
        return ForwardSettings(**(given | changed))

    return forward_settings_


@pytest.fixture
def log(tmp_path):
    """Directory, settings and store of a log."""
    directory = tmp_path / "log"
    prepare(directory)
    settings = settings_for(directory, checkpoint_entries=20)
    store = SqlAuditStore(locate(settings).database_url)
    yield settings, store, signer_in(directory)
    store.close()


async def record(opened, first, count):
    """Requests in a row."""
    for number in range(first, first + count):
        for kind, fields in ((EntryType.REQUEST_INTENT, intent), (EntryType.REQUEST_OUTCOME, outcome)):
            await opened.log.append(kind, **fields(f"r{number}"))


def over(settings, store, **changed):
    """A forwarder over a real connection."""

    class Real:
        def connect(self):
            return Collector.open(settings)

    return make_forwarder(store, Real(), **changed)


async def until(holds, why=lambda: ""):
    """Wait for a condition; the time limit of the test ends it."""
    try:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(why()) from None


@pytest.mark.parametrize("render", [render_json, render_ocsf, render_cef])
async def test_a_real_collector_stores_everything_in_order_and_it_proves_itself(
    render, log, siem, forward_settings
):
    """Byte for byte as sent, in each format."""
    settings, store, signer = log
    async with open_log(settings, store) as opened:
        forwarding = asyncio.create_task(over(forward_settings(), store, render=render).run())
        await record(opened, 0, 60)
        await until(lambda: len(indices(siem.lines)) >= 120, siem.said)
        forwarding.cancel()
        await asyncio.wait({forwarding})
    await over(forward_settings(), store, render=render).forward(until_sent=True)
    siem.stop()
    found = indices(siem.lines)
    assert list(dict.fromkeys(found)) == list(range(121))
    code, report = judge_stream(siem.stored, signer.vkey)
    assert (code, report["start"], report["end"], report["cut_off"]) == (ExitCode.VALID, 0, 121, 0), report


async def test_a_collector_killed_in_the_middle_and_started_again_misses_nothing(log, siem, forward_settings):
    """With SIGKILL: what it had read and not stored is sent again, too."""
    settings, store, signer = log
    forwarder = over(forward_settings(), store)
    async with open_log(settings, store) as opened:
        forwarding = asyncio.create_task(forwarder.run())
        for part in range(3):
            await record(opened, 100 * part, 100)
            await until(lambda seen=200 * part: len(set(indices(siem.lines))) > seen, siem.said)
            siem.kill()
            await record(opened, 1000 + 10 * part, 10)
            await until(lambda: forwarder.warning)
            siem.start()
        forwarding.cancel()
        await asyncio.wait({forwarding})
    await over(forward_settings(), store).forward(until_sent=True)
    siem.stop()
    code, report = judge_stream(siem.stored, signer.vkey)
    assert (code, report["start"], report["end"]) == (ExitCode.VALID, 0, store.head().size), report
    assert report["repeated"], "what had been sent before the kill was sent again"


async def test_a_collector_that_stops_reading_delays_no_request_and_takes_no_memory(
    log, siem, forward_settings, monkeypatch
):
    """What is not sent stays in the log; the lag shows it, and afterwards everything arrives."""
    monkeypatch.setattr(forwarder_module, "OBSERVE_SECONDS", 0.05)
    monkeypatch.setattr(forwarder_module, "RESTS", 0.0)
    written, sent = [], []
    real_send = Collector.send

    async def counting_send(self, data):
        written.append(len(data))
        # A peer that reads nothing takes several MiB into the kernels' buffers: send much more than that.
        await real_send(self, data)
        sent.append(len(data))
        assert self._writer.transport.get_write_buffer_size() <= collector_module.BUFFER_BYTES + len(data)

    monkeypatch.setattr(Collector, "send", counting_send)
    settings, store, signer = log
    forwarder = over(forward_settings(), store)
    async with open_log(settings, store) as opened:
        forwarding = asyncio.create_task(forwarder.run())
        await record(opened, 0, 20)
        await until(lambda: forwarder.state.lag_entries < 20 and indices(siem.lines), siem.said)
        siem.signal(signal.SIGSTOP)
        number, before = 100, -1
        # Until one send waited while all of these were recorded.
        while len(sent) != before or forwarder.state.lag_entries < 1000:
            assert number < 100_000, "the collector reads"
            before = len(sent)
            await record(opened, number, 500)
            number += 500
        assert len(written) == len(sent) + 1
        assert max(written) < 2**20
        siem.signal(signal.SIGCONT)
        await until(lambda: forwarder.state.lag_entries < 40, siem.said)
        forwarding.cancel()
        await asyncio.wait({forwarding})
    await over(forward_settings(), store).forward(until_sent=True)
    siem.stop()
    code, report = judge_stream(siem.stored, signer.vkey)
    assert (code, report["start"], report["end"]) == (ExitCode.VALID, 0, store.head().size), report


async def refused(settings):
    """Why a connection is not made."""
    with pytest.raises(ForwardError) as caught:
        async with Collector.open(settings) as collector:
            await collector.wait(PATIENCE_SECONDS)  # with TLS 1.3 its verdict on our certificate comes later
    return str(caught.value)


async def test_a_wrong_certificate_of_either_side_is_refused_and_says_so(siem, forward_settings, tmp_path):
    """Ours by the collector, the collector's by us: its authority, and its name."""
    stranger = Authority("stranger")
    strange = stranger.issue(tmp_path, "gateway.test", x509.DNSName("gateway.test"))
    (tmp_path / "strange.pem").write_text(stranger.pem)
    old = siem.authority.issue(tmp_path, "old.test", x509.DNSName("gateway.test"), lasts=timedelta(days=-1))
    # Not one of another name: this rsyslog checks names after the handshake, and not every time.
    for files in (strange, old):
        why = await refused(forward_settings(certificate_file=files.certificate, key_file=files.key))
        assert why.startswith("TLS failed") or "closed the connection" in why or "reset" in why.lower(), why
    why = await refused(forward_settings(certificate_file=None, key_file=None))
    assert why.startswith("TLS failed") or "closed the connection" in why or "reset" in why.lower(), why
    assert "its certificate is refused" in await refused(forward_settings(ca_file=tmp_path / "strange.pem"))
    assert indices(siem.lines) == []


async def test_a_collector_of_another_name_is_refused(tmp_path, siem, forward_settings):
    """An address that its certificate does not have."""
    files = siem.authority.issue(tmp_path, "elsewhere.test", x509.DNSName("elsewhere.test"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    why = await refused(forward_settings(destination=f"localhost:{port}"))
    assert "its certificate is refused" in why
    assert "localhost" in why
    server.close()


async def test_plain_tcp_and_an_absent_collector_are_refused(siem, forward_settings):
    def hello(_reader, writer):
        writer.write(b"hello\n")
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert (await refused(forward_settings(destination=f"localhost:{port}"))).startswith("TLS failed")
    server.close()
    await server.wait_closed()
    assert "refused" in (await refused(forward_settings(destination=f"localhost:{port}"))).lower()


async def test_a_public_destination_is_refused(siem, forward_settings, monkeypatch):
    """Before a connection is tried, whatever its name resolves to now."""
    resolve = partial(public_address_of, resolve=lambda _host: ["10.0.0.1", "1.1.1.1"])
    monkeypatch.setattr(collector_module, "public_address_of", resolve)
    assert "resolves to 1.1.1.1, a public address" in await refused(forward_settings())
    async with Collector.open(forward_settings(allow_public=True)):
        pass


async def test_a_gateway_forwards_inside_its_wall_and_reports_a_collector_that_is_away(
    tmp_path, siem, forward_settings
):
    """A whole process: settings, wall, readiness, metrics; requests are served all the time."""
    data = tmp_path / "data"
    environment = {"APPLIANCE_AUDIT__FORWARD": forward_settings().model_dump_json()}
    async with FakeWorker().serving() as worker:
        environment["APPLIANCE_POOL__URLS"] = json.dumps([worker.url])
        process = ApplianceProcess("gateway", data=data, environment=environment)
        try:
            await asyncio.to_thread(process.wait_ready)
            headers = {"Authorization": f"Bearer {process.key}"}
            async with aiohttp.ClientSession(process.url, headers=headers) as session:

                async def ask():
                    async with session.post("/v1/chat/completions", json=chat()) as response:
                        assert response.status == 200, await response.text()

                async def warnings():
                    async with session.get("/readyz") as response:
                        assert response.status == 200
                        return [each for each in (await response.json())["warnings"] if "forwarded" in each]

                async def lag():
                    async with session.get(f"{process.admin_url}/metrics") as response:
                        text = await response.text()
                    (line,) = re.findall(r"^appliance_audit_forward_lag_entries (\S+)$", text, re.MULTILINE)
                    return float(line)

                async def until_it(holds):
                    async with asyncio.timeout(60):
                        while not await holds():  # noqa: ASYNC110 - of another process
                            await asyncio.sleep(0.05)

                async def forwarded():
                    return any(b"request.outcome" in line for line in siem.lines) and not await lag()

                async def behind():
                    return await lag() >= 4 and await warnings()

                async def caught_up():
                    return not await lag() and not await warnings()

                await ask()
                await until_it(forwarded)
                assert await warnings() == []
                siem.kill()
                await ask()
                await ask()
                await until_it(behind)
                (warning,) = await warnings()
                assert "the log is not forwarded" in warning
                siem.start()
                await until_it(caught_up)
        finally:
            await asyncio.to_thread(process.stop)
            process.process.stdout.close()
    siem.stop()
    signer = load_signing_key(data / "audit.key", AuditSettings().origin)
    code, report = judge_stream(siem.stored, signer.vkey)
    assert code == ExitCode.VALID, report
    assert report["entries_by_type"]["request.outcome"] == 3
