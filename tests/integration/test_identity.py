"""
Keys, tokens and certificates, over HTTP and TLS.

Every test ends with the auditor's verifier finding the whole log valid and complete.
"""

import asyncio
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest
import yaml
from cryptography import x509
from prometheus_client import generate_latest

from appliance.infra.settings import OidcSettings, TlsSettings
from appliance.tenancy.directory import REFUSAL
from appliance.tenancy.identity.tokens import subject_id
from demo.process import ApplianceProcess
from tests.certificates import LOOPBACK, Authority, Files
from tests.fakes import MODEL, FakeWorker, chat, until
from tests.identity_provider import AUDIENCE, ISSUER, Provider, publish

AUTHORITY, CLIENTS = Authority("servers"), Authority("clients")
PROVIDER = Provider()
CHAT = "/v1/chat/completions"


@pytest.fixture
def tls(tmp_path: Path) -> TlsSettings:
    """A certificate for loopback."""
    files = AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK)
    return TlsSettings(certificate_file=files.certificate, key_file=files.key)


@pytest.fixture
def mutual(tmp_path: Path, tls: TlsSettings) -> TlsSettings:
    """With client certificates; two are known."""
    (tmp_path / "clients.pem").write_text(CLIENTS.pem)
    return tls.model_copy(
        update={
            "client_ca_file": tmp_path / "clients.pem",
            "client_tenants": {"uri:spiffe://bank/billing": "acme", "cn:scoped": "scoped"},
        }
    )


@pytest.fixture
def billing(tmp_path: Path) -> Files:
    """A client certificate of the tenant acme."""
    return CLIENTS.issue(tmp_path, "billing", x509.UniformResourceIdentifier("spiffe://bank/billing"))


@pytest.fixture
def oidc(tmp_path: Path) -> OidcSettings:
    """A provider whose groups lead to tenants."""
    return OidcSettings(
        jwks_file=publish(tmp_path / "keys.json", PROVIDER),
        issuer=ISSUER,
        audience=AUDIENCE,
        tenant_claim="groups",
        tenants={"cardiology": "acme", "lab": "scoped"},
        admin_claim="groups",
        admin_values=("operators",),
    )


def trusting(files: Files | None = None) -> ssl.SSLContext:
    """The authorities that a client trusts, and its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=AUTHORITY.pem)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def client(running, context: ssl.SSLContext, key: str) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(verify=context, trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, http_client=http)


def hello(running, context: ssl.SSLContext, headers: dict[str, str] | None = None):
    """Send a request over a new connection."""

    async def ask() -> tuple[int, dict]:
        connector = aiohttp.TCPConnector(ssl=context)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(running.url + CHAT, json=chat(), headers=headers) as response,
        ):
            return response.status, await response.json()

    return ask()


# Keys, as each client sends them.


@pytest.mark.parametrize("names", [("x-api-key",), ("api-key",), ("x-api-key", "api-key", "x-api-key")])
async def test_a_key_may_come_in_any_of_its_headers(running, names):
    """Anthropic's, Azure's; also several that say the same."""
    headers = dict.fromkeys(names, running.key)
    assert (await running.post(chat(), key=None, **headers)).status == 200
    assert (await running.post(chat(), **headers)).status == 200


async def test_keys_that_disagree_are_refused(running):
    """Although each of them is good."""
    reply = await running.post(chat(), x_api_key=running.scoped_key)
    assert (reply.status, reply.error["message"]) == (401, REFUSAL)
    assert (await running.events("caller_refused"))[0]["reason"] == "credentials_disagree"


# Tokens.


async def test_a_token_calls_for_its_tenant_and_is_recorded_by_its_subject(serve, oidc):
    """The openai client takes it where it takes a key."""
    running = await serve(FakeWorker(), oidc=oidc)
    token = PROVIDER.token(groups=["staff", "cardiology"])
    async with client(running, trusting(), token) as openai_client:
        answer = await openai_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}]
        )
    assert answer.choices
    outcome = await running.outcome()
    assert (outcome["tenant"], outcome["key_id"]) == ("acme", subject_id("jwt", ISSUER, "ada"))
    scoped = await running.post(chat(), key=PROVIDER.token(groups=["lab"]))
    assert scoped.status == 404


async def test_refused_tokens_read_alike_and_the_log_says_why(serve, oidc):
    """Clients get no reason, operators do, and no log has the token."""
    running = await serve(FakeWorker(), oidc=oidc)
    tokens = {
        "token_signature": Provider().token(groups=["lab"]),
        "token_expired": PROVIDER.token(exp=1),
        "token_type": PROVIDER.token(groups=["lab"], nonce="n"),
        "token_lifetime": PROVIDER.token(groups=["lab"], iat=1),
        "token_audience": PROVIDER.token(aud="another"),
        "token_tenant": PROVIDER.token(groups=["staff"]),
        "token_key_unknown": Provider("k9").token(),
        "api_key": "sk-nonsense",
    }
    replies = [await running.post(chat(), key=token) for token in tokens.values()]
    assert {(reply.status, reply.body) for reply in replies} == {(401, replies[0].body)}
    assert [line["reason"] for line in await running.events("caller_refused", len(tokens))] == list(tokens)
    page = generate_latest(running.metrics.registry).decode()
    written = running.log.getvalue() + page
    for reason, token in tokens.items():
        assert f'appliance_callers_refused_total{{reason="{reason}"}} 1.0' in page
        assert not any(part in written for part in token.split(".") if len(part) > 8)


async def test_an_admins_token_administers_and_calls_no_models(serve, oidc):
    """As an admin key does."""
    running = await serve(FakeWorker(), oidc=oidc)
    admin = PROVIDER.token(groups=["operators", "cardiology"])
    assert (await running.get("/admin/v1/status", key=admin)).status == 200
    assert (await running.post(chat(), key=admin)).status == 401
    assert (await running.get("/admin/v1/status", key=PROVIDER.token(groups=["cardiology"]))).status == 401


async def test_keys_a_provider_withdraws_stop_working_while_the_gateway_runs(serve, oidc):
    """The gateway reloads the file, and clears its cache of verified tokens."""
    running = await serve(FakeWorker(), oidc=oidc)
    old, successor = PROVIDER.token(groups=["cardiology"]), Provider("k2")
    assert (await running.post(chat(), key=old)).status == 200
    oidc.jwks_file.write_text("half of")
    await running.events("jwks_reload_failed")
    assert (await running.post(chat(), key=old)).status == 200
    publish(oidc.jwks_file, successor)
    await running.events("jwks_loaded", 2)
    assert (await running.post(chat(), key=old)).status == 401
    assert (await running.post(chat(), key=successor.token(groups=["cardiology"]))).status == 200


# TLS.


async def test_a_stream_over_tls_is_the_stream(serve, tls):
    """Byte for byte, to a client that checks the certificate."""
    running = await serve(FakeWorker(), tls=tls)
    assert running.url.startswith("https://")
    connector = aiohttp.TCPConnector(ssl=trusting())
    headers = {"Authorization": f"Bearer {running.key}"}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(running.url + CHAT, json=chat(stream=True), headers=headers) as response,
    ):
        assert await response.read() == b"".join(running.worker.frames(CHAT, {}))
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await running.session.post(running.url + CHAT)


async def test_a_new_certificate_takes_over_and_streams_continue(serve, tls, tmp_path):
    """Connections that are open keep theirs; the next one gets the new one."""
    running = await serve(FakeWorker(), tls=tls)
    running.worker.pause_seconds = 0.2
    async with client(running, trusting(), running.key) as openai_client:
        stream = await openai_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK)
        await running.events("tls_certificate_loaded", 2)
        new = await served(running)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == "".join(running.worker.pieces)
    assert new == x509.load_pem_x509_certificate(tls.certificate_file.read_bytes()).serial_number


async def served(running) -> int:
    """Serial number of the certificate a new connection is shown."""
    host, port = running.url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=trusting())
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(found).serial_number


async def test_plain_http_to_a_tls_port_does_no_harm(serve, tls):
    """The connection ends; the next one works."""
    running = await serve(FakeWorker(), tls=tls)
    with pytest.raises(aiohttp.ClientError):
        await running.session.get(running.url.replace("https", "http") + "/healthz")
    status, _ = await hello(running, trusting(), {"Authorization": f"Bearer {running.key}"})
    assert status == 200


async def test_a_stopping_gateway_does_not_wait_for_an_idle_client(serve, tls):
    """One that keeps its connection open for later requests."""
    running = await serve(FakeWorker(), tls=tls)
    host, port = running.url.removeprefix("https://").split(":")

    def ask() -> ssl.SSLSocket:
        connection = trusting().wrap_socket(socket.create_connection((host, int(port))), server_hostname=host)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        return connection

    connection = await asyncio.to_thread(ask)
    with connection:
        running.server.should_exit = True
        await until(lambda: not running.server.server_state.connections, 20)


# Client certificates.


async def test_a_certificate_alone_calls_for_its_tenant(serve, mutual, billing):
    """And is recorded under its own name, the same on every connection."""
    running = await serve(FakeWorker(), tls=mutual)
    for count in (1, 2):
        assert (await hello(running, trusting(billing)))[0] == 200
        outcome = await running.outcome(count)
        assert outcome["tenant"] == "acme"
        assert outcome["key_id"] == subject_id("cert", "uri:spiffe://bank/billing")


async def test_caller_without_certificate_or_key_gets_401(serve, mutual, tmp_path):
    """A certificate that maps to no tenant is refused."""
    running = await serve(FakeWorker(), tls=mutual)
    stranger = CLIENTS.issue(tmp_path, "stranger")
    for context in (trusting(), trusting(stranger)):
        status, body = await hello(running, context)
        assert (status, body["error"]["message"]) == (401, REFUSAL)
    reasons = [line["reason"] for line in await running.events("caller_refused", 2)]
    assert reasons == ["no_credential", "certificate_tenant"]


async def test_a_certificate_of_another_authority_does_not_connect(serve, mutual, tmp_path):
    """TLS itself refuses it."""
    running = await serve(FakeWorker(), tls=mutual)
    own = Authority("others").issue(tmp_path, "own", x509.UniformResourceIdentifier("spiffe://bank/billing"))
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await hello(running, trusting(own))


async def test_required_certificate_and_key_must_be_of_one_tenant(serve, mutual, billing):
    """Health needs neither, so that a probe can ask."""
    strict = mutual.model_copy(update={"require_client_certificate": True})
    running = await serve(FakeWorker(), tls=strict)
    key = {"Authorization": f"Bearer {running.key}"}
    assert (await hello(running, trusting(), key))[0] == 401
    assert (await hello(running, trusting(billing), {"Authorization": f"Bearer {running.scoped_key}"}))[
        0
    ] == 401
    assert (await hello(running, trusting(billing), key))[0] == 200
    reasons = [line["reason"] for line in await running.events("caller_refused", 2)]
    assert reasons == ["certificate_missing", "certificate_of_another"]
    async with running.session.get(running.url + "/healthz", ssl=trusting()) as response:
        assert response.status == 200


async def test_the_certificate_in_force_is_gone_once_its_connection_is(serve, mutual, billing):
    """The certificate belongs to one connection: the next one without a certificate has none."""
    running = await serve(FakeWorker(), tls=mutual)
    assert (await hello(running, trusting(billing)))[0] == 200
    assert (await hello(running, trusting()))[0] == 401
    await until(lambda: len(running.server.server_state.connections) == 0)


# The process.


async def test_a_gateway_process_serves_tls_to_clients_and_commands(tmp_path, mutual):
    """Of a settings file, on its own loop: certificates call, commands ask, a new certificate takes over."""
    nurse = CLIENTS.issue(tmp_path, "nurse")
    (tmp_path / "ca.pem").write_text(AUTHORITY.pem)
    tls = mutual.model_copy(update={"client_tenants": {"cn:nurse": "demo"}})
    worker = FakeWorker()

    def run() -> None:
        with ApplianceProcess("gateway", "--config", str(settings), data=tmp_path / "data") as process:
            assert process.url.startswith("https://127.0.0.1:")
            with_certificate = httpx.Client(verify=trusting(nurse), trust_env=False)
            without = httpx.Client(verify=trusting(), trust_env=False)
            with with_certificate, without:
                assert with_certificate.post(process.url + CHAT, json=chat()).status_code == 200
                assert without.post(process.url + CHAT, json=chat()).status_code == 401
                assert not_after(without.get(process.admin_url + "/metrics").text) == ends(tls)
                command = "status", "--once", "--url", process.admin_url, "--data", str(tmp_path / "data")
                shown = subprocess.run(
                    [sys.executable, "-m", "appliance", *command],
                    env={**os.environ, "SSL_CERT_FILE": str(tmp_path / "ca.pem")},
                    capture_output=True, text=True, check=True, timeout=60,
                )  # fmt: skip
                assert MODEL in shown.stdout
                AUTHORITY.issue(tmp_path, "gateway", *LOOPBACK, lasts=timedelta(days=60))
                deadline = time.monotonic() + 30
                while not_after(without.get(process.admin_url + "/metrics").text) != ends(tls):
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            with httpx.Client(verify=trusting(nurse), trust_env=False) as afterwards:
                assert afterwards.post(process.url + CHAT, json=chat()).status_code == 200

    async with worker.serving():
        settings = tmp_path / "appliance.yaml"
        sections = {"tls": tls.model_dump(mode="json"), "pool": {"urls": [worker.url]}}
        settings.write_text(yaml.safe_dump(sections))
        await asyncio.to_thread(run)


def ends(tls: TlsSettings) -> float:
    """When the certificate in the file ends, in Unix time."""
    certificate = x509.load_pem_x509_certificate(tls.certificate_file.read_bytes())
    return certificate.not_valid_after_utc.timestamp()


def not_after(page: str) -> float:
    """When the certificate in force ends, as the metrics say."""
    found = re.search(r"^appliance_tls_certificate_not_after_timestamp_seconds (\S+)$", page, re.MULTILINE)
    return float(found[1])
