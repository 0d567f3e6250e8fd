"""
`appliance preflight` as an installer runs it: on the demo pair, on an installation that has served, and on
machines where something is wrong.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from tests.certificates import LOOPBACK, Authority
from tests.command import run_command

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "reference" / "preflight.schema.json"
SECONDS = 300
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


def preflight(*arguments: object, before: tuple[str, ...] = ()) -> tuple[int, dict[str, dict]]:
    """Exit code and checks by id of one run that prints JSON; in a separate process behind `before`."""
    words = ("preflight", "--json", *map(str, arguments))
    if before:
        done = subprocess.run(
            [*before, sys.executable, "-m", "appliance", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    else:
        done = run_command(*words)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    return done.returncode, {check["id"]: check for check in report["checks"]}


def results(checks: dict[str, dict], *ids: str) -> list[str]:
    return [checks[name]["result"] for name in ids]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    """The data directory of a gateway that was started once and stopped."""
    data = tmp_path_factory.mktemp("served") / "data"
    start_once(data)
    return data


def start_once(data: Path, *arguments: str) -> None:
    """Run a gateway until it has signed its log, then stop it."""
    before = (data / "audit.head").stat().st_mtime_ns if (data / "audit.head").exists() else 0
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "appliance",
            "gateway",
            "--data",
            str(data),
            "--port",
            "0",
            "--admin-port",
            "0",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not ((data / "audit.head").exists() and (data / "audit.head").stat().st_mtime_ns > before):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "it signed nothing"
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
        process.stdout.close()


def test_the_demo_pair_on_a_fresh_machine(tmp_path):
    """No check fails, no file is created, and the tokenizer loads; the screen fits a hundred columns."""
    code, checks = preflight("--data", tmp_path / "data", "--skip", "ports")
    assert code == 0, checks
    assert results(checks, "weights.files", "draft.fits", "tokenizer.loads") == ["ok", "ok", "ok"]
    assert checks["ports.free"]["result"] == "skipped"
    assert not (tmp_path / "data").exists()
    shown = run_command("preflight", "--data", tmp_path / "data", "--skip", "tokenizer", "--skip", "ports")
    lines = shown.stdout.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert len(lines) < 60
    assert "ready" in lines[-1]


def test_an_installation_that_has_served(served):
    """Key, tables and entries are checked as well; warnings fail with `--strict`."""
    code, checks = preflight("--data", served, "--role", "gateway", "--skip", "ports")
    assert code == 0, checks
    names = ("settings.secrets", "database.reachable", "database.schema", "audit.key", "audit.newest")
    assert results(checks, *names) == ["ok"] * 5
    assert checks["weights.files"]["result"] == "skipped"
    assert checks["egress.outside"]["result"] == "warn"
    code, _ = preflight("--data", served, "--role", "gateway", "--skip", "ports", "--strict")
    assert code == 1


def test_all_errors_are_reported_together(tmp_path):
    """A changed file, a certificate that has ended, a port that is taken, too little room for the log."""
    for source in (DEMO_TARGET, DEMO_DRAFT):
        shutil.copytree(source, tmp_path / source.name)
    files = [file for source in (DEMO_TARGET, DEMO_DRAFT) for file in (tmp_path / source.name).iterdir()]
    sums = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(tmp_path)}" for file in files
    ]
    (tmp_path / "SHA256SUMS").write_text("\n".join(sums))
    template = tmp_path / DEMO_TARGET.name / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    pem = Authority("servers").issue(tmp_path, "gateway", *LOOPBACK, lasts=timedelta(seconds=-1))
    pem.key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {
            "api": {"port": taken.getsockname()[1]},
            "tls": {"certificate_file": str(pem.certificate), "key_file": str(pem.key)},
            "worker": {"model": str(tmp_path / DEMO_TARGET.name), "draft": str(tmp_path / DEMO_DRAFT.name)},
            "limits": {"time_zone": "Africa/Nairobi"},
        }
        (tmp_path / "appliance.yaml").write_text(json.dumps(settings))
        code, checks = preflight(
            *("--config", tmp_path / "appliance.yaml", "--data", tmp_path / "data", "--skip", "tokenizer"),
            *("--against", tmp_path / "SHA256SUMS", "--requests-per-day", 10**9),
        )
    assert code == 1
    failed = {name for name, check in checks.items() if check["result"] == "fail"}
    assert failed == {"weights.digests", "tls.expiry", "ports.free", "disk.space"}
    assert str(template) in checks["weights.digests"]["seen"]


def test_a_key_of_another_certificate(tmp_path):
    """Preflight reports what a start would refuse."""
    one, other = (Authority("servers").issue(tmp_path, name, *LOOPBACK) for name in ("one", "other"))
    settings = {"tls": {"certificate_file": str(one.certificate), "key_file": str(other.key)}}
    (tmp_path / "appliance.yaml").write_text(json.dumps(settings))
    code, checks = preflight("--config", tmp_path / "appliance.yaml", "--data", tmp_path, "--role", "gateway")
    assert code == 1
    assert "is not the key of the certificate" in checks["tls.files"]["seen"]


def test_settings_that_are_not_valid(tmp_path):
    """The same line as at a start; no other check runs."""
    (tmp_path / "appliance.yaml").write_text("api: {prot: 8080}")
    code, checks = preflight("--config", tmp_path / "appliance.yaml")
    assert code == 1
    assert "api.prot is not a setting" in checks["settings.file"]["seen"]
    assert {check["result"] for name, check in checks.items() if name != "settings.file"} == {"skipped"}


@pytest.mark.parametrize(
    ("options", "wrong", "word"),
    [
        ("size=64k", "disk.writable", "space"),
        ("size=4m", "disk.space", "free"),
        ("ro", "disk.writable", "ead-only"),
    ],
)
def test_a_disk_that_is_tiny_or_read_only(tmp_path, options, wrong, word):
    """A file system mounted only for this command."""
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("SKIPPED THE TINY AND THE READ-ONLY DISK: this machine does not allow mount namespaces")
    script = f'mount -t tmpfs -o {options} tmpfs "{tmp_path}" && exec "$@"'
    code, checks = preflight(
        *("--data", tmp_path, "--role", "gateway", "--skip", "ports"),
        before=(*UNSHARE, "sh", "-c", script, "sh"),
    )
    assert code == 1
    assert checks[wrong]["result"] == "fail"
    assert word in checks[wrong]["seen"]


def test_unknown_request_to_the_prober_is_refused():
    """A misspelt --skip would otherwise have no effect."""
    done = run_command("preflight", "--skip", "prots")
    assert done.returncode == 1
    assert "--skip prots is not a check" in done.stderr
