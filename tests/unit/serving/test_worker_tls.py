"""Connections to `https://` workers: who is trusted, and what is presented."""

import json
import ssl
from pathlib import Path

import pytest

from appliance.errors import ConfigurationError, ControlRefusedError, WorkerFailedError
from appliance.infra.settings import PoolSettings
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.restart import RestartClient
from appliance.serving.restart_request import WITH_DRAFT
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import Reason
from tests.certificates import LOOPBACK, Authority
from tests.fakes import CONTROL_TOKEN, MODEL, FakeWorker, chat

pytestmark = pytest.mark.usefixtures("loopback")
SITE, ANOTHER = Authority("the site"), Authority("another")
CHAT = "/v1/chat/completions"


def listening(directory: Path, authority: Authority = SITE, *, names=LOOPBACK) -> ssl.SSLContext:
    """TLS of a worker that refuses clients without a certificate of the site's."""
    files = authority.issue(directory, "worker", *names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(cadata=SITE.pem)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def gateway(directory: Path, authority: Authority = SITE) -> PoolSettings:
    """The settings of a gateway with a certificate of this authority."""
    files = authority.issue(directory, "gateway")
    (directory / "site.pem").write_text(SITE.pem)
    return PoolSettings(
        ca_file=directory / "site.pem", certificate_file=files.certificate, key_file=files.key
    )


async def exchange(worker: Worker, tls: WorkerTls) -> int:
    """Forward a request, poll, command and restart: each of the ways to a worker."""
    async with (
        WorkerClient.open(token=CONTROL_TOKEN, tls=tls, connect_seconds=5.0) as client,
        SpeculationClient.open(token=CONTROL_TOKEN, tls=tls) as speculation,
        RestartClient.open(token=CONTROL_TOKEN, tls=tls) as restarts,
    ):
        async with client.forward(worker, CHAT, [json.dumps(chat()).encode()], {}, 5.0) as answer:
            status = answer.status
            await answer.read(5.0)
        assert [model.name for model in await client.models(worker, 5.0)] == [MODEL]
        assert await client.metrics_page(worker, 5.0)
        assert not (await speculation.read(worker, 5.0)).controllable
        with pytest.raises(ControlRefusedError, match="it runs without the plugin"):
            await restarts.restart(worker, request=WITH_DRAFT, reason=Reason.COLLAPSED)
    return status


def at(fake: FakeWorker, tls_name: str = "") -> Worker:
    return Worker(worker_id=WorkerId("w1"), url=fake.url, tls_name=tls_name)


async def test_a_gateway_and_a_worker_of_the_site_accept_each_other(tmp_path):
    tls = WorkerTls(gateway(tmp_path))
    async with FakeWorker(tls=listening(tmp_path), token=CONTROL_TOKEN).serving() as fake:
        assert await exchange(at(fake), tls) == 200
        assert await exchange(at(fake, "localhost"), tls) == 200
    assert fake.refused == []


@pytest.mark.parametrize(
    "who", ["worker of another", "worker of another name", "gateway of another", "no gateway"]
)
async def test_a_stranger_is_refused_before_the_token_is_sent(tmp_path, who):
    strangers = {"worker of another": ANOTHER}
    server = listening(tmp_path, strangers.get(who, SITE))
    settings = gateway(tmp_path, ANOTHER if who == "gateway of another" else SITE)
    if who == "no gateway":
        settings = settings.model_copy(update={"certificate_file": None, "key_file": None})
    tls = WorkerTls(settings)
    async with FakeWorker(tls=server).serving() as fake:
        worker = at(fake, "worker.elsewhere" if who == "worker of another name" else "")
        async with (
            WorkerClient.open(token=CONTROL_TOKEN, tls=tls, connect_seconds=5.0) as client,
            SpeculationClient.open(token=CONTROL_TOKEN, tls=tls) as speculation,
            RestartClient.open(token=CONTROL_TOKEN, tls=tls) as restarts,
        ):
            with pytest.raises(WorkerFailedError):
                async with client.forward(worker, CHAT, [json.dumps(chat()).encode()], {}, 5.0):
                    pass
            with pytest.raises(WorkerFailedError):
                await client.models(worker, 5.0)
            with pytest.raises(WorkerFailedError):
                await speculation.read(worker, 5.0)
            with pytest.raises(WorkerFailedError):
                await restarts.restart(worker, request=WITH_DRAFT, reason=Reason.COLLAPSED)
    assert (fake.headers, fake.bodies) == ([], [])


async def test_renewed_files_are_used_by_new_connections(tmp_path):
    """The authority of the workers, and the gateway's own certificate; a broken file changes nothing."""
    settings = gateway(tmp_path, ANOTHER)
    tls = WorkerTls(settings)
    async with FakeWorker(tls=listening(tmp_path)).serving() as fake:
        with pytest.raises(WorkerFailedError):
            await exchange(at(fake), tls)
        settings.key_file.write_text("nonsense")
        before = tls.context
        tls.renew()
        assert tls.context is before
        gateway(tmp_path, SITE)
        tls.renew()
        assert await exchange(at(fake), tls) == 200


@pytest.mark.parametrize("missing", ["ca_file", "certificate_file", "key_file"])
def test_a_file_that_cannot_be_used_stops_the_start(tmp_path, missing):
    settings = gateway(tmp_path).model_copy(update={missing: tmp_path / "gone"})
    with pytest.raises(ConfigurationError, match=r"pool\.ca_file, pool\.certificate_file or pool\.key_file"):
        WorkerTls(settings)
