"""
The systemd units, as systemd itself reads them: without errors, and with few rights for a process.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from appliance.app.worker_process import PLUGIN
from appliance.cli import cli
from appliance.infra.settings import load_settings
from appliance.sovereignty.environment import offline_environment

ROOT = Path(__file__).parents[2]
UNITS = {path.stem: path for path in sorted((ROOT / "deploy" / "systemd").glob("*.service"))}
INSTALLED_AT = "/opt/appliance/bin/appliance"
MOST_EXPOSURE = {"appliance-gateway": 15, "appliance-worker": 20}
"""In tenths, from 0 (locked up) to 100, by `systemd-analyze security`; a unit with no hardening has 96."""
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="SKIPPED THE SYSTEMD UNITS: systemd-analyze is missing (Debian package systemd)",
)


def settings_of(unit: str) -> list[tuple[str, str]]:
    """Name and value of each line, in order; systemd lets a name occur more than once."""
    text = UNITS[unit].read_text(encoding="utf-8")
    return re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE)


@pytest.fixture(params=sorted(UNITS))
def unit(request) -> str:
    return request.param


@pytest.fixture
def verifiable(unit, tmp_path) -> Path:
    """The unit with a command that exists here: systemd checks that."""
    text = UNITS[unit].read_text(encoding="utf-8")
    assert INSTALLED_AT in text
    path = tmp_path / f"{unit}.service"
    path.write_text(text.replace(INSTALLED_AT, "/bin/true"), encoding="utf-8")
    return path


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_there_is_one_for_each_role():
    """The two that a machine without containers needs."""
    assert sorted(UNITS) == ["appliance-gateway", "appliance-worker"]


@needs_systemd
def test_systemd_analyze_reports_no_error(verifiable):
    """No unknown name, no value it would ignore with a warning."""
    answer = analyze("verify", verifiable)
    assert (answer.returncode, answer.stdout + answer.stderr) == (0, "")


@needs_systemd
def test_systemd_notices_a_mistake(verifiable):
    """So that the test above can fail."""
    verifiable.write_text(verifiable.read_text().replace("NoNewPrivileges=", "NoNewPriveleges="))
    assert "NoNewPriveleges" in analyze("verify", verifiable).stderr


@needs_systemd
def test_exposes_little(unit, verifiable):
    """By systemd's own measure."""
    answer = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE[unit]}", verifiable)
    assert answer.returncode == 0, answer.stdout[-400:] + answer.stderr


@pytest.mark.parametrize(
    "line",
    [
        ("IPAddressDeny", "any"),
        ("IPAddressAllow", "localhost"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
    ],
)
def test_unit_restricts_the_service(unit, line):
    """What the documentation of no egress promises of the units."""
    assert [value for name, value in settings_of(unit) if name == line[0]] == [line[1]]


def test_the_worker_cannot_read_the_gateways_data():
    """Another account, the directory hidden, and the one secret that it needs as a credential."""
    gateway, worker = dict(settings_of("appliance-gateway")), dict(settings_of("appliance-worker"))
    data, files = (f"/var/lib/{name}" for name in gateway["StateDirectory"].split())
    assert f"--data {data}" in gateway["ExecStart"]
    assert gateway["User"] != worker["User"]
    assert worker["InaccessiblePaths"] == f"-{data} -{files}"
    assert worker["LoadCredential"] == f"control.token:{data}/control.token"
    assert data not in worker["ExecStart"].split()
    accounts = (ROOT / "deploy" / "systemd" / "appliance.sysusers").read_text(encoding="utf-8")
    ids = dict(re.findall(r"^u (\S+) (\d+)", accounts, re.MULTILINE))
    assert set(ids) == {gateway["User"], worker["User"]}
    assert len(set(ids.values())) == 2


def test_batch_files_have_a_directory_that_may_be_a_volume_of_its_own():
    """The one that the documentation sets; systemd creates it and makes it writable."""
    name = dict(settings_of("appliance-gateway"))["StateDirectory"].split()[1]
    page = (ROOT / "docs" / "how-to" / "run-under-systemd.md").read_text(encoding="utf-8")
    assert f"directory: /var/lib/{name} " in page


def test_lets_it_raise_its_own_wall(unit):
    """The filter of system calls has Landlock's three, which older systemd does not count as harmless."""
    allowed = dict(settings_of(unit)[::-1])["SystemCallFilter"].split()
    assert {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= set(allowed)


def test_the_command_exists(unit):
    """With every option it is given."""
    words = dict(settings_of(unit))["ExecStart"].split()
    command = get_command(cli).commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


def test_variables_of_the_worker_are_settings_and_pass_the_launcher():
    """What the unit sets is known, and contradicts nothing in the offline table."""
    lines = [value for name, value in settings_of("appliance-worker") if name == "Environment"]
    variables = dict(word.split("=", 1) for line in lines for word in line.split())
    assert load_settings(environment=variables).data.control_token_file is not None
    offline_environment(variables, plugins=[PLUGIN])


def test_the_worker_reads_the_offline_table():
    """The file that `docs/how-to/run-under-systemd.md` has the operator put there."""
    assert ("EnvironmentFile", "/etc/appliance/offline.env") in settings_of("appliance-worker")
    page = (ROOT / "docs" / "how-to" / "run-under-systemd.md").read_text(encoding="utf-8")
    assert "deploy/offline.env /etc/appliance/offline.env" in page
