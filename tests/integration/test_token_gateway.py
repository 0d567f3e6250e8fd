"""
A real gateway process, inside its wall, whose signing key is in a SoftHSM token; and the commands that sign.

Every test ends with the independent verifier over the whole log.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from appliance.audit import verify
from appliance.audit.verify import ExitCode
from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.infra.data_directory import locate, private_paths
from appliance.infra.settings import load_settings
from demo.process import ApplianceProcess
from tests.bundles import CREATED, KEY_NAME, Workshop
from tests.command import run_command
from tests.fakes import FakeWorker, chat
from tests.how_to import run_block
from tests.tokens import PIN, WRONG, Tokens, use
from tests.unit.drafts.registry.site import NOW, Site

ORIGIN = "appliance.local/audit"


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    tokens = use(Tokens.make(tmp_path / "softhsm"), monkeypatch)
    tokens.create("log", "audit", "audit-2")
    return tokens


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


@pytest.fixture
async def worker():
    async with FakeWorker().serving() as worker:
        yield worker


@dataclass
class Running:
    process: ApplianceProcess
    session: aiohttp.ClientSession

    async def ask(self) -> int:
        async with self.session.post("/v1/chat/completions", json=chat()) as response:
            await response.read()
            return response.status

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.process.admin_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])


def settings_of(worker, key: object) -> dict[str, str]:
    return {
        "APPLIANCE_POOL__URLS": json.dumps([worker.url]),
        "APPLIANCE_AUDIT__SIGNING_KEY_FILE": str(key),
        "APPLIANCE_AUDIT__CHECKPOINT_SECONDS": "0.1",
        "APPLIANCE_AUDIT__GATEWAY_DEAD_SECONDS": "0.5",
    }


@asynccontextmanager
async def gateway(data: Path, worker, key: object):
    process = ApplianceProcess("gateway", data=data, environment=settings_of(worker, key))
    try:
        await asyncio.to_thread(process.wait_ready)
        headers = {"Authorization": f"Bearer {process.key}"}
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(process.url, headers=headers, timeout=timeout) as session:
            yield Running(process, session)
        assert await asyncio.to_thread(process.stop) == 0
    finally:
        await asyncio.to_thread(process.stop)
        process.process.stdout.close()


async def refusal(data: Path, worker, key: object) -> str:
    """What a gateway says that does not start."""
    process = ApplianceProcess("gateway", data=data, environment=settings_of(worker, key))
    try:
        assert await asyncio.to_thread(process.process.wait, 60) != 0
        return "".join(process.output)
    finally:
        await asyncio.to_thread(process.stop)
        process.process.stdout.close()


def audited(data: Path, key: object, *trusted: str) -> verify.Report:
    """The independent verifier's report of an export; the token is not there meanwhile."""
    directory = data.parent / f"export-{len(list(data.parent.glob('export-*')))}"
    done = run_command(
        *("audit", "export", directory, "--data", data),
        APPLIANCE_AUDIT__SIGNING_KEY_FILE=str(key),
        SOFTHSM2_CONF="/missing",
    )
    assert done.returncode == 0, done.stderr
    keys = [key for text in trusted or ((directory / "vkey").read_text(),) for key in verify.parse_keys(text)]
    return verify.verify_export(directory, keys, None)


async def test_gateway_serves_with_its_key_in_a_token_and_outlives_its_loss(tokens, data, worker):
    """Requests are served and recorded without it; one checkpoint covers them all once it is back."""
    key = tokens.uri("log", "audit")
    async with gateway(data, worker, key) as running:
        assert "TCP connections only to ports" in "".join(running.process.output)
        assert await running.ask() == 200
        tokens.lose()
        assert await running.ask() == 200
        await until_async(lambda: running.metric("appliance_audit_checkpoint_lag_entries"))
        signed = await running.metric("appliance_audit_checkpoint_timestamp_seconds")
        assert await running.ask() == 200
        assert await running.metric("appliance_audit_checkpoint_timestamp_seconds") == signed
        tokens.restore()

        async def caught_up() -> bool:
            return await running.metric("appliance_audit_checkpoint_lag_entries") == 0

        await until_async(caught_up)
    report = audited(data, key)
    assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
    assert report.entries_by_type["request.outcome"] == 3
    for file in data.rglob("*"):
        assert not file.is_file() or b"PRIVATE KEY" not in file.read_bytes()
    assert not (data / "audit.key").exists()


async def until_async(true) -> None:
    async with asyncio.timeout(60):
        while not await true():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.05)


async def test_gateways_in_a_restart_loop_try_a_wrong_pin_once(tokens, data, worker):
    key = tokens.uri("log", "audit", spied=True)
    tokens.write_pin(WRONG)
    before = tokens.logins()
    assert "refused the PIN" in await refusal(data, worker, key)
    for _ in range(2):
        assert "no PIN is tried" in await refusal(data, worker, key)
    assert tokens.logins() == before + 1
    tokens.write_pin(PIN)
    tokens.tool("log", "--list-objects")
    async with gateway(data, worker, key) as running:
        assert await running.ask() == 200
    assert audited(data, key).exit_code == ExitCode.VALID


async def test_key_moves_from_file_to_token_and_between_objects_and_back(tokens, data, worker, tmp_path):
    """By the command; an auditor with the first key follows, and the former key starts no gateway."""
    first, last = data / "audit.key", tmp_path / "audit-new.key"
    places = [first, tokens.uri("log", "audit"), tokens.uri("log", "audit-2"), last]
    async with gateway(data, worker, first) as running:
        assert await running.ask() == 200
    trusted = run_command("audit", "key", "--data", data).stdout
    for old, new in pairwise(places):
        done = run_command(
            *("audit", "rotate-key", "--to", new, "--data", data),
            APPLIANCE_AUDIT__SIGNING_KEY_FILE=str(old),
        )
        assert done.returncode == 0, done.stderr
        assert f"Destroy {old}" in done.stderr
        assert "handed over" in await refusal(data, worker, old)
        async with gateway(data, worker, new) as running:
            assert await running.ask() == 200
        report = audited(data, new, trusted)
        assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
    assert report.entries_by_type["signer.rotated"] == 3


async def test_ceremony_and_handover_of_the_how_to(data, worker, tmp_path, monkeypatch):
    """docs/how-to/keep-signing-keys-in-a-token.md, verbatim: an empty token, and a log with a key file."""
    tokens = use(Tokens.make(tmp_path / "softhsm"), monkeypatch)
    page, pin_file = "keep-signing-keys-in-a-token.md", tmp_path / "pin"
    variables = {
        "MODULE": tokens.module,
        "PIN_FILE": pin_file,
        "DATA": data,
        "SO_PIN": "1357",
        "USER_PIN": PIN,
    }
    async with gateway(data, worker, data / "audit.key") as running:
        assert await running.ask() == 200
    trusted = run_command("audit", "key", "--data", data).stdout
    printed = {}
    steps = ("Initialise the token", "Generate the key pair", "Write the PIN file", "Print the verifier key")
    for title in (*steps, "Hand the log over"):
        done = run_block(page, title, **variables)
        assert done.returncode == 0, (title, done.stdout + done.stderr)
        printed[title] = done.stdout
    assert pin_file.stat().st_mode & 0o777 == 0o600
    assert printed["Print the verifier key"] in printed["Hand the log over"]
    key = f"pkcs11:token=log;object=audit-2027?module-path={tokens.module}&pin-source={pin_file}"
    async with gateway(data, worker, key) as running:
        assert await running.ask() == 200
    report = audited(data, key, trusted)
    assert (report.exit_code, report.problems) == (ExitCode.VALID, [])


def test_rotation_within_a_token_needs_the_new_key(tokens, data):
    data.mkdir()
    done = run_command(
        *("audit", "rotate-key", "--data", data),
        APPLIANCE_AUDIT__SIGNING_KEY_FILE=tokens.uri("log", "audit"),
    )
    assert "name it in --to" in done.stderr


@pytest.mark.parametrize(
    ("break_it", "seen"),
    [
        (lambda tokens: None, "in the token log, it signs"),
        (lambda tokens: tokens.pin.chmod(0o644), "others may read the PIN"),
        (lambda tokens: tokens.lose(), "is there 0 times"),
        (lambda tokens: tokens.write_pin(WRONG), "refused the PIN"),
        (
            lambda tokens: tokens.tool("log", "--delete-object", "--type", "privkey", "--label", "audit"),
            "has 0",
        ),
    ],
    ids=["good", "open PIN", "no token", "wrong PIN", "no key"],
)
def test_preflight_tells_whether_the_token_signs(tokens, data, break_it, seen):
    break_it(tokens)
    done = run_command(
        *("preflight", "--role", "gateway", "--json", "--data", data),
        APPLIANCE_AUDIT__SIGNING_KEY_FILE=tokens.uri("log", "audit"),
    )
    (check,) = [each for each in json.loads(done.stdout)["checks"] if each["id"] == "audit.key"]
    assert seen in check["seen"]
    assert check["result"] == ("ok" if "it signs" in seen else "fail")
    assert "\n" not in check["seen"]


def test_bundle_signed_in_a_token_is_verified_at_the_site(tokens, tmp_path):
    key = tokens.uri("log", "audit")
    recipe = Workshop.open(tmp_path / "workshop").recipe()
    trusted = tmp_path / "trusted"
    trusted.write_text(run_command("bundle", "new-key", key, "--key-name", KEY_NAME).stdout)
    built = run_command(
        *("bundle", "build", recipe, tmp_path / "bundle", "--key", key, "--key-name", KEY_NAME),
        *("--key-not-after", "2030-12-31", "--created", CREATED),
    )
    assert built.returncode == 0, built.stderr
    tokens.lose()
    verified = run_command("bundle", "verify", tmp_path / "bundle", "--trusted", trusted)
    assert verified.returncode == 0, verified.stderr


def test_draft_signed_in_a_token_is_one_of_the_sites_own(tokens, data, tmp_path, monkeypatch):
    """Later processes trust it without the token."""
    monkeypatch.setenv("APPLIANCE_DRAFTS__SIGNING_KEY_FILE", tokens.uri("log", "audit"))
    settings = load_settings(None, overrides={"data": {"directory": str(data)}})
    printed = run_command("draft", "key", "--data", data)
    assert printed.returncode == 0, printed.stderr
    maker = Site.open(tmp_path / "maker")
    source = maker.draft()
    added = open_registry(settings, lambda: NOW).register(
        read_source(source), target=maker.target, how="trained", signer=site_signer(settings)
    )
    tokens.lose()
    assert open_registry(settings, lambda: NOW).revisions() == (added,)


def test_worker_is_kept_from_pin_and_post_quantum_key(tokens, data, monkeypatch):
    monkeypatch.setenv("APPLIANCE_AUDIT__SIGNING_KEY_FILE", tokens.uri("log", "audit"))
    settings = load_settings(None, overrides={"data": {"directory": str(data)}})
    hidden = private_paths(settings, locate(settings))
    assert {tokens.pin, tokens.pin.with_name("audit-mldsa.key")} <= hidden
